"""What endpoints get, and what they may do: answer late, never, or nonsense, redirect, hang, and be restored later."""

from __future__ import annotations

import base64
import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

import django_delayq as dq
from django_delayq import clock, operations
from django_delayq.conf import ConfigError
from django_delayq.contrib.webhooks import sending
from django_delayq.contrib.webhooks.endpoints import check_endpoints, get_endpoints
from django_delayq.contrib.webhooks.models import Delivery
from django_delayq.models import Timeout
from django_delayq.testing import fire_due, travel
from tests.engine.certificates import Authority, find_openssl
from tests.integration.contrib.webhooks.conftest import OTHER_SECRET, SECRET, EndpointServer
from tests.support.typed import Log, Patch
from tests.support.waiting import wait_until
from tests.support.workers import RunningWorker, needs_more_connections
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db
DELIVER = "delayq_webhooks.delivery.deliver"
SHORT = timedelta(milliseconds=300)


@pytest.fixture
def message(use: Callable[..., None], settings: Any) -> Delivery:
    """One that is due, and is repeated after seconds, not at once."""
    settings.DELAYQ = {**settings.DELAYQ, "RETRY": dq.Retry([10, 100])}
    dq.schedule_timeout(Order.objects.create(status="new"), "testapp.order.remind", seconds=0)
    assert fire_due("testapp.order.remind") == 1
    found: Delivery = Delivery.objects.get()
    return found


def row_of(message: Delivery) -> Timeout:
    return Timeout.objects.get(policy=DELIVER, object_id=str(message.pk))


def failure_of(message: Delivery) -> str:
    """Try to send it, and return why that failed."""
    assert fire_due(DELIVER, raises=False) == 0
    row = row_of(message)
    assert (row.state, row.attempts, row.errors[-1]["error"]) == ("pending", 1, "DeliveryFailed")
    message.refresh_from_db()
    assert message.delivered_at is None
    return str(row.errors[-1]["message"])


def test_a_message_is_signed_as_standard_webhooks_describes(
    use: Callable[..., None], endpoint: EndpointServer, message: Delivery
) -> None:
    use("/long", secret=[OTHER_SECRET, SECRET])  # while a secret is exchanged; and the body of an answer is not read
    assert fire_due(DELIVER) == 1
    [received] = endpoint.received
    assert received.headers["webhook-id"] == message.message_id
    assert received.headers["webhook-timestamp"].isdigit()
    assert received.is_signed_with(SECRET) and received.is_signed_with(OTHER_SECRET)
    received.content += b" "
    assert not received.is_signed_with(SECRET)


def test_the_signature_is_that_of_the_published_example(settings: Any) -> None:
    """The one that the verification pages of Standard Webhooks and Svix show."""
    settings.DELAYQ_WEBHOOKS = {
        "svix": {"url": "https://a.example", "secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "events": ["fired"]}
    }
    signed = sending.signed(
        get_endpoints()["svix"], "msg_p5jXN8AQM9LWM0D4loKWxJek", b'{"test": 2432232314}', 1614265330
    )
    assert signed["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_message_is_repeated_with_its_id_until_the_endpoint_is_gone_and_when_an_operator_retries_it(
    endpoint: EndpointServer, message: Delivery
) -> None:
    endpoint.answers += [500, 404, 410]
    assert "status 500" in failure_of(message)
    with travel(minutes=1):
        fire_due(DELIVER, raises=False)
    with travel(hours=1):
        fire_due(DELIVER, raises=False)
    row = row_of(message)
    assert (row.state, row.cause, row.attempts) == ("dead", "handler", 3) and "410" in row.reason
    operations.retry(row, by="script:test", reason="the endpoint is repaired")
    assert fire_due(DELIVER) == 1
    assert [each.headers["webhook-id"] for each in endpoint.received] == [message.message_id] * 4
    assert len({each.content for each in endpoint.received}) == 1
    assert all(each.is_signed_with(SECRET) for each in endpoint.received)
    assert Delivery.objects.get().delivered_at is not None


LATE = "Endpoint 'billing' has not answered within 0.3 s."
REFUSED = "Endpoint 'billing' cannot be reached: "
PRIVATE = "Endpoint 'billing' has an address that is not public."
FAILURES: dict[str, tuple[dict[str, Any], str, bool]] = {
    **{path: ({"timeout": SHORT}, LATE, True) for path in ("/hangs", "/dribbles")},
    **{path: ({}, REFUSED, True) for path in ("/lies", "/closes")},
    "/redirects": ({}, "Endpoint 'billing' has answered with the status 307", True),
    "down": ({"url": "http://127.0.0.1:1/"}, f"{REFUSED}ConnectionRefusedError.", False),
    "private": ({"public_only": True}, PRIVATE, False),
}
"""How an endpoint behaves, what is then stored, and whether it got the message."""


@pytest.mark.parametrize("kind", FAILURES)
def test_an_endpoint_that_answers_late_never_or_nonsense_has_failed(
    use: Callable[..., None], endpoint: EndpointServer, message: Delivery, monkeypatch: Patch, kind: str
) -> None:
    options, words, is_received = FAILURES[kind]
    if kind == "private":  # one of several addresses
        names(monkeypatch, lambda _: ["8.8.8.8", "127.0.0.1"])
        options |= {"url": endpoint.url.replace("127.0.0.1", "endpoint.example")}
    use(kind if kind.startswith("/") else "/timeouts", **options)
    assert failure_of(message).startswith(words)
    assert [each.path for each in endpoint.received] == ([kind] if is_received else []), "no redirect is followed"


@pytest.mark.usefixtures("message")
@pytest.mark.skipif(find_openssl() is None, reason="needs the program openssl")
def test_a_message_is_sent_by_https_to_a_server_that_is_verified(
    use: Callable[..., None], endpoint: EndpointServer, tmp_path: Path, monkeypatch: Patch
) -> None:
    authority = Authority.create(tmp_path)
    server = authority.sign("server")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    sending._tls.cache_clear()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server.certificate, server.key)
    endpoint.secure(context)
    use(url=endpoint.url.replace("http:", "HTTPS:"))
    try:
        assert fire_due(DELIVER) == 1
    finally:
        sending._tls.cache_clear()


