"""The setting `DELAYQ_WEBHOOKS`: where messages are sent, about what, and with which secret.

    DELAYQ_WEBHOOKS = {
        "billing": {
            "url": "https://billing.example.com/timeouts",
            "secret": os.environ["BILLING_WEBHOOK_SECRET"],
            "events": ["fired", "dead"],
        },
    }

No message about a wrong setting shows a URL or a secret.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlsplit

from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Error, Warning
from django.core.signals import setting_changed

from django_delayq.conf import ConfigError
from django_delayq.exceptions import suggestion
from django_delayq.policy.policies import registry

EVENTS: Final = ("fired", "dead", "late", "braked")
PREFIX: Final = "whsec_"
SECRET_BYTES: Final = range(24, 65)
"""The lengths that Standard Webhooks allows: a shorter secret can be guessed."""
MAX_NAME: Final = 100
"""The length of the column."""
MAX_TIME: Final = timedelta(seconds=60)
"""A handler thread waits as long. An endpoint that needs longer should answer first, and work afterwards."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An entry of `DELAYQ_WEBHOOKS`.

    Attributes:
        name: its key.
        url: http or https.
        secrets: the bytes to sign with. The setting `secret` is a string, or a list: the new one and the former one.
        events: which of `EVENTS` are sent.
        policies: labels; empty: all.
        payload: send the payload of timeouts, too.
        timeout: how long the endpoint may take to answer.
        public_only: refuse an address that is not public.
    """

    name: str
    url: str = field(repr=False)
    secrets: tuple[bytes, ...] = field(repr=False)
    events: frozenset[str]
    policies: frozenset[str] = frozenset()
    payload: bool = False
    timeout: timedelta = timedelta(seconds=10)
    public_only: bool = False


OPTIONS: Final = ("secret", *(each.name for each in fields(Endpoint) if each.name not in ("name", "secrets")))


@functools.cache
def get_endpoints() -> dict[str, Endpoint]:
    """Return the endpoints by name. Raises ConfigError."""
    raw = getattr(django_settings, "DELAYQ_WEBHOOKS", {})
    if not isinstance(raw, dict):
        raise ConfigError(f"DELAYQ_WEBHOOKS must be a dict of endpoints by name, not {type(raw).__name__}.")
    return {name: _endpoint(name, options) for name, options in raw.items()}


def _endpoint(name: Any, options: Any) -> Endpoint:
    if not isinstance(name, str) or not (name.isascii() and name.isprintable() and 0 < len(name) <= MAX_NAME):
        raise ConfigError(f"Names in DELAYQ_WEBHOOKS are strings of 1 to {MAX_NAME} printable characters of ASCII.")
    place = f"DELAYQ_WEBHOOKS[{name!r}]"
    if not isinstance(options, dict):
        raise ConfigError(f"{place} must be a dict, not {type(options).__name__}.")
    for option in options:
        if option not in OPTIONS:
            hint = suggestion(option, OPTIONS, f"Known are: {', '.join(OPTIONS)}.")
            raise ConfigError(f"Unknown option {option!r} in {place}. {hint}")
    if missing := [option for option in ("url", "secret", "events") if option not in options]:
        raise ConfigError(f"{place} lacks {', '.join(map(repr, missing))}.")
    values = {option: _checked(f"{place}[{option!r}]", option, value) for option, value in options.items()}
    return Endpoint(name=name, secrets=values.pop("secret"), **values)


def _checked(place: str, option: str, value: Any) -> Any:
    """Return the value of `option` as `Endpoint` has it. Raises ConfigError."""
    match option:
        case "url":
            return _url(place, value)
        case "secret":
            secrets = [value] if isinstance(value, str) else value
            if not isinstance(secrets, list | tuple) or not secrets:
                raise ConfigError(f"{place} must be a string, or a list of strings, not {type(value).__name__}.")
            return tuple(_secret(place, each) for each in secrets)
        case "events" | "policies":
            return frozenset(_names(place, value, EVENTS if option == "events" else None))
        case "timeout":
            if not isinstance(value, timedelta) or not timedelta(0) < value <= MAX_TIME:
                raise ConfigError(f"{place} must be a timedelta of at most {MAX_TIME.seconds} seconds, not {value!r}.")
        case _ if not isinstance(value, bool):
            raise ConfigError(f"{place} must be True or False, not of type {type(value).__name__}.")
    return value


def _url(place: str, value: Any) -> str:
    rule = f"{place} must be a URL with http or https and a host, in ASCII"
    try:
        parts = urlsplit(value if isinstance(value, str) else "")
        is_url = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise ConfigError(f"{rule}.") from None
    if not is_url or not value.isascii() or not value.isprintable() or " " in value:
        raise ConfigError(f"{rule}.")
    if parts.username is not None or parts.fragment:
        raise ConfigError(f"{place} must have neither a user nor a fragment: the signature is what an endpoint checks.")
    return str(value)


def _secret(place: str, value: Any) -> bytes:
    rule = f"{place} must be {PREFIX!r} and the base64 of {SECRET_BYTES.start} to {SECRET_BYTES.stop - 1} random bytes"
    try:
        secret = base64.b64decode(value.removeprefix(PREFIX), validate=True)
    except (AttributeError, ValueError):
        raise ConfigError(f"{rule}.") from None
    if not value.startswith(PREFIX) or len(secret) not in SECRET_BYTES:
        raise ConfigError(f"{rule}. It decodes to {len(secret)}.")
    return secret


def _names(place: str, value: Any, known: tuple[str, ...] | None) -> Iterator[str]:
    if not isinstance(value, list | tuple | set | frozenset) or not value:
        raise ConfigError(f"{place} must be a list of at least one name, not {value!r}.")
    for name in value:
        if known is not None and name not in known:
            hint = suggestion(name, known, f"Known are: {', '.join(known)}.")
            raise ConfigError(f"{place} has {name!r}. {hint}")
        yield name


def check_endpoints(**_: Any) -> Iterator[CheckMessage]:
    """Check the setting, and that its policies are declared."""
    try:
        endpoints = get_endpoints()
    except ConfigError as error:
        yield Error(str(error), id="delayq_webhooks.E001")
        return
    known = [policy.label for policy in registry]
    for endpoint in endpoints.values():
        for label in sorted(endpoint.policies):
            if registry.get(label) is None:
                yield Warning(
                    f"DELAYQ_WEBHOOKS[{endpoint.name!r}] names the policy {label!r}, which is not declared.",
                    hint=suggestion(label, known, "Give the label of a policy: app.model.name."),
                    id="delayq_webhooks.W001",
                )


def _clear_cache(*, setting: str, **_: Any) -> None:
    if setting == "DELAYQ_WEBHOOKS":
        get_endpoints.cache_clear()


setting_changed.connect(_clear_cache, dispatch_uid="django_delayq.webhooks")
