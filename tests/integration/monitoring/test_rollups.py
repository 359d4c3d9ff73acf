"""Days are counted while they pass, and stay right whatever happens to their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date, timedelta
from typing import Any

import pytest
from django.db import Error, connection
from django.db.models import Q

from django_delayq import TimeoutPolicy, cancel_timeout, clock, operations
from django_delayq.ledger import rollups
from django_delayq.ledger.marking import Old, delete_settled
from django_delayq.ledger.rollups import roll_up
from django_delayq.models import PolicyDay, Timeout
from django_delayq.monitoring.reports import policy_report
from django_delayq.monitoring.snapshot import overview
from django_delayq.testing import fire_due
from django_delayq.worker.sweep import prune
from tests.integration.monitoring.rounds import settled_row, utc
from tests.support.threads import in_threads
from tests.support.typed import Declare, Patch
from tests.support.workers import due_orders
from tests.testapp.models import Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]

LABEL = "testapp.order.told"
NOON = utc(2026, 5, 10, 12)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


@pytest.fixture
def policy(declare: Declare) -> TimeoutPolicy[Any]:
    return declare(Order, name="told", since="created_at", when=Q(status="waiting"), after=HOUR)


def settle(*times: Any, state: str = "fired", cause: str = "due") -> None:
    Timeout.objects.bulk_create([settled_row(at, state, cause) for at in times])


def stored(**which: bool) -> list[tuple[date, int, int]]:
    """The stored days of the policy, each with the rounds that fired and are dead."""
    rows = PolicyDay.objects.filter(policy=LABEL, **which).order_by("day", "is_deleted")
    return list(rows.values_list("day", "fired", "dead"))


def rounds(policy: TimeoutPolicy[Any]) -> int:
    return policy_report(policy, first=date(2026, 4, 1)).total.rounds


def test_a_day_is_counted_while_it_passes_in_one_row_page_by_page(
    policy: TimeoutPolicy[Any], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(rollups, "READ_ROWS", 3)
    settle(*[NOON - MINUTE] * 7, *[NOON] * 6)
    with clock.set_to(NOON + MINUTE):
        roll_up("default")
        assert stored() == [] and rounds(policy) == 13, "rows of the last minutes are read from the ledger"
    for hour in range(12):
        settle(NOON + hour * HOUR, NOON + hour * HOUR + MINUTE)
        with clock.set_to(NOON + hour * HOUR + 5 * MINUTE):
            roll_up("default")
            roll_up("default")
            assert rounds(policy) == 13 + 2 * hour + 2
    assert stored() == [(date(2026, 5, 10), 37, 0)]
    with clock.set_to(NOON + 12 * HOUR):
        Timeout.objects.all().delete()  # by hand: they do not count when their day has none
        roll_up("default")
        assert rounds(policy) == 0


def prune_all() -> None:
    delete_settled("default", Old(clock.now()), None)


def test_the_hours_of_the_last_day_are_counted_whether_rows_are_counted_deleted_or_neither() -> None:
    settle(NOON, NOON + HOUR, NOON + HOUR + MINUTE)
    settle(NOON + HOUR, state="dead", cause="retries")
    settled_row(NOON + HOUR, due_at=NOON + HOUR - 2 * MINUTE).save()
    with clock.set_to(NOON + 2 * HOUR):
        for step in (lambda: None, lambda: roll_up("default"), prune_all):
            step()
            seen: Any = overview()
            assert [(hour.fired, hour.late, hour.dead) for hour in seen.hours[-3:]] == [(1, 0, 0), (2, 1, 1), (0, 0, 0)]
            assert (seen.hours[-1].begins_at, len(seen.hours), seen.counted_until) == (NOON + 2 * HOUR, 24, None)
    with clock.set_to(NOON + 26 * HOUR):
        seen = overview()
        assert not any(hour.fired for hour in seen.hours)


def test_a_row_that_was_committed_hours_late_is_counted_when_its_day_is_over(policy: TimeoutPolicy[Any]) -> None:
    settle(NOON)
    with clock.set_to(NOON + HOUR):
        roll_up("default")
    settle(NOON + MINUTE)
    with clock.set_to(NOON + 2 * HOUR):
        roll_up("default")
        assert rounds(policy) == 1
    settle(NOON + DAY)
    with clock.set_to(NOON + DAY + HOUR):
        roll_up("default")
        assert rounds(policy) == 3
        assert stored() == [(date(2026, 5, 10), 2, 0), (date(2026, 5, 11), 1, 0)]


def test_a_count_during_which_rows_are_deleted_or_retried_is_dropped(declare: Declare) -> None:
    policy = declare(Order, name="told")
    with clock.set_to(NOON):
        dead_rows(2, policy)
    with clock.set_to(NOON + HOUR):
        roll_up("default")
    dead = [Timeout.objects.filter(state="dead")[:1]]
    with clock.set_to(NOON + 2 * DAY):
        roll_up("default", lambda: dead and operations.retry(dead.pop(), by="test"))
        assert not dead and stored() == [(date(2026, 5, 10), 0, 1)]
        roll_up("default")
        assert stored() == [(date(2026, 5, 10), 0, 1)]
    Timeout.objects.all().delete(), PolicyDay.objects.all().delete()
    settle(NOON, NOON + MINUTE)
    with clock.set_to(NOON + 40 * DAY):
        roll_up("default", lambda: prune("default"))
        assert rounds(policy) == 2 and stored() == [(date(2026, 5, 10), 2, 0)]


def dead_rows(count: int, policy: TimeoutPolicy[Any]) -> list[Timeout]:
    rows = due_orders(policy, count)
    values = {"state": "dead", "cause": "retries", "slot_taken": None, "settled_at": NOON}
    Timeout.objects.filter(pk__in=[row.pk for row in rows]).update(**values)
    return rows


@pytest.mark.parametrize("how", ["retry", "cancel", "cancel_timeout"])
def test_a_dead_row_that_is_retried_or_cancelled_leaves_its_day(declare: Declare, how: str) -> None:
    policy = declare(Order, name="told")
    later = NOON + 3 * DAY
    with clock.set_to(NOON):
        first, *_ = rows = dead_rows(3, policy)
    with clock.set_to(later):
        roll_up("default")
        assert stored() == [(date(2026, 5, 10), 0, 3)]
        if how == "cancel_timeout":
            assert cancel_timeout(first)
        else:
            assert getattr(operations, how)(Timeout.objects.filter(pk=first.pk), by="test").changed == 1
        assert stored() == [(date(2026, 5, 10), 0, 2)]
        fire_due(policy)
        total = policy_report(policy, first=date(2026, 5, 1)).total
        assert (total.dead, total.fired + total.cancelled) == (2, 1)
    with clock.set_to(later + DAY):
        roll_up("default")
        assert operations.retry(Timeout.objects.filter(state="dead"), by="test").changed == 2
        fire_due(policy)
        total = policy_report(policy, first=date(2026, 5, 1)).total
        assert (total.rounds, total.dead) == (len(rows), 0)


def test_a_dead_row_that_was_committed_after_the_last_count_is_not_taken_off(declare: Declare) -> None:
    declare(Order, name="short", retention=HOUR)
    policy = declare(Order, name="told")
    with clock.set_to(NOON):
        first, second = dead_rows(2, policy)
    settled_row(NOON, label="testapp.order.short").save()
    late = Timeout.objects.filter(pk=second.pk)
    late.update(settled_at=NOON + 5 * HOUR)
    with clock.set_to(NOON + 2 * HOUR):
        assert prune("default") == 1
    late.update(settled_at=NOON)
    with clock.set_to(NOON + 3 * HOUR):
        operations.retry(Timeout.objects.filter(pk__in=[first.pk, second.pk]), by="test")
        assert rounds(policy) == 0
        fire_due(policy)
        assert rounds(policy) == 2


def count_too() -> Callable[[], object]:
    """Let another worker count while the first one does, once."""
    others = [roll_up]
    return lambda: others and others.pop()("default")


def test_a_part_that_another_worker_has_counted_meanwhile_is_not_counted_again(policy: TimeoutPolicy[Any]) -> None:
    midnight = rollups.start_of(date(2026, 5, 11))
    for at in (midnight - 2 * HOUR, midnight + HOUR):
        settle(at - 10 * MINUTE)
        with clock.set_to(at):
            roll_up("default")
    settle(midnight - HOUR, midnight + 90 * MINUTE)
    with clock.set_to(midnight + 2 * HOUR):
        roll_up("default", count_too())
        assert stored() == [(date(2026, 5, 10), 2, 0), (date(2026, 5, 11), 2, 0)]


ROWS, TURNS = 600, 20


def settled() -> Iterator[Timeout]:
    """Rows of two days; every fourth one is dead."""
    for number in range(ROWS):
        state, cause = ("dead", "retries") if number % 4 == 0 else ("fired", "due")
        order = Order.objects.create()
        at = NOON - (number % 2) * DAY - (number + 3) * MINUTE
        yield settled_row(at, state, cause, label=LABEL, object_id=str(order.pk), attempts=1)


def retry_some() -> None:
    dead = Timeout.objects.filter(state="dead").values_list("pk", flat=True)
    operations.retry(Timeout.objects.filter(pk__in=list(dead[:5])), by="test")


def test_each_row_counts_once_while_threads_count_retry_and_delete_rows(declare: Declare) -> None:
    if not connection.features.has_select_for_update:
        pytest.skip("SQLite has no row locks: a writer holds the whole database")
    policy = declare(Order, name="told")
    Timeout.objects.bulk_create(list(settled()))
    errors = list[BaseException]()

    def total() -> int:
        return policy_report(policy, first=date(2026, 5, 1)).total.rounds

    def repeat(work: Callable[[int], object]) -> None:
        try:
            for turn in range(TURNS):
                with suppress(Error):  # a deadlock: workers try again, too
                    work(turn)
        except BaseException as error:
            errors.append(error)

    def delete(turn: int) -> None:
        prune("default", labels=[LABEL], age=2 * DAY - 2 * turn * 60 * MINUTE)

    works: list[Callable[[int], object]] = [lambda _: roll_up("default"), delete, lambda _: retry_some()]
    with clock.set_to(NOON):
        in_threads(*(lambda work=each: repeat(work) for each in works * 2))
        assert not errors
        expected = ROWS - Timeout.objects.filter(state="pending").count()
        assert total() == expected
        roll_up("default")
        assert total() == expected
        prune("default", labels=[LABEL], age=MINUTE)
        assert total() == expected
