"""`Late` and shadow mode: a timeout that is too late, or in shadow mode, is settled, and its handler does not run."""

from __future__ import annotations

import logging
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
from django_delayq.firing import run
from django_delayq.firing.handler import set_checkpoint_hook
from django_delayq.firing.rails.withheld import is_in_shadow
from django_delayq.ledger.controls import stop_cache
from django_delayq.ledger.marking import can_mark_at_once
from django_delayq.models import PolicyControl, Timeout
from django_delayq.operations import fire_now, hold, pause, postpone, resume, shadow
from tests.integration.firing.conftest import (
    FIRED,
    MODES,
    Declare,
    due,
    fire,
    logged,
    make_due,
    raising,
    receiving,
    state,
    tried,
    work_of,
    write,
    written,
)
from tests.testapp.models import Order

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("controls_are_read_again")]
HOUR = timedelta(hours=1)
BY = "test:operator"
LATE = ("skipped", "late")
REASON = "It would have begun more than 1 h after its deadline."


def overdue(row: Timeout, by: timedelta = 3 * HOUR) -> Timeout:
    """Let the deadline of `row` have passed, as if no worker had run since."""
    at = timezone.now() - by
    Timeout.objects.filter(pk=row.pk).update(due_at=at, run_at=at)
    row.refresh_from_db()
    return row


