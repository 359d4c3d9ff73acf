"""What saving and syncing make of the rounds of an order after each event, and what a round keeps beside that."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import transaction
from django.db.models import Q
from django.utils import timezone
from pytest_django import Settings

import django_delayq as dq
from django_delayq import clock, operations, testing
from django_delayq.arming.sync import sync_policy
from django_delayq.models import Timeout
from tests.integration.arming.conftest import SINCE
from tests.support.seen import sql_of
from tests.support.typed import Declare
from tests.testapp.models import Order

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("controls_are_read_again")]
MINUTE, DAY = timedelta(minutes=1), 24 * 60
BEGIN = timezone.now().replace(microsecond=0) - timedelta(days=30)
Act = Callable[[Order, Any], object] | dict[str, Any]
"""A call, or new values of the order."""


def at(minutes: float) -> datetime:
    return BEGIN + minutes * MINUTE


def save(order: Order, policy: Any, **values: Any) -> None:
    order.refresh_from_db()
    vars(order).update(values)
    order.save()


def update_and_sync(order: Order, policy: Any, **values: Any) -> None:
    """Change the order as SQL would, and sync it."""
    Order.objects.filter(pk=order.pk).update(**values)
    dq.sync_timeouts(order)


def update_and_wait(order: Order, policy: Any, **values: Any) -> None:
    """Change the order as SQL would, and compare the tables, as a worker does."""
    Order.objects.filter(pk=order.pk).update(**values)
    sync_policy(policy, "default")


def unnoticed(**values: Any) -> Act:
    return lambda order, policy: Order.objects.filter(pk=order.pk).update(**values)


def since(minutes: float | None) -> dict[str, Any]:
    return {"created_at": None if minutes is None else at(minutes)}


def by_hand(verb: str, **how: Any) -> Act:
    return lambda order, policy: getattr(dq, f"{verb}_timeout")(order, policy, **how)


def by_operator(verb: str, **how: Any) -> Act:
    return lambda order, policy: getattr(operations, verb)(dq.pending_timeouts(order, policy), by="admin:a", **how)


def of_policy(verb: str) -> Act:
    return lambda order, policy: getattr(operations, verb)(policy, by="admin:a")


def cancel(order: Order, policy: Any) -> None:
    assert dq.cancel_timeout(order, policy) is True


def cancel_too_late(order: Order, policy: Any) -> None:
    assert dq.cancel_timeout(order, policy) is False
    with pytest.raises(dq.DeadlinePassed), dq.before_deadline(order, policy):
        pytest.fail("the block ran")


def fire(order: Order, policy: Any) -> None:
    testing.fire_due(policy)


def guard(order: Order, policy: Any) -> None:
    with dq.before_deadline(order, policy):
        pass


PAYING, UNPAID, TOUCH = {"status": "paying"}, {"status": "unpaid"}, {"note": "touched"}
EXTEND = by_hand("extend", minutes=60)
LATER: dict[str, tuple[Act, str]] = {
    "extended": (EXTEND, "pending 90 x1"),
    "rescheduled": (by_hand("reschedule", minutes=65), "pending 90"),
    "postponed": (by_operator("postpone", minutes=60), "pending 90"),
}
HISTORIES: dict[str, list[tuple[float, Act, str]]] = {
    "its condition ends and holds again": [(1, PAYING, "ended"), (2, UNPAID, "ended, pending 30")],
    "its start moves": [
        *((1, since(60), "pending 90"), (2, by_hand("schedule", hours=5), "pending 302")),
        *((3, {"note": "changed"}, "pending 302"), (4, since(None), "ended"), (5, since(60), "ended, pending 302")),
    ],
    "its start moves back beyond CATCH_UP": [(1, since(-3 * DAY), f"pending {30 - 3 * DAY}"),
                                             (2, since(-6 * DAY), "cancelled late")],
    **{
        f"it is {name} before a payment that fails": [
            *((25, act, moved), (26, PAYING, "ended"), (26, UNPAID, f"ended, {moved}"), (27, PAYING, "ended, ended")),
            *((27, UNPAID, f"ended, ended, {moved}"), (80, fire, f"ended, ended, {moved}")),
        ]
        for name, (act, moved) in LATER.items()
    },
    "its policy is on hold before a payment that fails": [
        *((25, of_policy("hold"), "pending 30"), (85, of_policy("resume"), "pending 90")),
        *((86, PAYING, "ended"), (86, UNPAID, "ended, pending 90")),
    ],
    "a new start keeps nothing": [(1, EXTEND, "pending 90 x1"), (2, PAYING, "ended"),
                                  (3, UNPAID | since(1), "ended, pending 31")],
    "a request to fire now is not kept": [
        *((1, EXTEND, "pending 90 x1"), (2, by_operator("fire_now"), "pending 2 x1")),
        *((3, PAYING, "ended"), (4, UNPAID, "ended, pending 30 x1")),
    ],
    "an extended round counts from the deadline that it had": [
        *((1, by_hand("extend", days=30), f"pending {30 + 30 * DAY} x1"), (20 * DAY, PAYING, "ended")),
        (20 * DAY, UNPAID, f"ended, pending {30 + 30 * DAY} x1"),
    ],
    "its condition holds again after its deadline": [
        *((25, unnoticed(status="paying"), "pending 30"), (31, fire, "skipped condition")),
        *((40, UNPAID, "skipped condition, pending 30"), (40, fire, "skipped condition, fired")),
    ],
    "its condition holds again within CATCH_UP": [(25, PAYING, "ended"), (4 * DAY, UNPAID, "ended, pending 30")],
    "its condition holds again after CATCH_UP": [(25, PAYING, "ended"), (6 * DAY, UNPAID, "ended")],
    "a cancelled round stays closed": [
        *((1, PAYING, "ended"), (2, UNPAID, "ended, pending 30"), (3, cancel, "ended, cancelled hand")),
        *((4, PAYING, "ended, cancelled hand"), (40, UNPAID, "ended, cancelled hand")),
    ],
    "a round that is cancelled before it is armed is not armed": [
        *((1, PAYING, "ended"), (2, since(5), "ended"), (3, unnoticed(status="unpaid"), "ended")),
        *((4, cancel, "ended, cancelled hand"), (5, TOUCH, "ended, cancelled hand")),
    ],
    "a round that is cancelled while its condition does not hold is not armed again": [
        *((1, PAYING, "ended"), (2, cancel, "ended, cancelled hand"), (3, UNPAID, "ended, cancelled hand")),
        *((4, since(40), "ended, cancelled hand, pending 70"), (5, PAYING, "ended, cancelled hand, ended")),
    ],
    "the present round is cancelled although that of a former start is pending": [
        *((1, unnoticed(**since(31)), "pending 30"), (2, cancel, "cancelled hand, cancelled hand")),
        (3, TOUCH, "cancelled hand, cancelled hand"),
    ],
    "a guard leaves a round that is not armed yet to its condition": [
        *((1, PAYING, "ended"), (2, unnoticed(status="unpaid", **since(2)), "ended"), (3, guard, "ended")),
        (4, TOUCH, "ended, pending 32"),
    ],
    "a fired round does not count as a later one that is not armed yet": [
        *((30, fire, "fired"), (31, unnoticed(**since(31)), "fired"), (32, guard, "fired")),
        *((33, cancel, "fired, cancelled hand"), (34, TOUCH, "fired, cancelled hand")),
    ],
    "a round that has fired before the newest one is too late too": [
        *((30, fire, "fired"), (31, since(31), "fired, pending 61"), (61, fire, "fired, fired")),
        *((62, unnoticed(**since(0)), "fired, fired"), (63, cancel_too_late, "fired, fired")),
    ],
    "a fired round is too late, also after a newer one that was superseded": [
        *((30, fire, "fired"), (31, cancel_too_late, "fired"), (32, since(31), "fired, pending 61")),
        *((33, since(0), "fired, cancelled superseded"), (34, cancel_too_late, "fired, cancelled superseded")),
        (35, since(34), "fired, cancelled superseded, pending 64"),
    ],
}  # fmt: skip
PAYS: dict[str, Any] = {"name": "pays", "after": 30 * MINUTE, "since": "created_at", "when": Q(status="unpaid")}
WAYS: dict[str, list[Callable[..., None]]] = {
    "column": [save, update_and_sync, update_and_wait],
    "function": [save, update_and_wait],
}
"""By what `since` of the policy is: the ways in which a change of the order is noticed. Each has an order."""


def seen(order: Order, policy: Any) -> str:
    """Return the rounds: their deadlines in minutes, and extensions; "ended": by the condition."""
    found = []
    for row in order.timeouts.filter(policy=policy.label).order_by("id"):
        word = row.state if row.state == "fired" else f"{row.state} {row.cause}"
        word = f"pending {(row.due_at - BEGIN) / MINUTE:g}" if row.state == "pending" else word
        extended = f" x{row.extensions}" if row.extensions else ""
        found.append("ended" if word == "cancelled condition" else word + extended)
    return ", ".join(found)


@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("name", HISTORIES)
def test_the_rounds_of_an_order_after_each_event(declare: Declare, settings: Settings, name: str, kind: str) -> None:
    hours, days = timedelta(hours=2), timedelta(days=5)  # so that no deadline is too old for a sync only
    settings.DELAYQ = {**settings.DELAYQ, "SYNC_INTERVAL": hours, "CATCH_UP": days}
    policy = declare(Order, **PAYS | {"since": SINCE[kind]})
    with clock.set_to(BEGIN):
        orders = [(Order.objects.create(created_at=BEGIN), change) for change in WAYS[kind]]
    for minutes, act, expected in HISTORIES[name]:
        with clock.set_to(at(minutes)):
            for order, change in orders:
                if isinstance(act, dict):
                    change(order, policy, **act)
                else:
                    act(order, policy)
        for order, change in orders:
            assert (minutes, change, seen(order, policy)) == (minutes, change, expected)


# What a round keeps when its condition holds again, beside its deadline and its extensions.
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
    begin, days, later = timezone.now(), timedelta(days=20), MINUTE
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
    waiting = dq.pending_timeouts(order, policy)
    assert waiting.get().run_at > timezone.now() + timedelta(hours=23), (
        "the payment does not end the wait for its retry"
    )
    waiting.update(run_at=timezone.now())  # a day later
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
