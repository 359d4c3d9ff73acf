"""What endpoints get, and what they may do: answer late, never, or nonsense, redirect, and be restored later."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

import django_delayq as dq
from django_delayq import operations
from django_delayq.contrib.webhooks import sending
from django_delayq.contrib.webhooks.endpoints import get_endpoints
from django_delayq.contrib.webhooks.models import Delivery
from django_delayq.models import Timeout
from django_delayq.testing import fire_due, travel
from tests.integration.webhooks.conftest import OTHER_SECRET, SECRET, EndpointServer
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


def test_a_message_is_signed_as_standard_webhooks_describes(endpoint: EndpointServer, message: Delivery) -> None:
    assert fire_due(DELIVER) == 1
    [received] = endpoint.received
    assert received.headers["webhook-id"] == message.message_id
    assert received.headers["webhook-timestamp"].isdigit()
    assert received.is_signed_with(SECRET)
    assert not received.is_signed_with(OTHER_SECRET)
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


def test_while_a_secret_is_exchanged_both_sign(
    use: Callable[..., None], endpoint: EndpointServer, message: Delivery
) -> None:
    use(secret=[OTHER_SECRET, SECRET])
    assert fire_due(DELIVER) == 1
    assert endpoint.received[0].is_signed_with(SECRET)
    assert endpoint.received[0].is_signed_with(OTHER_SECRET)


def test_a_message_is_repeated_with_the_same_id_until_it_is_accepted(
    endpoint: EndpointServer, message: Delivery
) -> None:
    endpoint.answers += [500, 404]
    assert "status 500" in failure_of(message)
    with travel(minutes=1):
        fire_due(DELIVER, raises=False)
    with travel(hours=1):
        fire_due(DELIVER)
    assert [each.headers["webhook-id"] for each in endpoint.received] == [message.message_id] * 3
    assert len({each.content for each in endpoint.received}) == 1
    assert all(each.is_signed_with(SECRET) for each in endpoint.received)
    assert row_of(message).state == "fired"


def test_an_endpoint_that_never_accepts_leaves_a_dead_timeout_which_an_operator_retries(
    use: Callable[..., None], settings: Any, endpoint: EndpointServer, message: Delivery
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "RETRY": dq.Retry([0, 0])}
    endpoint.answers += [500, 500, 500]
    fire_due(DELIVER, raises=False)
    assert (row_of(message).state, len(endpoint.received)) == ("dead", 3)
    operations.retry(row_of(message), by="script:test", reason="the endpoint is repaired")
    assert fire_due(DELIVER) == 1
    assert Delivery.objects.get().delivered_at is not None


def test_an_endpoint_that_is_gone_gets_no_further_attempt(endpoint: EndpointServer, message: Delivery) -> None:
    endpoint.answers += [410]
    fire_due(DELIVER, raises=False)
    row = row_of(message)
    assert (row.state, row.cause, row.attempts) == ("dead", "handler", 1)
    assert "410" in row.reason


@pytest.mark.parametrize("path", ["/hangs", "/dribbles"])
def test_an_endpoint_that_does_not_answer_in_time_has_failed(
    use: Callable[..., None], message: Delivery, path: str
) -> None:
    use(path, timeout=SHORT)
    assert failure_of(message) == "Endpoint 'billing' has not answered within 0.3 s."


@pytest.mark.parametrize("path", ["/lies", "/closes"])
def test_an_endpoint_that_answers_nonsense_has_failed(use: Callable[..., None], message: Delivery, path: str) -> None:
    use(path)
    assert failure_of(message).startswith("Endpoint 'billing' cannot be reached: ")


def test_redirects_are_not_followed(use: Callable[..., None], endpoint: EndpointServer, message: Delivery) -> None:
    use("/redirects")
    assert "status 307" in failure_of(message)
    assert [each.path for each in endpoint.received] == ["/redirects"]


def test_the_body_of_an_answer_is_not_read(use: Callable[..., None], message: Delivery) -> None:
    use("/long")
    assert fire_due(DELIVER) == 1


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port on which nothing listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def test_an_endpoint_that_is_down_has_failed(use: Callable[..., None], message: Delivery, closed_port: int) -> None:
    use(url=f"http://127.0.0.1:{closed_port}/")
    assert failure_of(message) == "Endpoint 'billing' cannot be reached: ConnectionRefusedError."


def test_a_server_without_tls_gets_nothing_by_https(
    use: Callable[..., None], endpoint: EndpointServer, message: Delivery
) -> None:
    use(url=endpoint.url.replace("http:", "https:"))
    assert "cannot be reached: SSL" in failure_of(message)
    assert endpoint.received == []


def test_with_public_only_nothing_is_sent_to_a_private_address(
    use: Callable[..., None], endpoint: EndpointServer, message: Delivery
) -> None:
    use(public_only=True)
    assert failure_of(message) == "Endpoint 'billing' has an address that is not public."
    assert endpoint.received == []


def test_a_worker_that_does_not_know_the_endpoint_yet_tries_again(
    use: Callable[..., None], settings: Any, message: Delivery
) -> None:
    settings.DELAYQ_WEBHOOKS = {}
    assert failure_of(message) == "There is no endpoint 'billing' in DELAYQ_WEBHOOKS."
    use()
    with travel(minutes=1):
        assert fire_due(DELIVER) == 1


def test_neither_secrets_nor_urls_are_logged_stored_or_shown(
    use: Callable[..., None], message: Delivery, caplog: pytest.LogCaptureFixture, client: Client
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
