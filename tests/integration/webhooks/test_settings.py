"""A wrong `DELAYQ_WEBHOOKS` is refused at the start, with what is wrong and never with a secret."""

from __future__ import annotations

import base64
from datetime import timedelta
from typing import Any

import pytest

from django_delayq.conf import ConfigError
from django_delayq.contrib.webhooks.endpoints import check_endpoints, get_endpoints
from tests.integration.webhooks.conftest import OTHER_SECRET, SECRET

GOOD: dict[str, Any] = {"url": "https://billing.example.com/timeouts", "secret": SECRET, "events": ["fired"]}
TOO_SHORT = "whsec_" + base64.b64encode(b"x" * 23).decode()


def test_an_endpoint_has_defaults(settings: Any) -> None:
    settings.DELAYQ_WEBHOOKS = {"billing": GOOD}
    endpoint = get_endpoints()["billing"]
    assert (endpoint.timeout, endpoint.payload, endpoint.public_only) == (timedelta(seconds=10), False, False)
    assert endpoint.events == {"fired"} and not endpoint.policies
    assert endpoint.secrets == (bytes(range(32)),)
    assert GOOD["url"] not in repr(endpoint) and "x00" not in repr(endpoint)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"event": ["fired"]}, "Did you mean 'events'?"),
        ({"events": ["fird"]}, "Did you mean 'fired'?"),
        ({"events": ["everything"]}, "Known are: fired, dead, late, braked."),
        ({"events": []}, "a list of at least one name"),
        ({"events": "fired"}, "a list of at least one name"),
        ({"policies": "shop.order.remind"}, "a list of at least one name"),
        ({"url": "billing.example.com"}, "a URL with http or https"),
        ({"url": "ftp://billing.example.com"}, "a URL with http or https"),
        ({"url": "file:///etc/passwd"}, "a URL with http or https"),
        ({"url": "http://[::1"}, "a URL with http or https"),
        ({"url": "http://a.example:99999/"}, "a URL with http or https"),
        ({"url": "http://a.example/\r\nX: y"}, "a URL with http or https"),
        ({"url": "https://user:word@a.example/"}, "neither a user nor a fragment"),
        ({"url": None}, "a URL with http or https"),
        ({"secret": "whsec_%%%"}, "24 to 64 random bytes"),
        ({"secret": TOO_SHORT}, "It decodes to 23"),
        ({"secret": SECRET.removeprefix("whsec_")}, "'whsec_'"),
        ({"secret": []}, "a string, or a list of strings"),
        ({"secret": [SECRET, None]}, "24 to 64 random bytes"),
        ({"secret": 17}, "a string, or a list of strings, not int"),
        ({"timeout": 10}, "a timedelta of at most 60 seconds"),
        ({"timeout": timedelta(0)}, "a timedelta of at most 60 seconds"),
        ({"timeout": timedelta(minutes=2)}, "a timedelta of at most 60 seconds"),
        ({"payload": "yes"}, "True or False, not of type str"),
        ({"public_only": 1}, "True or False, not of type int"),
    ],
    ids=str,
)
def test_a_wrong_option_is_named_with_its_rule(settings: Any, changed: dict[str, Any], words: str) -> None:
    settings.DELAYQ_WEBHOOKS = {"billing": {**GOOD, **changed}}
    with pytest.raises(ConfigError) as raised:
        get_endpoints()
    assert "DELAYQ_WEBHOOKS['billing']" in str(raised.value)
    assert words in str(raised.value)
    assert [message.id for message in check_endpoints()] == ["delayq_webhooks.E001"]
    for secret in (SECRET, TOO_SHORT, "%%%", "word@", "etc/passwd"):
        assert secret.removeprefix("whsec_") not in str(raised.value)


@pytest.mark.parametrize(
    "wrong", [[GOOD], {"": GOOD}, {"a" * 101: GOOD}, {"ä": GOOD}, {1: GOOD}, {"billing": "url"}, {"billing": {}}]
)
def test_another_shape_is_refused(settings: Any, wrong: Any) -> None:
    settings.DELAYQ_WEBHOOKS = wrong
    with pytest.raises(ConfigError, match="DELAYQ_WEBHOOKS"):
        get_endpoints()


def test_missing_options_are_listed(settings: Any) -> None:
    settings.DELAYQ_WEBHOOKS = {"billing": {"url": GOOD["url"]}}
    with pytest.raises(ConfigError, match=r"\['billing'\] lacks 'secret', 'events'"):
        get_endpoints()


def test_two_secrets_are_accepted(settings: Any) -> None:
    settings.DELAYQ_WEBHOOKS = {"billing": {**GOOD, "secret": (OTHER_SECRET, SECRET)}}
    assert len(get_endpoints()["billing"].secrets) == 2


def test_a_policy_that_is_not_declared_is_a_warning(settings: Any) -> None:
    settings.DELAYQ_WEBHOOKS = {"billing": {**GOOD, "policies": ["testapp.order.remnd", "testapp.order.remind"]}}
    [message] = check_endpoints()
    assert (message.id, message.hint) == ("delayq_webhooks.W001", "Did you mean 'testapp.order.remind'?")
