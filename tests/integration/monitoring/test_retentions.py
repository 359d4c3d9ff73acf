"""Policies that keep their rows for different times: a report is the same whatever is pruned, and when."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import date, datetime, timedelta
from typing import Any

import pytest
from pytest_django import Settings

from django_delayq import TimeoutPolicy, clock, operations
from django_delayq.ledger.rollups import roll_up
from django_delayq.models import Timeout
from django_delayq.monitoring.reports import Report, policy_report
from django_delayq.testing import fire_due
from django_delayq.worker.sweep import prune
from tests.integration.monitoring.rounds import assert_equals, local_day, random_rows, recount, settled_row, utc
from tests.support.typed import Declare
from tests.support.workers import due_orders
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

NOON = utc(2026, 5, 10, 12)
FIRST = date(2025, 11, 1)
SECOND, MINUTE, HOUR, DAY = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
SHORT, LONG, OTHER = "testapp.order.short", "testapp.order.long", "testapp.order.other"


def settle(label: str, *times: datetime) -> None:
    Timeout.objects.bulk_create([settled_row(at, label=label) for at in times])


def fired(**options: Any) -> dict[str, int]:
    """How many rounds of each policy have fired."""
    return {line.name: line.fired for line in policy_report(by="policy", first=FIRST, **options).lines}


@pytest.mark.parametrize(("zone", "short"), [("America/Sao_Paulo", 2 * DAY), ("UTC", 5 * HOUR)])
def test_three_retentions_equal_a_recount_after_each_pass(
    declare: Declare, settings: Settings, zone: str, short: timedelta
) -> None:
    settings.TIME_ZONE = zone
    declare(Order, name="short", retention=short)
    declare(Order, name="long", retention=90 * DAY)
    rows = random_rows(2_000, NOON, 120, [SHORT, LONG, OTHER])
    draw = random.Random(4)
    for row in rows:  # some are kept for longer than the retention of their policy: they close their round
        row.first_due_at = row.first_due_at if draw.random() < 0.9 else row.due_at + 20 * DAY
    Timeout.objects.bulk_create(rows, batch_size=500)
    by_policy = recount(rows, lambda row: row.policy)
    by_day = {label: recount([row for row in rows if row.policy == label], of_day(zone)) for label in by_policy}
    is_pruned, left = False, len(rows)
    # Passes without and with the count of each minute before, hours, days and months apart.
    passes = ((0, False), (1, True), (2, False), (9, True), (26, False), (24 * 31, True), (9999, True))
    for passed, is_counted in passes:
        with clock.set_to(NOON + passed * HOUR):
            if is_counted:
                roll_up("default")
            deleted = prune("default")
            is_pruned, left = is_pruned or bool(deleted), left - deleted
            assert Timeout.objects.count() == left
            for line in policy_report(by="policy", first=FIRST).lines:
                assert_equals(line, by_policy[line.name])
            for label, expected in by_day.items():
                lines = policy_report(label, first=FIRST).lines
                assert [line.name for line in lines] == sorted(expected)
                for line in lines:
                    assert_equals(line, expected[line.name])
    assert is_pruned
    assert left == 0


def of_day(zone: str) -> Callable[[Timeout], str]:
    return lambda row: str(local_day(row.settled_at, zone))


@pytest.mark.timeout(60)
def test_pruning_replaces_days_that_were_counted_in_another_time_zone(declare: Declare, settings: Settings) -> None:
    settle(LONG, NOON, NOON + 7 * HOUR)
    with clock.set_to(NOON + DAY):
        roll_up("default")
    settings.TIME_ZONE = "Asia/Tokyo"
    with clock.set_to(NOON + 40 * DAY):
        assert prune("default") == 2
        days = [(line.name, line.fired) for line in policy_report(LONG, first=FIRST).lines]
        assert days == [("2026-05-10", 1), ("2026-05-11", 1)]


def dead_rows(policy: TimeoutPolicy[Any], count: int) -> list[Timeout]:
    rows = due_orders(policy, count)
    values = {"state": "dead", "cause": "retries", "slot_taken": None, "settled_at": NOON}
    Timeout.objects.filter(pk__in=[row.pk for row in rows]).update(**values)
    return rows


def counts(report: Report) -> tuple[int, int, int]:
    return report.total.rounds, report.total.dead, report.total.fired


def test_a_dead_row_that_was_committed_after_the_last_count_is_not_taken_off(declare: Declare) -> None:
    declare(Order, name="short", retention=HOUR)
    policy = declare(Order, name="long")
    with clock.set_to(NOON):
        first, second = dead_rows(policy, 2)
    settle(SHORT, NOON)
    late = Timeout.objects.filter(pk=second.pk)
    late.update(settled_at=NOON + 5 * HOUR)
    with clock.set_to(NOON + 2 * HOUR):
        assert prune("default") == 1
    late.update(settled_at=NOON)
    with clock.set_to(NOON + 3 * HOUR):
        operations.retry(Timeout.objects.filter(pk__in=[first.pk, second.pk]), by="test")
        assert counts(policy_report(policy, first=FIRST)) == (0, 0, 0)
        fire_due(policy)
        assert counts(policy_report(policy, first=FIRST)) == (2, 0, 2)