@pytest.fixture
def full_port() -> Iterator[int]:
    """A port that accepts no connection: the queue of its server is full."""
    with socket.socket() as bound, contextlib.ExitStack() as stack:
        bound.bind(("127.0.0.1", 0))
        bound.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(bound.getsockname())
        yield bound.getsockname()[1]


def names(monkeypatch: Patch, answer: Callable[[int], list[str]]) -> None:
    """Replace the name server by one that has these addresses for `endpoint.example`."""
    real = socket.getaddrinfo

    def look_up(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        hosts = answer(port) if host == "endpoint.example" else [host]
        return [each for found in hosts for each in real(found, port, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


def test_an_address_that_does_not_answer_leaves_time_for_the_next_one(
    use: Callable[..., None], endpoint: EndpointServer, message: Delivery, full_port: int, monkeypatch: Patch
) -> None:
    names(monkeypatch, lambda _: ["127.0.0.2", "127.0.0.1"])
    port, connect = int(endpoint.url.rpartition(":")[2]), socket.create_connection

    def first_is_full(place: Any, *args: Any) -> socket.socket:
        return connect(("127.0.0.1", full_port) if place[0] == "127.0.0.2" else place, *args)

    monkeypatch.setattr(socket, "create_connection", first_is_full)
    use(url=f"http://endpoint.example:{port}/", timeout=timedelta(seconds=4))
    assert fire_due(DELIVER) == 1


def test_a_look_up_that_hangs_has_the_same_limit_and_nothing_is_sent_afterwards(
    use: Callable[..., None], endpoint: EndpointServer, message: Delivery, monkeypatch: Patch
) -> None:
    may_answer = threading.Event()
    names(monkeypatch, lambda _: ["127.0.0.1"] * may_answer.wait(60))
    use(url=endpoint.url.replace("127.0.0.1", "endpoint.example"), timeout=SHORT)
    before = {*threading.enumerate()}
    assert failure_of(message) == LATE
    late = {*threading.enumerate()} - before
    may_answer.set()
    for thread in late:
        thread.join(60)
    assert late and endpoint.received == []


PUBLIC = ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"]
OTHERS = [
    *("10.0.0.1", "127.0.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1", "239.1.1.1", "240.0.0.1"),
    *("::1", "::", "fe80::1%1", "fc00::1", "fec0::1", "ff02::1", "ff0e::1", "::127.0.0.1", "2001:db8::1"),
    *("::ffff:10.0.0.1", "64:ff9b::10.0.0.1", "64:ff9b::224.0.0.1", "64:ff9b:1::1", "2002:0a00:1::1", "2001:0:1::1"),
]


def test_public_addresses_lead_to_the_same_host_everywhere() -> None:
    assert [each for each in (*PUBLIC, *OTHERS) if sending.is_public(each)] == PUBLIC


def test_a_worker_that_does_not_know_the_endpoint_yet_tries_again(
    use: Callable[..., None], settings: Any, message: Delivery
) -> None:
    settings.DELAYQ_WEBHOOKS = {}
    assert failure_of(message) == "There is no endpoint 'billing' in DELAYQ_WEBHOOKS."
    use()
    with travel(minutes=1):
        assert fire_due(DELIVER) == 1


def test_neither_secrets_nor_urls_are_logged_stored_or_shown(
    use: Callable[..., None], message: Delivery, caplog: Log, client: Client
) -> None:
    caplog.set_level(logging.DEBUG)
    client.force_login(User.objects.create_superuser("boss"))
    for path in ("/closes?token=s3cr3t", "/redirects?token=s3cr3t", "/x?token=s3cr3t", "/hangs?token=s3cr3t"):
        use(path, timeout=SHORT)
        fire_due(DELIVER, raises=False)
        Timeout.objects.filter(policy=DELIVER).update(run_at=Timeout.objects.earliest("created_at").created_at)
    row = row_of(message)
    pages = [f"/admin/delayq_webhooks/delivery/{message.pk}/change/", "/admin/delayq_webhooks/delivery/"]
    pages.append(f"/admin/django_delayq/timeout/{row.pk}/change/")
    answers = [client.get(page) for page in pages]
    assert [answer.status_code for answer in answers] == [200] * 3
    seen = caplog.text + str(row.history) + row.reason + message.body + "".join(str(each.content) for each in answers)
    assert message.message_id in seen
    for secret in (SECRET, SECRET.removeprefix("whsec_"), "s3cr3t", "?token"):
        assert secret not in seen


def test_messages_are_read_only_in_the_admin(message: Delivery, client: Client) -> None:
    client.force_login(User.objects.create_superuser("boss"))
    assert client.get("/admin/delayq_webhooks/delivery/add/").status_code == 403
    page = f"/admin/delayq_webhooks/delivery/{message.pk}/"
    assert client.post(f"{page}delete/", {"post": "yes"}).status_code == 403
    client.post(f"{page}change/", {"body": "{}"})
    assert Delivery.objects.get().body == message.body
    found = client.get("/admin/delayq_webhooks/delivery/", {"q": message.message_id, "delivered_at__isempty": "1"})
    assert message.message_id in found.content.decode()


GOOD: dict[str, Any] = {"url": "https://billing.example.com/timeouts", "secret": SECRET, "events": ["fired"]}


TOO_SHORT = "whsec_" + base64.b64encode(b"x" * 23).decode()


LIST, ADDRESS, LIMIT = "a list of at least one name", "a URL with http or https", "a timedelta of at most 60 seconds"
WRONG: list[tuple[dict[str, Any], str]] = [
    *(({"event": ["fired"]}, "Did you mean 'events'?"), ({"events": ["fird"]}, "Did you mean 'fired'?")),
    *(({"events": ["everything"]}, "Known are: fired, dead, late, braked."), ({"events": "fired"}, LIST)),
    *(({"url": url}, ADDRESS) for url in ("ftp://billing.example.com", "http://[::1", None, "http://a.example:99999/")),
    *(({"url": "http://a.example/\r\nX: y"}, ADDRESS), ({"url": "https://user:word@a.example/"}, "neither a user nor")),
    *(({"secret": secret}, "24 to 64 random bytes") for secret in ("whsec_%%%", [SECRET, None])),
    *(({"secret": TOO_SHORT}, "It decodes to 23"), ({"secret": SECRET.removeprefix("whsec_")}, "'whsec_'")),
    *(({"secret": []}, "a string, or a list of strings"), ({"secret": 17}, "a string, or a list of strings, not int")),
    *(({"timeout": timeout}, LIMIT) for timeout in (10, timedelta(0), timedelta(minutes=2))),
    *(({"payload": "yes"}, "True or False, not of type str"), ({"public_only": 1}, "True or False, not of type int")),
]


@pytest.mark.parametrize(("changed", "words"), WRONG, ids=str)
def test_a_wrong_option_is_named_with_its_rule(settings: Any, changed: dict[str, Any], words: str) -> None:
    settings.DELAYQ_WEBHOOKS = {"billing": {**GOOD, **changed}}
    with pytest.raises(ConfigError) as raised:
        get_endpoints()
    assert "DELAYQ_WEBHOOKS['billing']" in str(raised.value)
    assert words in str(raised.value)
    assert [message.id for message in check_endpoints()] == ["delayq_webhooks.E001"]
    for secret in (SECRET, TOO_SHORT, "%%%", "word@", "etc/passwd"):
        assert secret.removeprefix("whsec_") not in str(raised.value)


def test_another_shape_is_refused_and_missing_options_are_listed(settings: Any) -> None:
    shapes: list[Any] = [
        [GOOD],
        *({name: GOOD} for name in ("", "a" * 101, "ä", 1)),
        {"billing": "url"},
        {"billing": {}},
    ]
    for wrong in shapes:
        settings.DELAYQ_WEBHOOKS = wrong
        with pytest.raises(ConfigError, match="DELAYQ_WEBHOOKS"):
            get_endpoints()
    settings.DELAYQ_WEBHOOKS = {"billing": {"url": GOOD["url"]}}
    with pytest.raises(ConfigError, match=r"\['billing'\] lacks 'secret', 'events'"):
        get_endpoints()


def test_an_endpoint_has_defaults_and_a_policy_that_is_not_declared_is_a_warning(settings: Any) -> None:
    policies = ["testapp.order.remnd", "testapp.order.remind"]
    settings.DELAYQ_WEBHOOKS = {"billing": {**GOOD, "secret": (OTHER_SECRET, SECRET), "policies": policies}}
    endpoint = get_endpoints()["billing"]
    assert (endpoint.timeout, endpoint.payload, endpoint.public_only) == (timedelta(seconds=10), False, False)
    assert len(endpoint.secrets) == 2 and GOOD["url"] not in repr(endpoint) and "x00" not in repr(endpoint)
    [message] = check_endpoints()
    assert (message.id, message.hint) == ("delayq_webhooks.W001", "Did you mean 'testapp.order.remind'?")


DELIVER = "delayq_webhooks.delivery.deliver"


def messages(endpoint: str, count: int) -> list[Delivery]:
    options = {"event": "timeout.fired", "policy": "testapp.order.remind", "body": "{}", "created_at": clock.now()}
    return [Delivery.objects.create(endpoint=endpoint, **options) for _ in range(count)]


@needs_more_connections
@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("redis_url")
def test_all_messages_to_others_are_delivered_while_an_endpoint_hangs(endpoint: EndpointServer, settings: Any) -> None:
    """It had all threads of the worker for a minute, and then again."""
    common = {"secret": SECRET, "events": ["fired"], "timeout": timedelta(seconds=60)}
    settings.DELAYQ_WEBHOOKS = {name: {"url": f"{endpoint.url}/{name}", **common} for name in ("hangs", "good")}
    for _ in range(10):
        messages("hangs", 2)
        messages("good", 2)
    running = RunningWorker(concurrency=4)
    try:
        good = Delivery.objects.filter(endpoint="good")
        wait_until(lambda: not good.filter(delivered_at=None).exists(), "the others are delivered", 45)
        assert 1 <= [each.path for each in endpoint.received].count("/hangs") <= 2
        assert not Delivery.objects.filter(endpoint="hangs").exclude(delivered_at=None).exists()
    finally:
        endpoint.ended.set()
        running.stop()


@pytest.mark.django_db
def test_after_two_time_outs_in_a_row_messages_wait_untried_until_it_answers(
    use: Callable[..., None], endpoint: EndpointServer, settings: Any
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "RETRY": dq.Retry([10] * 20)}
    use("/hangs", timeout=timedelta(seconds=1))
    messages("billing", 5)
    fire_due(DELIVER, raises=False)
    rows = Timeout.objects.filter(policy=DELIVER).order_by("pk")
    tried = [row.pk for row in rows if row.attempts]
    assert 2 <= len(tried) == len(endpoint.received) < 5  # more than two where a test takes seconds for a message
    assert {row.state for row in rows} == {"pending"}
    assert all("has not answered other messages" in str(row.history) for row in rows if row.pk not in tried)
    endpoint.ended.set()  # from now on it closes the connection at once

    def all_are_tried() -> bool:
        with travel(hours=len(endpoint.received)):
            fire_due(DELIVER, raises=False)
        return all(row.attempts for row in rows.all())

    wait_until(all_are_tried)
