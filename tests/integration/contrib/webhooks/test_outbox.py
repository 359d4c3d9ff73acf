"""Messages are written in the transaction of the outcome: neither lost, nor sent about what was rolled back."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.db import transaction
from django.test import Client
from django.utils import timezone

import django_delayq as dq
from django_delayq import Brake, GiveUp, Late, Retry, clock
from django_delayq.contrib.rest_framework.outputs import TimeoutSerializer
from django_delayq.contrib.webhooks.models import Delivery
from django_delayq.models import PolicyControl, Timeout
from django_delayq.signals import timeouts_settling
from django_delayq.testing import fire_due
from django_delayq.worker.sweep import prune
from tests.integration.contrib.webhooks.conftest import EndpointServer
from tests.support.typed import Declare
from tests.testapp.models import Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db, pytest.mark.usefixtures("use", "controls_are_read_again")]
DELIVER = "delayq_webhooks.delivery.deliver"


def due(policy: Any, count: int = 1, **options: Any) -> list[Timeout]:
    """Timeouts of new orders, due now."""
    orders = [Order.objects.create(status="new") for _ in range(count)]
    return [dq.schedule_timeout(order, policy, seconds=0, **options) for order in orders]


def events() -> list[tuple[str, str]]:
    return list(Delivery.objects.order_by("pk").values_list("event", "policy"))


@pytest.mark.parametrize("payload", [False, True])
def test_a_timeout_that_fires_sends_one_message_with_its_row_as_the_rest_api_shows_it(
    use: Callable[..., None], endpoint: EndpointServer, payload: bool
) -> None:
    use(payload=payload)
    [row] = due("testapp.order.remind", payload={"secret": 1}, key="k", reason="because")
    assert fire_due("testapp.order.remind") == 1
    assert events() == [("timeout.fired", "testapp.order.remind")]
    assert fire_due(DELIVER) == 1 and fire_due() == 0
    [message] = endpoint.received
    shown = message.body["data"]
    assert (message.path, message.headers["content-type"]) == ("/timeouts", "application/json")
    assert (message.body["type"], shown["id"]) == ("timeout.fired", row.pk)
    assert message.body["timestamp"].endswith("Z")
    assert Delivery.objects.get().delivered_at is not None
    assert shown.pop("payload", None) == ({"secret": 1} if payload else None)
    expected = TimeoutSerializer(Timeout.objects.get(pk=row.pk)).data
    for name, value in shown.items():
        is_time = isinstance(value, str) and name.endswith("_at")
        read = datetime.fromisoformat if is_time else str
        assert read(str(value)) == read(str(expected[name])), name


@pytest.mark.parametrize(("payload", "reason"), [(False, "RuntimeError"), (True, "RuntimeError: no number +49301")])
def test_a_dead_timeout_sends_one_message_with_the_text_of_its_error_only_beside_the_payload(
    use: Callable[..., None], endpoint: EndpointServer, declare: Declare, payload: bool, reason: str
) -> None:
    def handler(order: Order, timeout: Timeout) -> None:
        raise RuntimeError("no number +49301")

    use(payload=payload)
    [row] = due(declare(Order, handler, name="failing", retry=dq.Retry([0])))
    fire_due(row.policy, raises=False)
    assert events() == [("timeout.dead", row.policy)], "a failed attempt sends nothing"
    assert fire_due(DELIVER) == 1
    [body] = endpoint.bodies
    assert (body["type"], body["data"]["reason"]) == ("timeout.dead", reason)
    assert ("+49301" in str(body)) is payload


@pytest.mark.parametrize(("permissions", "status"), [(["delivery"], 403), (["delivery", "timeout"], 200)])
def test_who_may_see_its_timeout_sees_a_message(
    use: Callable[..., None], client: Client, permissions: list[str], status: int
) -> None:
    use(payload=True)
    due("testapp.order.remind", payload={"to": "jane"})
    fire_due("testapp.order.remind")
    user = User.objects.create_user("viewer", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=[f"view_{name}" for name in permissions]))
    client.force_login(user)
    message = f"{Delivery.objects.get().pk}/change/"
    pages = [client.get(f"/admin/delayq_webhooks/delivery/{page}") for page in ("", message)]
    assert [page.status_code for page in pages] == [status, status]
    assert (b"jane" in pages[1].content) is (status == 200)


@pytest.mark.parametrize("atomic", [True, False])
def test_a_handler_that_gives_up_or_returns_is_reported_once(declare: Declare, atomic: bool) -> None:
    def give_up(*_: Any) -> Any:
        raise GiveUp("no such customer")

    policies = [declare(Order, give_up, name="hopeless", atomic=atomic), declare(Order, name="quiet", atomic=atomic)]
    for policy in policies:
        due(policy)
        fire_due(policy, raises=False)
    assert events() == [("timeout.dead", policies[0].label), ("timeout.fired", policies[1].label)]
    assert "no such customer" in Delivery.objects.order_by("pk")[0].body


@pytest.mark.parametrize(("then", "expected"), [("skip", ["timeout.late"]), ("dead", ["timeout.dead", "timeout.late"])])
def test_a_timeout_that_was_too_late_is_reported(declare: Declare, then: Any, expected: list[str]) -> None:
    policy = declare(Order, name="strict", late=Late(after=timedelta(minutes=1), then=then))
    [row] = due(policy)
    early = timezone.now() - timedelta(hours=1)
    Timeout.objects.filter(pk=row.pk).update(due_at=early, run_at=early, created_at=early, ready_at=None)
    fire_due(policy)
    assert [event for event, _ in events()] == expected


def test_a_policy_that_its_brake_pauses_is_reported(declare: Declare, endpoint: EndpointServer) -> None:
    policy = declare(Order, name="braked", brake=Brake(2, per=timedelta(minutes=10)))
    due(policy, 4)
    fire_due(policy)
    assert PolicyControl.objects.get(policy=policy.label).stop == "paused"
    assert [event for event, _ in events()].count("policy.braked") == 1
    fire_due(DELIVER)
    [body] = [each for each in endpoint.bodies if each["type"] == "policy.braked"]
    told: dict[str, Any] = {"policy": policy.label, "reason": PolicyControl.objects.get(policy=policy.label).reason}
    told |= {"fired": 3, "most": 2, "per_seconds": 600.0}
    assert body["data"] == {**told, "paused_at": body["data"]["paused_at"]}


def test_an_endpoint_gets_only_its_events_of_its_policies(
    use: Callable[..., None], declare: Declare, settings: Any
) -> None:
    policy = declare(Order, name="renamed", aliases=("former",))
    use(events=["dead"])
    due("testapp.order.remind")
    fire_due("testapp.order.remind")
    assert events() == []
    use(policies=["testapp.order.former"])
    due(policy)
    due("testapp.order.remind")
    fire_due(policy)
    fire_due("testapp.order.remind")
    assert events() == [("timeout.fired", policy.label)]


def test_messages_about_messages_are_never_sent(use: Callable[..., None], endpoint: EndpointServer) -> None:
    endpoint.answers += [410]
    due("testapp.order.remind", 2)
    fire_due()
    fire_due(raises=False)
    states = set(Timeout.objects.filter(policy=DELIVER).values_list("state", flat=True))
    assert states == {"dead", "fired"}
    assert len(events()) == len(endpoint.received) == 2


@pytest.mark.parametrize("atomic", [True, False])
def test_if_the_message_cannot_be_written_the_outcome_is_not_either(declare: Declare, atomic: bool) -> None:
    policy = declare(Order, lambda order, _: order.save(), name="careful", atomic=atomic, retry=Retry([0, 0]))
    refused: list[int] = []

    def refuse(timeouts: list[Timeout], **_: Any) -> None:
        if timeouts[0].policy == policy.label and not refused:
            refused.append(1)
            raise RuntimeError("the outbox is full")

    due(policy)
    timeouts_settling.connect(refuse)
    try:
        fire_due(policy, raises=False)
        fire_due(policy, raises=False)
    finally:
        timeouts_settling.disconnect(refuse)
    assert refused == [1]
    assert Timeout.objects.get(policy=policy.label).state in {"fired", "firing"}
    fired = Timeout.objects.filter(policy=policy.label, state="fired").count()
    assert events() == [("timeout.fired", policy.label)] * fired


def test_messages_are_deleted_with_their_timeouts(endpoint: EndpointServer) -> None:
    now = clock.now()
    with clock.set_to(now - timedelta(days=100)):
        endpoint.answers += [410]
        due("testapp.order.remind", 2)
        fire_due()
        fire_due(raises=False)
    due("testapp.order.remind")
    fire_due()
    assert Delivery.objects.count() == 3
    Timeout.objects.filter(policy=DELIVER, state="dead").update(settled_at=now)
    prune("default")
    kept = Delivery.objects.order_by("pk")
    assert [row.timeouts.get().state for row in kept] == ["dead", "fired"]


@pytest.mark.django_db(transaction=True)
def test_what_is_rolled_back_sends_nothing() -> None:
    with pytest.raises(RuntimeError), transaction.atomic():
        due("testapp.order.remind")
        fire_due("testapp.order.remind")
        assert events() != []
        raise RuntimeError
    assert events() == []
