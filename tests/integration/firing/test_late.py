"""`Late`, shadow mode and lateness: which timeouts are too late, and how late the others are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq import Late, clock
from django_delayq.arming.sync import sync_timeouts
from django_delayq.firing.rails.withheld import is_in_shadow
from django_delayq.models import Timeout
from django_delayq.monitoring.snapshot import policy_statuses
from django_delayq.operations import hold, pause, resume, shadow
from tests.integration.firing.conftest import MODES, due, fire, state
from tests.integration.firing.handlers import ATOMIC_OR_NOT, Declare, Log, raising, write
from tests.integration.firing.rows import FIRED, UNMET, hearing, logged, tried, written
from tests.testapp.models import Order

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("controls_are_read_again")]
HOUR = timedelta(hours=1)
BY = "test:operator"
LATE = ("skipped", "late")


@pytest.fixture(autouse=True)
def at_info(caplog: Log) -> None:
    caplog.set_level(logging.INFO, "django_delayq.firing")


def overdue(row: Timeout, by: timedelta = 3 * HOUR, **values: Any) -> Timeout:
    """Let the deadline of `row` have passed, as if no worker had run since."""
    at = timezone.now() - by
    Timeout.objects.filter(pk=row.pk).update(**{"due_at": at, "run_at": at, "created_at": at - HOUR, **values})
    row.refresh_from_db()
    return row


THEN = {"skip": ("skipped", logging.WARNING), "dead": ("dead", logging.ERROR)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("then", THEN)
def test_what_is_too_late_is_settled(orders: list[Order], declare: Declare, caplog: Log, mode: str, then: Any) -> None:
    settled, level = THEN[then]
    policy = declare(Order, write, name="limited", late=Late(HOUR, then=then), **MODES[mode])
    rows = [due(order, policy) for order in orders]
    late, in_time = [overdue(row) for row in rows[:3]], rows[3:]
    with hearing(dq.timeout_fired, dq.timeout_skipped, dq.timeout_dead, dq.timeout_failed) as heard:
        report = fire(*rows)
    assert written() == [row.object_id for row in in_time]
    assert sorted(report.fired) == [row.pk for row in in_time]
    assert sorted(report.done) == [row.pk for row in rows]
    reason = "It would have begun more than 1 h after its deadline."
    assert {(tried(row), row.reason) for row in late} == {(((settled, "late"), 0), reason)}
    assert {state(row) for row in in_time} == {FIRED}
    of_late = getattr(dq, f"timeout_{settled}")
    assert set(heard) == {*((of_late, row.pk) for row in late), *((dq.timeout_fired, row.pk) for row in in_time)}
    found = [(each.levelno, each.policy, each.count) for each in logged(caplog, "timeouts_late")]
    assert found == ([(level, policy.label, 3)] if mode in {"batch", "together"} else [(level, policy.label, 1)] * 3)


def stopped(stop: Callable[..., object], **options: Any) -> Callable[..., None]:
    def act(policy: Any, row: Timeout) -> None:
        stop(policy, by=BY)
        with clock.set_to(timezone.now() + 3 * HOUR):
            resume(policy, by=BY, **options)

    return act


MEANWHILE: dict[str, tuple[Callable[..., object], tuple[str, str]]] = {
    "nothing": (lambda policy, row: None, LATE),
    "its condition ends": (lambda policy, row: Order.objects.update(status="paid"), UNMET),
    "a pause": (stopped(pause), LATE),
    "a hold": (stopped(hold), FIRED),
    "a hold that keeps the deadlines": (stopped(hold, shift=False), LATE),
}


@pytest.mark.parametrize("what", MEANWHILE)
def test_what_happened_meanwhile_decides_whether_it_is_too_late(order: Order, declare: Declare, what: str) -> None:
    act, expected = MEANWHILE[what]
    policy = declare(Order, name="limited", late=Late(HOUR), when=Q(status="unpaid"))
    row, now = due(order, policy), timezone.now()
    act(policy, row)
    with clock.set_to(now + 3 * HOUR + timedelta(minutes=1)):
        fire(row, deliveries=2)  # also a suspect
    assert state(row) == expected


def test_only_a_first_attempt_can_be_late_and_a_snooze_from_its_end(orders: list[Order], declare: Declare) -> None:
    handler = raising(ValueError(), dq.Snooze(hours=5), dq.Snooze(hours=5), None)
    policy = declare(Order, handler, name="retried", late=Late(HOUR), retry=dq.Retry([0]))
    failed, late = due(orders[0], policy), due(orders[1], policy)
    fire(failed)
    fire(overdue(failed), late)
    with clock.set_to(timezone.now() + 5.5 * HOUR):
        assert fire(failed).fired == (failed.pk,)
    with clock.set_to(timezone.now() + 7 * HOUR):
        fire(late)
    assert state(late) == LATE


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


# Shadow mode: everything happens but the handler, and the round is closed


@pytest.mark.parametrize("mode", MODES)
def test_everything_happens_but_the_handler(orders: list[Order], declare: Declare, caplog: Log, mode: str) -> None:
    options: Any = {"when": Q(status="unpaid"), "shadow": True, "late": Late(HOUR)}
    policy = declare(Order, lambda *_: pytest.fail("called"), name="watched", **options, **MODES[mode])
    rows = [due(order, policy) for order in orders]
    overdue(rows[1])
    Order.objects.filter(pk=orders[0].pk).update(status="paid")
    with hearing(dq.timeout_skipped) as heard:
        report = fire(*rows)
    assert (report.fired, sorted(report.done)) == ((), [row.pk for row in rows])
    assert [state(row) for row in rows] == [UNMET, LATE, *[("skipped", "shadow")] * 3]
    assert {row.attempts for row in rows} == {0}
    assert sorted(pk for _, pk in heard) == [row.pk for row in rows]
    found = {each.object_id: each.getMessage() for each in logged(caplog, "timeout_shadow")}
    assert found.keys() == {str(order.pk) for order in orders[2:]}
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
    shadow(policy, share=50, by=BY)
    rows = [due(Order.objects.create(status="unpaid"), policy) for _ in range(20)]
    fire(*rows)
    expected = {row.object_id for row in rows if is_in_shadow(row.object_id, 50)}
    assert set(written()) == {row.object_id for row in rows} - expected
    assert set(Timeout.objects.filter(cause="shadow").values_list("object_id", flat=True)) == expected


# Lateness counts from when a timeout could fire: not from before it was armed, nor during a snooze


def hours_late(row: Timeout, caplog: Log) -> set[float]:
    """Return the lateness of the row, of the status, and of each line of the log, in hours."""
    row.refresh_from_db()
    [status] = [each for each in policy_statuses() if each.label == row.policy]
    lines = [*logged(caplog, "timeout_failed"), *logged(caplog, "timeout_fired")]
    return {round((each or 0) / 3600, 1) for each in (row.lateness(), status.lag_p99, *(x.late_seconds for x in lines))}


@ATOMIC_OR_NOT
@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([LookupError(), LookupError(), None], 5),
        ([dq.Snooze(seconds=1), None], 2),  # quiet hours must not make an alert ask for more workers
        ([dq.Snooze(seconds=1), LookupError(), None], 2),
    ],
)
def test_a_snooze_is_no_lateness(declare: Declare, caplog: Log, errors: Any, expected: int, atomic: bool) -> None:
    policy = declare(Order, raising(*errors), name="retried", retry=dq.Retry([0, 0]), atomic=atomic)
    row, ended_at = overdue(due(Order.objects.create(), policy), 5 * HOUR), timezone.now() - 2 * HOUR
    fire(row)
    Timeout.objects.exclude(ready_at=None).update(run_at=ended_at, ready_at=ended_at)
    for _ in errors[1:]:
        fire(row)
    assert hours_late(row, caplog) == {expected}
    [event] = [event for event in dq.explain_timeout(row) if event.what == "fired"]
    assert "5 h after the deadline" in str(event), "the story counts from the deadline"
