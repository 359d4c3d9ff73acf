"""Reports equal a plain recount, before and after rounds are rolled up and pruned, whatever is kept for how long."""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Callable
from datetime import date, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.core.management import CommandError, call_command
from django.db.models import Q
from django.utils import timezone
from pytest_django import Settings

from django_delayq import TimeoutPolicy, clock
from django_delayq.ledger.rollups import roll_up
from django_delayq.models import PolicyDay, Timeout
from django_delayq.monitoring.reports import InvalidReport, policy_report
from django_delayq.worker.sweep import prune
from tests.integration.monitoring.rounds import assert_equals, local_day, random_rows, recount, settled_row, utc
from tests.support.typed import Declare
from tests.testapp.models import Customer, Order

pytestmark = pytest.mark.django_db(transaction=True)

LABEL, FORMER, OTHER = "testapp.order.told", "testapp.order.told_before", "testapp.order.other"
NOW = utc(2026, 5, 10, 15, 30)
FIRST = date(2025, 12, 1)
DAYS = 150


@pytest.fixture
def policy(declare: Declare) -> TimeoutPolicy[Any]:
    """A policy that had another name before."""
    return declare(Order, name="told", aliases=["told_before"], since="created_at", when=Q(), after=timedelta(hours=1))


def test_reports_equal_a_recount_before_and_after_pruning(policy: TimeoutPolicy[Any], settings: Settings) -> None:
    settings.TIME_ZONE = zone = "America/Havana"
    rows = random_rows(1_500, NOW, DAYS, [LABEL, FORMER, OTHER])
    Timeout.objects.bulk_create(rows, batch_size=500)
    own = [row for row in rows if row.policy != OTHER]
    by_day = recount(own, lambda row: str(local_day(row.settled_at, zone)))
    by_month = recount(own, lambda row: f"{local_day(row.settled_at, zone):%Y-%m}")
    by_policy = recount(rows, lambda row: OTHER if row.policy == OTHER else LABEL)

    def reports() -> list[Any]:
        return [
            policy_report(policy, by="day", first=FIRST),
            policy_report(LABEL, by="month", first=FIRST),
            policy_report(by="policy", first=FIRST),
        ]

    with clock.set_to(NOW):
        before = reports()
        for report, expected in zip(before, (by_day, by_month, by_policy), strict=True):
            assert [line.name for line in report.lines] == sorted(expected)
            for line in report.lines:
                assert_equals(line, expected[line.name])
        assert_equals(before[0].total, recount(own, lambda row: "")[""])
        roll_up("default")
        assert PolicyDay.objects.exists()
        assert reports() == before
        assert prune("default") > 1000
        assert reports() == before
        roll_up("default")
        assert prune("default", age=timedelta(days=20)) > 70
        assert reports() == before
        assert Timeout.objects.count() < 300
    with clock.set_to(NOW + timedelta(days=40)):
        roll_up("default")
        prune("default")
        assert [replaced(report) for report in reports()] == [replaced(report) for report in before]
        assert not Timeout.objects.filter(due_at__lt=NOW).exists()


def replaced(report: Any) -> Any:
    return report.lines, report.total


@pytest.mark.parametrize(("zone", "short"), [("America/Sao_Paulo", timedelta(days=2)), ("UTC", timedelta(hours=5))])
def test_three_retentions_equal_a_recount_after_each_pass(
    declare: Declare, settings: Settings, zone: str, short: timedelta
) -> None:
    settings.TIME_ZONE = zone
    declare(Order, name="short", retention=short)
    declare(Order, name="long", retention=timedelta(days=90))
    rows = random_rows(2_000, NOW, 120, ["testapp.order.short", "testapp.order.long", OTHER])
    draw = random.Random(4)
    for row in rows:  # some are kept for longer than the retention of their policy: they close their round
        row.first_due_at = row.first_due_at if draw.random() < 0.9 else row.due_at + timedelta(days=20)
    Timeout.objects.bulk_create(rows, batch_size=500)
    by_policy = recount(rows, lambda row: row.policy)
    by_day = {label: recount([row for row in rows if row.policy == label], of_day(zone)) for label in by_policy}
    is_pruned, left = False, len(rows)
    # Passes without and with the count of each minute before, hours, days and months apart.
    passes = ((0, False), (1, True), (2, False), (9, True), (26, False), (24 * 31, True), (9999, True))
    for passed, is_counted in passes:
        with clock.set_to(NOW + timedelta(hours=passed)):
            if is_counted:
                roll_up("default")
            deleted = prune("default")
            is_pruned, left = is_pruned or bool(deleted), left - deleted
            assert Timeout.objects.count() == left
            for line in policy_report(by="policy", first=date(2025, 11, 1)).lines:
                assert_equals(line, by_policy[line.name])
            for label, expected in by_day.items():
                lines = policy_report(label, first=date(2025, 11, 1)).lines
                assert [line.name for line in lines] == sorted(expected)
                for line in lines:
                    assert_equals(line, expected[line.name])
    assert is_pruned
    assert left == 0


def of_day(zone: str) -> Callable[[Timeout], str]:
    return lambda row: str(local_day(row.settled_at, zone))