THEN = {"skip": ("skipped", logging.WARNING), "dead": ("dead", logging.ERROR)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("then", THEN)
def test_timeouts_that_are_too_late_are_settled_without_their_handler_and_logged_as_one(
    orders: list[Order], declare: Declare, caplog: pytest.LogCaptureFixture, mode: str, then: Any
) -> None:
    settled, level = THEN[then]
    policy = declare(Order, write, name="limited", late=Late(HOUR, then=then), **MODES[mode])
    rows = [due(order, policy) for order in orders]
    late, in_time = [overdue(row) for row in rows[:3]], rows[3:]
    sent: list[tuple[Any, int]] = []

    def hear(signal: Any, timeout: Timeout, **_: Any) -> None:
        sent.append((signal, timeout.pk))

    signals = (dq.timeout_fired, dq.timeout_skipped, dq.timeout_dead, dq.timeout_failed)
    with receiving(hear, *signals):
        report = fire(*rows)
    assert written() == [row.object_id for row in in_time]
    assert sorted(report.fired) == [row.pk for row in in_time]
    assert sorted(report.done) == [row.pk for row in rows]
    assert {(tried(row), row.reason) for row in late} == {(((settled, "late"), 0), REASON)}
    assert {state(row) for row in in_time} == {FIRED}
    of_late = getattr(dq, f"timeout_{settled}")
    assert set(sent) == {*((of_late, row.pk) for row in late), *((dq.timeout_fired, row.pk) for row in in_time)}
    found = [(each.levelno, each.policy, each.count) for each in logged(caplog, "timeouts_late")]
    assert found == ([(level, policy.label, 3)] if mode in {"batch", "together"} else [(level, policy.label, 1)] * 3)


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
    handler = raising(ValueError(), dq.Snooze(hours=1), None)
    row = due(order, declare(Order, handler, name="retried", late=Late(HOUR), retry=dq.Retry([0])))
    fire(row)
    overdue(row)
    fire(row)
    make_due(row)
    with clock.set_to(timezone.now() + HOUR):  # the snooze of an attempt that counts again
        assert fire(row).fired == (row.pk,)


def test_a_snooze_counts_from_its_end(orders: list[Order], declare: Declare) -> None:
    handler = raising(dq.Snooze(hours=5), dq.Snooze(hours=5), None)
    policy = declare(Order, handler, name="snoozing", late=Late(HOUR))
    punctual, late = due(orders[0], policy), due(orders[1], policy)
    fire(punctual, late)
    with clock.set_to(timezone.now() + 5.5 * HOUR):
        assert fire(punctual).fired == (punctual.pk,)
    with clock.set_to(timezone.now() + 7 * HOUR):
        fire(late)
    assert state(late) == LATE


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
    assert state(row) == LATE


def test_after_a_long_pause_those_that_are_too_late_are_skipped(order: Order, declare: Declare) -> None:
    policy = declare(Order, name="paused", late=Late(HOUR))
    row = due(order, policy)
    now = timezone.now()
    pause(policy, by=BY)
    fire(row)
    with clock.set_to(now + 3 * HOUR):
        resume(policy, by=BY)
        fire(row)
    assert state(row) == LATE


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


def test_a_suspect_may_be_too_late(order: Order, declare: Declare) -> None:
    row = overdue(due(order, declare(Order, write, name="suspected", late=Late(HOUR))))
    fire(row, deliveries=2)
    assert (state(row), written()) == (LATE, [])


def test_a_round_that_was_too_late_is_closed(declare: Declare) -> None:
    options: Any = {"since": "created_at", "after": HOUR, "when": Q(status="unpaid"), "late": Late(HOUR)}
    policy = declare(Order, name="closed", **options)
    order = Order.objects.create(status="unpaid", created_at=timezone.now() - 10 * HOUR)
    row = order.timeouts.get(policy=policy.label)
    fire(row)
    assert state(row) == LATE
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
    assert state(rows[2]) == LATE


def test_those_in_time_are_still_marked_by_one_statement(orders: list[Order], declare: Declare) -> None:
    plain, limited = declare(Order, name="plain"), declare(Order, name="with_late", late=Late(HOUR))
    if not can_mark_at_once(limited, "default"):
        pytest.skip("this database marks step by step")
    counts = []
    for policy, order in ((plain, orders[0]), (limited, orders[1]), (limited, orders[2])):
        row = due(order, policy)
        work = work_of(row)
        with CaptureQueriesContext(connection) as queries:
            run(work, "default")
        counts.append(len(queries))
        assert state(row) == ("fired", "due")
    assert counts[1] == counts[2] == counts[0]


@pytest.mark.parametrize("mode", ["together", "batch"])
def test_three_days_without_a_worker_run_no_handler_and_need_few_transactions(declare: Declare, mode: str) -> None:
    policy = declare(Order, write, name="away", late=Late(HOUR), **MODES[mode])
    orders = Order.objects.bulk_create(Order(status="unpaid") for _ in range(500))
    dq.schedule_timeouts(Order.objects.filter(pk__in=[order.pk for order in orders]), policy, minutes=30)
    rows = list(Timeout.objects.filter(policy=policy.label))
    steps: list[str] = []
    set_checkpoint_hook(steps.append)
    with clock.set_to(timezone.now() + timedelta(days=3)):
        for place in range(0, 500, 100):  # a worker plans what it has prefetched
            fire(*rows[place : place + 100])
    assert written() == []
    assert Timeout.objects.filter(policy=policy.label, state="skipped", cause="late").count() == len(rows) == 500
    assert steps.count("begun") == 25


# Shadow mode: everything happens but the handler, and the round is closed


def refuse(*_: object) -> None:
    raise AssertionError("the handler ran")


@pytest.mark.parametrize("mode", MODES)
def test_everything_happens_but_the_handler(
    orders: list[Order], declare: Declare, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    policy = declare(Order, refuse, name="watched", when=Q(status="unpaid"), shadow=True, **MODES[mode])
    rows = [due(order, policy) for order in orders]
    skipped: list[int] = []

    def hear(timeout: Timeout, **_: Any) -> None:
        skipped.append(timeout.pk)

    Order.objects.filter(pk=orders[0].pk).update(status="paid")
    with caplog.at_level(logging.INFO, "django_delayq.firing"), receiving(hear, dq.timeout_skipped):
        report = fire(*rows)
    assert (report.fired, sorted(report.done)) == ((), [row.pk for row in rows])
    assert [state(row) for row in rows] == [("skipped", "condition")] + [("skipped", "shadow")] * 4
    assert {row.attempts for row in rows} == {0}
    assert sorted(skipped) == [row.pk for row in rows]
    found = {each.object_id: each.getMessage() for each in logged(caplog, "timeout_shadow")}
    assert found.keys() == {str(order.pk) for order in orders[1:]}
    assert all(f"object {pk}) would have fired: its policy is in shadow mode" in words for pk, words in found.items())


def test_a_share_is_the_same_for_each_policy_and_grows_with_its_percentage() -> None:
    keys = [str(number) for number in range(2000)]
    shares = {percent: {key for key in keys if is_in_shadow(key, percent)} for percent in (0, 10, 50, 100)}
    assert (len(shares[0]), len(shares[100])) == (0, 2000)
    assert shares[10] < shares[50]
    assert 140 < len(shares[10]) < 260
    assert sorted(shares[10])[:3] == ["1009", "1013", "1043"], "other releases and machines choose the same"


@pytest.mark.parametrize("mode", MODES)
def test_only_a_share_of_the_objects_is_in_shadow_mode(declare: Declare, mode: str) -> None:
    policy = declare(Order, write, name="partly", **MODES[mode])
    shadow(policy, share=50, by="test:operator")
    rows = [due(Order.objects.create(status="unpaid"), policy) for _ in range(40)]
    fire(*rows)
    expected = {row.object_id for row in rows if is_in_shadow(row.object_id, 50)}
    assert 5 < len(expected) < 35
    assert set(written()) == {row.object_id for row in rows} - expected
    assert set(Timeout.objects.filter(cause="shadow").values_list("object_id", flat=True)) == expected


def test_a_timeout_that_is_too_late_is_late_also_in_shadow_mode(order: Order, declare: Declare) -> None:
    policy = declare(Order, refuse, name="both", shadow=True, late=dq.Late(timedelta(hours=1)))
    row, past = due(order, policy), timezone.now() - timedelta(hours=2)
    Timeout.objects.update(due_at=past, run_at=past)
    fire(row)
    assert state(row) == ("skipped", "late")
