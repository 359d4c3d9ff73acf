"""`Late`: a timeout whose first attempt would begin too late is settled, and its handler does not run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import Q
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

import django_delayq as dq
from django_delayq import Late, clock
from django_delayq.arming.sync import sync_timeouts
from django_delayq.firing import plan, run
from django_delayq.firing.handler import set_checkpoint_hook
from django_delayq.ledger.controls import stop_cache
from django_delayq.ledger.marking import can_mark_at_once
from django_delayq.models import PolicyControl, Timeout
from django_delayq.operations import fire_now, hold, pause, postpone, refire, resume, retry
from tests.integration.firing.conftest import MODES, due, fire, make_due, state
from tests.testapp.models import Order

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("controls_are_read_again")]
Declare = Callable[..., dq.TimeoutPolicy[Any]]
HOUR = timedelta(hours=1)
BY = "test:operator"


class Ran(list[int]):
    """The ids of the timeouts for which the handler ran."""

    def handle(self, _: Any, timeouts: Any) -> None:
        self.extend(row.pk for row in (timeouts if isinstance(timeouts, list) else [timeouts]))


@pytest.fixture
def ran() -> Ran:
    return Ran()


def overdue(row: Timeout, by: timedelta = 3 * HOUR) -> Timeout:
    """Let the deadline of `row` have passed, as if no worker had run since."""
    at = timezone.now() - by
    Timeout.objects.filter(pk=row.pk).update(due_at=at, run_at=at)
    row.refresh_from_db()
    return row


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("then", ["skip", "dead"])
def test_a_timeout_that_is_too_late_is_settled_without_its_handler(
    orders: list[Order], declare: Declare, ran: Ran, mode: str, then: Any
) -> None:
    settled = "dead" if then == "dead" else "skipped"
    policy = declare(Order, ran.handle, name="limited", late=Late(HOUR, then=then), **MODES[mode])
    rows = [due(order, policy) for order in orders]
    sent: list[tuple[str, int]] = []
    receivers: list[Any] = []
    for name in ("timeout_fired", "timeout_skipped", "timeout_dead", "timeout_failed"):
        receivers.append(lambda sender, timeout, name=name, **_: sent.append((name, timeout.pk)))
        getattr(dq, name).connect(receivers[-1])
    late, in_time = [overdue(row) for row in rows[:3]], rows[3:]
    report = fire(*rows)
    assert sorted(report.fired) == sorted(ran) == [row.pk for row in in_time]
    assert sorted(report.done) == [row.pk for row in rows]
    assert {state(row) for row in late} == {(settled, "late")}
    assert {state(row) for row in in_time} == {("fired", "due")}
    assert {row.reason for row in late} == {"It would have begun more than 1 h after its deadline."}
    assert {row.attempts for row in late} == {0}
    expected = [(f"timeout_{settled}", row.pk) for row in late] + [("timeout_fired", row.pk) for row in in_time]
    assert sorted(sent) == sorted(expected)


def test_those_that_are_too_late_are_logged_as_one(
    orders: list[Order], declare: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    levels: dict[Any, int] = {"skip": logging.WARNING, "dead": logging.ERROR}
    for then, level in levels.items():
        policy = declare(Order, name=f"logged_{then}", late=Late(HOUR, then=then), together=20)
        fire(*[overdue(due(order, policy)) for order in orders])
        [record] = [each for each in caplog.records if vars(each).get("event") == "timeouts_late"]
        assert (record.levelno, vars(record)["count"], vars(record)["policy"]) == (level, 5, policy.label)
        caplog.clear()


def test_then_fire_fires_however_late_it_is(order: Order, declare: Declare) -> None:
    row = overdue(due(order, declare(Order, name="patient", late=Late(HOUR, then="fire"))))
    assert fire(row).fired == (row.pk,)


def test_the_condition_is_checked_first(orders: list[Order], declare: Declare) -> None:
    policy = declare(Order, name="checked", when=Q(status="unpaid"), late=Late(HOUR, then="dead"))
    row = overdue(due(orders[0], policy))
    Order.objects.update(status="paid")
    fire(row)
    assert state(row) == ("skipped", "condition")


def test_only_the_first_attempt_can_be_too_late(order: Order, declare: Declare) -> None:
    failures = [ValueError(), dq.Snooze(hours=1)]

    def handle(obj: Order, timeout: Timeout) -> None:
        if failures:
            raise failures.pop(0)

    row = due(order, declare(Order, handle, name="retried", late=Late(HOUR), retry=dq.Retry([0])))
    fire(row)
    overdue(row)
    fire(row)
    make_due(row)
    with clock.set_to(timezone.now() + HOUR):  # the snooze of an attempt that counts again
        assert fire(row).fired == (row.pk,)
    assert state(row) == ("fired", "due")


def test_a_snooze_counts_from_its_end(orders: list[Order], declare: Declare) -> None:
    waits: list[Any] = [dq.Snooze(hours=5), dq.Snooze(hours=5)]

    def handle(obj: Order, timeout: Timeout) -> None:
        if waits:
            raise waits.pop()

    policy = declare(Order, handle, name="snoozing", late=Late(HOUR))
    punctual, late = due(orders[0], policy), due(orders[1], policy)
    fire(punctual, late)
    with clock.set_to(timezone.now() + 5.5 * HOUR):
        assert fire(punctual).fired == (punctual.pk,)
    with clock.set_to(timezone.now() + 7 * HOUR):
        fire(late)
    assert state(late) == ("skipped", "late")


def test_what_an_operator_wants_fired_fires_however_late_it_is(order: Order, declare: Declare) -> None:
    policy = declare(Order, name="wanted", late=Late(HOUR, then="dead"))
    row = overdue(due(order, policy), 3 * timedelta(days=1))
    fire_now(row, by=BY)
    with clock.set_to(timezone.now() + 3 * HOUR):  # and no worker ran meanwhile
        assert fire(row).fired == (row.pk,)


def test_a_dead_one_that_is_retried_fires(order: Order, declare: Declare) -> None:
    row = overdue(due(order, declare(Order, name="buried", late=Late(HOUR, then="dead"))))
    fire(row)
    assert state(row) == ("dead", "late")
    assert retry(row, by=BY).changed == 1
    with clock.set_to(timezone.now() + 3 * HOUR):
        assert fire(row).fired == (row.pk,)


def test_a_repetition_fires(order: Order, declare: Declare) -> None:
    policy = declare(Order, name="repeated", late=Late(HOUR))
    row = overdue(due(order, policy))
    fire(row)
    assert refire(row, by=BY).changed == 1
    again = Timeout.objects.pending().get()
    with clock.set_to(timezone.now() + 3 * HOUR):
        assert fire(again).fired == (again.pk,)


def test_a_hold_does_not_take_the_wish_of_an_operator_back(order: Order, declare: Declare) -> None:
    policy = declare(Order, name="wanted", late=Late(HOUR))
    row = due(order, policy)
    fire_now(row, by=BY)
    hold(policy, by=BY)
    with clock.set_to(timezone.now() + HOUR / 2):
        resume(policy, by=BY)
    with clock.set_to(timezone.now() + 3 * HOUR):
        assert fire(row).fired == (row.pk,)


def test_a_wish_of_an_operator_counts_only_for_the_time_that_it_set(order: Order, declare: Declare) -> None:
    row = overdue(due(order, declare(Order, name="moved_again", late=Late(HOUR))))
    fire_now(row, by=BY)
    postpone(row, by=BY, minutes=30)
    with clock.set_to(timezone.now() + 3 * HOUR):
        fire(row)
    assert state(row) == ("skipped", "late")


def test_after_a_long_pause_those_that_are_too_late_are_skipped(order: Order, declare: Declare) -> None:
    policy = declare(Order, name="paused", late=Late(HOUR))
    row = due(order, policy)
    now = timezone.now()
    pause(policy, by=BY)
    fire(row)
    with clock.set_to(now + 3 * HOUR):
        resume(policy, by=BY)
        fire(row)
    assert state(row) == ("skipped", "late")


@pytest.mark.parametrize(("shift", "expected"), [(True, "fired"), (False, "skipped")])
def test_after_a_hold_they_are_late_only_if_their_deadlines_stay(
    order: Order, declare: Declare, *, shift: bool, expected: str
) -> None:
    policy = declare(Order, name="held", late=Late(HOUR))
    row = due(order, policy)
    now = timezone.now()
    hold(policy, by=BY)
    with clock.set_to(now + 3 * HOUR):
        resume(policy, by=BY, shift=shift)
    with clock.set_to(now + 3 * HOUR + timedelta(minutes=1)):
        fire(row)
    assert state(row)[0] == expected


def test_a_suspect_may_be_too_late(order: Order, declare: Declare, ran: Ran) -> None:
    row = overdue(due(order, declare(Order, ran.handle, name="suspected", late=Late(HOUR))))
    fire(row, deliveries=2)
    assert (state(row), ran) == (("skipped", "late"), [])


def test_a_round_that_was_too_late_is_closed(declare: Declare, ran: Ran) -> None:
    policy = declare(
        Order, ran.handle, name="closed", since="created_at", after=HOUR, when=Q(status="unpaid"), late=Late(HOUR)
    )
    order = Order.objects.create(status="unpaid", created_at=timezone.now() - 10 * HOUR)
    row = order.timeouts.get(policy=policy.label)
    fire(row)
    assert state(row) == ("skipped", "late")
    order.save()
    sync_timeouts(Order.objects.all())
    assert order.timeouts.filter(policy=policy.label).count() == 1
    order.created_at = timezone.now() - HOUR / 2
    order.save()
    assert order.timeouts.filter(policy=policy.label).pending().count() == 1, "another round is open"


def test_operators_override_what_is_declared(orders: list[Order], declare: Declare) -> None:
    policy = declare(Order, name="steered", late=Late(HOUR))
    rows = [overdue(due(order, policy)) for order in orders[:3]]
    control = PolicyControl.objects.create(policy=policy.label, changed_at=timezone.now(), guards={"late": None})
    stop_cache.forget()
    assert fire(rows[0]).fired
    control.guards = {"late": {"after": 7200.0, "then": "dead"}}
    control.save()
    stop_cache.forget()
    fire(rows[1])
    assert state(rows[1]) == ("dead", "late")
    control.guards = {"late": {"after": "soon"}}  # nothing of the library writes this
    control.save()
    stop_cache.forget()
    fire(rows[2])
    assert state(rows[2]) == ("skipped", "late")


def test_those_in_time_are_still_marked_by_one_statement(orders: list[Order], declare: Declare) -> None:
    plain, limited = declare(Order, name="plain"), declare(Order, name="with_late", late=Late(HOUR))
    if not can_mark_at_once(limited, "default"):
        pytest.skip("this database marks step by step")
    counts = []
    for policy, order in ((plain, orders[0]), (limited, orders[1]), (limited, orders[2])):
        row = due(order, policy)
        [work], _ = plan({row.pk: 1}, "default")
        with CaptureQueriesContext(connection) as queries:
            run(work, "default")
        counts.append(len(queries))
        assert state(row) == ("fired", "due")
    assert counts[1] == counts[2] == counts[0]


@pytest.mark.parametrize("mode", ["together", "batch"])
def test_three_days_without_a_worker_run_no_handler_and_need_few_transactions(
    declare: Declare, ran: Ran, mode: str
) -> None:
    policy = declare(Order, ran.handle, name="away", late=Late(HOUR), **MODES[mode])
    orders = Order.objects.bulk_create(Order(status="unpaid") for _ in range(500))
    dq.schedule_timeouts(Order.objects.filter(pk__in=[order.pk for order in orders]), policy, minutes=30)
    rows = list(Timeout.objects.filter(policy=policy.label))
    begun = counted_transactions()
    with clock.set_to(timezone.now() + timedelta(days=3)):
        for place in range(0, 500, 100):  # a worker plans what it has prefetched
            fire(*rows[place : place + 100])
    assert not ran
    assert Timeout.objects.filter(policy=policy.label, state="skipped", cause="late").count() == len(rows) == 500
    assert len(begun) == 25


def counted_transactions() -> list[str]:
    """Return a list that grows with each transaction that fires."""
    begun: list[str] = []
    set_checkpoint_hook(lambda step: begun.append(step) if step == "begun" else None)
    return begun