@pytest.mark.parametrize("use_tz", [True, False])
def test_a_day_ends_at_midnight_in_time_zone_whatever_is_activated(
    policy: TimeoutPolicy[Any], settings: Settings, use_tz: bool
) -> None:
    settings.USE_TZ, settings.TIME_ZONE = use_tz, "Europe/Berlin"
    now, times = (
        NOW,
        [utc(2026, 3, 28, 22, 59), utc(2026, 3, 28, 23, 0), utc(2026, 3, 29, 21, 59), utc(2026, 3, 29, 22)],
    )
    if not use_tz:
        now, *times = (timezone.make_naive(at, ZoneInfo("Europe/Berlin")) for at in (now, *times))
    Timeout.objects.bulk_create([settled_row(at) for at in times])
    expected = [("2026-03-28", 1), ("2026-03-29", 2), ("2026-03-30", 1)]
    with timezone.override("Asia/Tokyo"), clock.set_to(now):
        for count in (lambda: None, lambda: roll_up("default")):
            count()
            assert [(line.name, line.rounds) for line in policy_report(policy, first=FIRST).lines] == expected


def test_in_another_time_zone_each_round_is_still_counted_once(policy: TimeoutPolicy[Any], settings: Settings) -> None:
    settings.TIME_ZONE = "Europe/Berlin"
    rows = random_rows(600, NOW, 60, [LABEL])
    Timeout.objects.bulk_create(rows)
    with clock.set_to(NOW):
        roll_up("default")
        assert prune("default")
        settings.TIME_ZONE = "America/Los_Angeles"
        assert policy_report(policy, first=FIRST).total.rounds == 600
        roll_up("default")
        report = policy_report(policy, first=FIRST, limit=50)
        assert (report.total.rounds, report.counted_until) == (600, None), "the days are counted again"
        recent = [row for row in rows if row.settled_at and row.settled_at > NOW - timedelta(days=20)]
        expected = recount(recent, lambda row: str(local_day(row.settled_at, "America/Los_Angeles")))
        lines = {line.name: line for line in policy_report(policy, first=FIRST).lines}
        for name in sorted(expected)[1:]:
            assert_equals(lines[name], expected[name])
        prune("default", age=timedelta(days=16))
        assert policy_report(policy, first=FIRST).total.rounds == 600


def test_by_a_field_of_the_objects_along_foreign_keys(policy: TimeoutPolicy[Any]) -> None:
    ann, bob = Customer.objects.create(name="Ann", vip=True), Customer.objects.create(name="Bob")
    orders = [Order.objects.create(status="s", customer=customer) for customer in (ann, ann, bob, None)]
    rows = [settled_row(NOW - timedelta(hours=1), object_id=str(order.pk)) for order in orders]
    rows += [settled_row(NOW, object_id="999999"), settled_row(NOW, object_id="no key")]
    Timeout.objects.bulk_create(rows)
    with clock.set_to(NOW):
        report = policy_report(policy, by="customer__name")
        assert [(line.name, line.fired) for line in report.lines] == [("(deleted)", 2), ("Ann", 2), ("", 1), ("Bob", 1)]
        by_owner = policy_report(policy, by="customer")
        assert (str(ann.pk), 2) in [(line.name, line.fired) for line in by_owner.lines]
        with pytest.raises(InvalidReport, match=r"no column 'statuss' .* Did you mean 'status'\?"):
            policy_report(policy, by="statuss")
        with pytest.raises(InvalidReport, match="no column"):
            policy_report(policy, by="timeouts")
        with pytest.raises(InvalidReport, match="needs a declared policy"):
            policy_report(by="customer")


def run(*args: str) -> str:
    out = io.StringIO()
    call_command("delayq_report", *args, stdout=out)
    return out.getvalue()


def test_the_command_prints_a_table_csv_and_json(policy: TimeoutPolicy[Any]) -> None:
    moments: dict[str, Any] = {"due_at": NOW + timedelta(minutes=5), "since_at": NOW - timedelta(1)}
    paid = settled_row(NOW, "cancelled", "condition", **moments)
    Timeout.objects.bulk_create([paid, settled_row(NOW - timedelta(days=3))])
    with clock.set_to(NOW):
        assert run(LABEL).splitlines()[0] == f"{LABEL}, 2026-04-11 to 2026-05-10"
        assert [line.split()[:4] for line in run(LABEL).splitlines()[2:]] == [
            ["2026-05-07", "1", "0", "0.0%"],
            ["2026-05-10", "1", "1", "100.0%"],
            ["total", "2", "1", "50.0%"],
        ]
        assert "23 h 27 min" in run(LABEL)  # a day, to 2.5 %
        lines = list(csv.DictReader(io.StringIO(run(LABEL, "--by", "month", "--csv"))))
        months = [(line["month"], line["rounds"], line["share"]) for line in lines]
        assert months == [("2026-05", "2", "0.5"), ("total", "2", "0.5")]
        assert json.loads(run(LABEL, "--last", "1d", "--json"))["total"]["in_time"] == 1
        assert run().splitlines()[2].startswith(LABEL)
        with pytest.raises(CommandError, match="Only one|only one"):
            run("--csv", "--json")
        with pytest.raises(CommandError, match="is not a duration"):
            run("--last", "x")


def test_csv_has_no_cell_that_a_spreadsheet_would_run(policy: TimeoutPolicy[Any]) -> None:
    names = ["\n=1+1", " @SUM(1)", "=HYPERLINK(0)"]
    orders = [Order.objects.create(status="s", note=name) for name in names]
    Timeout.objects.bulk_create([settled_row(NOW, object_id=str(order.pk)) for order in orders])
    with clock.set_to(NOW):
        cells = [row[0] for row in csv.reader(io.StringIO(run(LABEL, "--by", "note", "--csv")))]
    assert sorted(cells) == sorted(["note", *(f"'{name}" for name in names), "total"])
