"""What a round keeps when its condition holds again, beside its deadline and its extensions: see `test_histories`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq import clock, operations, testing
from django_delayq.models import Timeout
from tests.integration.arming.conftest import SINCE
from tests.support.seen import sql_of
from tests.testapp.models import Order

Declare = Callable[..., dq.TimeoutPolicy[Any]]
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("controls_are_read_again")]
MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)
PAYS: dict[str, Any] = {"name": "pays", "after": 30 * MINUTE, "since": "created_at", "when": Q(status="unpaid")}
of_each_kind = pytest.mark.parametrize("since", SINCE.values(), ids=list(SINCE))


def new_order(begin: Any = None, **values: Any) -> Order:
    return Order.objects.create(status="unpaid", created_at=begin or timezone.now(), **values)


def set_status(order: Order, status: str) -> None:
    order.status = status
    order.save()


def fail_to_pay() -> None:
    """Make the condition of all orders false, and then true again."""
    for status in ("paying", "unpaid"):
        for order in Order.objects.all():
            set_status(order, status)


def failing(order: Order, timeout: Timeout) -> None:
    raise RuntimeError("the partner is down")


def test_a_request_to_fire_now_is_not_kept_after_an_attempt_that_failed(declare: Declare) -> None:
    begin = timezone.now()
    policy = declare(Order, failing, retry=dq.Retry([3600]), **PAYS)
    order = new_order(begin)
    dq.extend_timeout(order, policy, minutes=60)
    operations.fire_now(order.timeouts.get(policy=policy.label), by="admin:a")
    testing.fire_due(policy, raises=False)
    fail_to_pay()
    assert dq.get_deadline(order, policy) == begin + 30 * MINUTE


@pytest.mark.parametrize("what", ["hold", "shift"])
def test_a_request_to_fire_now_is_not_kept_because_all_deadlines_were_moved_since(declare: Declare, what: str) -> None:
    """The partner is down, so the policy is held. Nothing fires early when a payment fails later."""
    begin, days, later = timezone.now(), 20 * DAY, MINUTE
    policy = declare(Order, failing, retry=dq.Retry([86400]), **PAYS | {"after": days})
    order = new_order(begin)
    operations.fire_now(order.timeouts.get(policy=policy.label), by="admin:a")
    testing.fire_due(policy, raises=False)
    if what == "hold":
        later = 30 * MINUTE
        with clock.set_to(begin + later):
            operations.hold(policy, by="admin:a")
        with clock.set_to(begin + 2 * later):
            operations.resume(policy, by="admin:a")
    else:
        operations.change_delay(policy, days + later, by="admin:a", mode="shift")
    with clock.set_to(begin + 120 * MINUTE):
        fail_to_pay()
    assert dq.get_deadline(order, policy) == begin + days + later


@of_each_kind
def test_an_attempt_after_a_payment_that_failed_has_the_idempotency_key_of_the_one_before(
    declare: Declare, since: Any
) -> None:
    """The provider may have received the first one, although it seemed to fail."""
    sent: list[str] = []

    def send(order: Order, timeout: Timeout) -> None:
        sent.append(timeout.idempotency_key)
        raise TimeoutError("the provider did not answer in time")

    policy = declare(Order, send, atomic=False, retry=dq.Retry([86400]), **PAYS | {"since": since})
    order = new_order(timezone.now() - 31 * MINUTE)
    testing.fire_due(policy, raises=False)
    for _ in range(2):
        fail_to_pay()
    Timeout.objects.filter(state="pending").update(run_at=timezone.now())  # a day later
    testing.fire_due(policy, raises=False)
    assert len(sent) == 2 and len(set(sent)) == 1
    order.created_at = timezone.now() - 32 * MINUTE
    order.save()
    testing.fire_due(policy, raises=False)
    assert len(sent) == 3 and len(set(sent)) == 2, "a new round"


def test_arming_a_new_object_and_saving_one_that_is_exempt_read_no_earlier_rounds(declare: Declare) -> None:
    with transaction.atomic():
        assert not [sql for sql in sql_of(new_order) if "condition" in sql]
    assert Timeout.objects.count() == 1
    declare(Order, **PAYS | {"after": lambda order: None, "when": Q(status="new")})
    order = Order.objects.create(status="new", created_at=timezone.now())
    assert not [sql for sql in sql_of(order.save) if "condition" in sql]


@of_each_kind
def test_a_new_object_with_the_key_of_a_deleted_one_keeps_nothing(declare: Declare, since: Any) -> None:
    begin = timezone.now()
    policy = declare(Order, **PAYS | {"since": since})
    order = new_order(begin)
    dq.extend_timeout(order, policy, minutes=60)
    set_status(order, "paying")
    key = order.pk
    order.delete()
    new_order(begin, pk=key)
    row = Timeout.objects.get(policy=policy.label, state="pending")
    assert (row.extensions, row.due_at) == (0, begin + 30 * MINUTE)


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_firing_that_fails_after_its_start_came_back_is_retried_or_ends_as_its_cancel_wants(
    declare: Declare, cancelled: bool
) -> None:
    answers: list[bool] = []

    def handler(obj: Order, timeout: Timeout) -> None:
        if timeout.attempts == 1:
            change_start_and_back()
            if cancelled:
                answers.append(dq.cancel_timeout(obj, "pays"))
            raise ValueError

    policy = declare(Order, handler, atomic=False, retry=dq.Retry([0]), **PAYS)
    order = new_order(timezone.now() - 60 * MINUTE)
    assert testing.fire_due(policy, raises=False) == (0 if cancelled else 1)
    ended = ("cancelled", "hand") if cancelled else ("fired", "due")
    assert states(order, policy) == [ended, ("cancelled", "superseded")]
    assert answers == ([False] if cancelled else [])


def change_start_and_back() -> None:
    order = Order.objects.get()
    before = order.created_at
    for order.created_at in (timezone.now(), before):
        order.save()


def states(order: Order, policy: Any) -> list[tuple[str, str]]:
    return list(order.timeouts.filter(policy=policy.label).order_by("id").values_list("state", "cause"))
