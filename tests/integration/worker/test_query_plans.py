"""Every query that a worker makes all the time reads only what it wants, however long the ledger is.

`DELAYQ_TEST_ROWS` rows, by default `ENOUGH`: from there on the plans are those of 1,000,000 (tried on each database).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.db import connection
from django.db.models import Count
from django.test.utils import CaptureQueriesContext

from django_delayq import TimeoutPolicy, clock, timeout_policy
from django_delayq.firing.gathering import Gathering
from django_delayq.firing.report import ReportBuilder
from django_delayq.firing.works import RunningWork, Work
from django_delayq.ledger import claiming, marking, rollups
from django_delayq.ledger.controls import StopCache
from django_delayq.ledger.shares import provide_lock
from django_delayq.models import Timeout
from django_delayq.monitoring import misfits
from django_delayq.policy.policies import registry
from django_delayq.sql.now import database_now
from django_delayq.worker.background import forgotten
from django_delayq.worker.sweep import PAGE_ROWS, Row, page_of
from tests.testapp.models import Order

ENOUGH = {"postgresql": 200_000, "mysql": 100_000, "sqlite": 50_000}
ROWS = int(os.environ.get("DELAYQ_TEST_ROWS", ENOUGH[connection.vendor]))
pytestmark = [pytest.mark.slow, pytest.mark.dialect, pytest.mark.django_db]

# A quarter is settled, a quarter due in the far future, a fiftieth at one and the same time; the rest is spread
# over the last hour.
SERIES = {
    "postgresql": "(SELECT generate_series(1, {rows}) AS n) AS series",
    "mysql": "(SELECT seq AS n FROM seq_1_to_{rows}) AS series",
    "sqlite": (
        "(WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {rows}) SELECT n FROM s) AS series"
    ),
}
COLUMNS = (
    'policy, content_type_id, object_id, "key", queue, state, cause, due_at, run_at, first_due_at, extensions, '
    "attempts, history, reason, created_at, settled_at, idempotency_key, slot, slot_taken, final_attempt, claims, "
    "snoozes, deaths, is_requested, is_due_by_request, held_by_hand, held_when, share, keeps_deadline, "
    "is_guarded, trace, step, steps_over"
)
FORM = """
INSERT INTO django_delayq_timeout ({columns})
SELECT 'testapp.order.remind', 1, n, '', 'default',
       CASE WHEN n % 4 = 0 THEN 'fired' ELSE 'pending' END, CASE WHEN n % 4 = 0 THEN 'due' ELSE '' END,
       {moment}, {moment}, {moment}, 0, 0, '[]', '', {past},
       CASE WHEN n % 4 = 0 THEN {moment} ELSE NULL END, n, n, CASE WHEN n % 4 = 0 THEN NULL ELSE 1 END, {no}, 0,
       0, 0, {no}, {no}, {no}, {no}, {share}, {no}, {no}, '', '', ''
FROM {series}
"""
SECONDS = """(CASE WHEN n % 4 = 0 THEN -90 * 86400 WHEN n % 4 = 1 THEN 86400
WHEN n % 50 = 2 THEN -1800 ELSE -(n % 3600) END)"""
MOMENTS = {
    "postgresql": f"now() + {SECONDS} * interval '1 second'",
    "mysql": f"UTC_TIMESTAMP(6) + INTERVAL {SECONDS} SECOND",
    "sqlite": f"strftime('%Y-%m-%d %H:%M:%S', 'now', {SECONDS} || ' seconds')",
}


OWNERS = 4_999
"""Each has some twenty due rows, and as many others. The last one has a hundredth of all rows."""


@pytest.fixture(scope="module", autouse=True)
def long_ledger(django_db_setup: None, django_db_blocker: Any) -> Iterator[None]:
    """The rows, for all tests here. They take longer than all tests together."""
    vendor = connection.vendor
    past = {"postgresql": "now()", "mysql": "UTC_TIMESTAMP(6)", "sqlite": "datetime('now')"}[vendor]
    columns = COLUMNS.replace('"', "`") if vendor == "mysql" else COLUMNS
    series = SERIES[vendor].format(rows=ROWS)
    no = "false" if vendor == "postgresql" else "0"
    owner = f"CASE WHEN n % 100 = 99 THEN {OWNERS} ELSE n % {OWNERS} END"
    share = f"CAST({owner} AS {'CHAR(20)' if vendor == 'mysql' else 'varchar(20)'})"
    sql = FORM.format(columns=columns, moment=MOMENTS[vendor], past=past, series=series, no=no, share=share)
    with django_db_blocker.unblock(), connection.cursor() as cursor:
        digits = "lpad(CAST(n AS varchar), 32, '0')::uuid" if vendor == "postgresql" else "CAST(n AS CHAR(32))"
        cursor.execute(sql.replace("n, n, CASE", f"{digits}, {digits}, CASE"))
        cursor.execute("ANALYZE TABLE django_delayq_timeout" if vendor == "mysql" else "ANALYZE django_delayq_timeout")
        if vendor == "mysql":
            cursor.fetchall()
    yield
    with django_db_blocker.unblock(), connection.constraint_checks_disabled(), connection.cursor() as cursor:
        cursor.execute(f"{'TRUNCATE' if vendor == 'mysql' else 'DELETE FROM'} django_delayq_timeout")


def plans_of(call: Callable[[], object], *, of_stop_changes: bool = False) -> str:
    """Return the plan of each query of the ledger that `call` makes: of the read of stops, or of all others."""
    with CaptureQueriesContext(connection) as queries:
        call()
    looks = [query["sql"] for query in queries if "django_delayq_timeout" in query["sql"]]
    looks = [sql for sql in looks if of_stop_changes == ("policycontrol" in sql)]
    looks = [sql for sql in looks if not sql.startswith("UPDATE") or ("WHERE" in sql and "id = -1" not in sql)]
    assert looks
    explain = "EXPLAIN QUERY PLAN " if connection.vendor == "sqlite" else "EXPLAIN "
    found = []
    for sql in looks:
        with connection.cursor() as cursor:
            cursor.execute(explain + sql.replace("%", "%%"), ())
            found += [" ".join(map(str, row)) for row in cursor.fetchall()]
    return "\n".join(line for line in found if "<derived" not in line)  # what the lines after it have found


def check(plan: str, index: str, *, is_short: bool = False) -> None:
    """The plan uses the index, and reads nothing from end to end.

    Nor does it sort, which would mean to read all before the first; unless `is_short`, when all is little.
    """
    assert index in plan, plan
    sorts = () if is_short else ("filesort", "TEMP B-TREE", "Sort")
    for bad in ("Seq Scan", " ALL ", "SCAN django_delayq_timeout\n", *sorts):
        assert bad not in plan + "\n", plan


def without_controls(plan: str) -> str:
    """Return the lines about the ledger: what is small may be read from end to end."""
    small = re.compile(r"policycontrol|policysync|control ALL|asked ALL")
    return "\n".join(line for line in plan.splitlines() if not small.search(line))


def now() -> Any:
    return database_now("default")


def middle() -> Row:
    """Return a row among many that are due at the same time."""
    rows = Timeout.objects.pending().filter(run_at__lt=now())
    crowded = rows.values("run_at").annotate(many=Count("id")).order_by("-many")[0]["run_at"]
    ids = list(rows.filter(run_at=crowded).order_by("id").values_list("id", flat=True))
    assert len(ids) > ROWS // 200
    return Row(crowded, ids[len(ids) // 2], "default", "", crowded)


def old(*labels: str, but: tuple[str, ...] = ()) -> Callable[[], object]:
    """Return the deletion of the first page of old rows."""
    rows = marking.Old(clock.now() - timedelta(days=30), labels, but=but)
    return partial(marking.delete_settled, "default", rows, None)


CROWDED, EMPTY = "testapp.order.remind", "testapp.order.linger"
QUERIES: dict[str, tuple[Callable[[], Callable[[], object]], str, bool]] = {
    "the sweep behind": (
        lambda: partial(page_of, "default", now() - timedelta(seconds=60), None, now()), "delayq_unsettled", True,
    ),
    "the sweep ahead": (
        lambda: partial(page_of, "default", now(), None, now() + timedelta(seconds=10)), "delayq_unsettled", True,
    ),
    "the sweep of everything": (lambda: partial(page_of, "default", None, None, now()), "delayq_unsettled", False),
    "expired rows that are firing": (lambda: partial(marking.expired, "default", 1000), "delayq_unsettled", False),
    "what is forgotten": (lambda: partial(forgotten, "default", None, clock.now()), "delayq_unsettled", False),
    "a page of the pruning": (old, "delayq_settled", False),
    "of all but some policies": (lambda: old(but=(EMPTY,)), "delayq_settled", False),
    "of a policy with a retention of its own": (lambda: old(CROWDED), "delayq_", True),
    "of one without rows": (lambda: old(EMPTY), "delayq_", True),
    "pending deadlines beside the delay": (
        lambda: partial(misfits._sample, [CROWDED, EMPTY], "default"), "delayq_policy", False,
    ),
}  # fmt: skip
"""What is asked, which index it uses, and whether all that it reads is little."""


def test_a_query_reads_only_what_it_wants() -> None:
    for call, index, is_short in QUERIES.values():
        check(plans_of(call()), index, is_short=is_short)
    news = plans_of(lambda: StopCache().read_stop_changes("default"), of_stop_changes=True)
    check(without_controls(news), "delayq_unsettled", is_short=True)


def test_a_page_of_the_sweep_begins_where_the_last_one_ended() -> None:
    place = middle()
    page: list[Row] = []
    plan = plans_of(lambda: page.extend(page_of("default", None, place, now())))
    check(plan, "delayq_unsettled")
    assert connection.vendor != "mysql" or " range " in plan, "a page must not read the rows before it"
    assert len(page) == PAGE_ROWS
    assert all((row.run_at, row.id) > (place.run_at, place.id) for row in page)
    assert page == sorted(page)


def test_the_look_for_each_policy_and_its_claim() -> None:
    """Also where one policy has nothing and all that is due is the other's."""
    labels = [CROWDED, EMPTY, "testapp.parcel.chase"]
    assert claiming.labels_with_claimable("default", None, labels) == {CROWDED: True}
    look = plans_of(lambda: claiming.labels_with_claimable("default", None, labels), of_stop_changes=True)
    check(without_controls(look), "delayq_policy")
    limits = {CROWDED: 100, EMPTY: 100}
    assert len(claiming.claim_each("default", None, limits, timedelta(0)).claims) == 100
    check(plans_of(lambda: claiming.claim_each("default", None, {EMPTY: 9}, timedelta(0))), "delayq_policy")


def test_the_count_of_settled_rows_for_reports() -> None:
    begin, end = clock.now() - timedelta(days=91), clock.now() - timedelta(days=89)
    pages = rollups.read_settled(Timeout.objects.using("default"), begin, end)
    for _ in range(3):
        check(plans_of(lambda: next(pages)), "delayq_settled")
    check(plans_of(lambda: list(rollups.uncounted("default", begin, end, {}))), "delayq_settled")


@pytest.fixture(params=[(), ("reminded",)], ids=["one name", "two names"])
def batches(request: pytest.FixtureRequest) -> Iterator[TimeoutPolicy[Any]]:
    """Let the policy of the rows be one with `batch_by`."""
    registry.remove(before := registry.get(CROWDED))  # type: ignore[arg-type]
    options: dict[str, Any] = {"batch": 500, "batch_by": "status", "aliases": request.param}
    declared: TimeoutPolicy[Any] = timeout_policy(Order, name="remind", **options)(lambda orders, timeouts: None)
    yield declared
    registry.remove(declared)
    registry.add(before)  # type: ignore[arg-type]


def gathered(policy: TimeoutPolicy[Any], owner: str) -> list[int]:
    work = Work(policy.label, (-1,), ("-1",), share=owner)
    provide_lock(policy, owner, "default")
    gathering = Gathering(RunningWork(work, "default", ReportBuilder(), policy), work)
    return [candidate.id for candidate in gathering.gather()]


def test_the_due_rows_of_one_value_are_read_from_its_index(batches: TimeoutPolicy[Any]) -> None:
    for owner in ("17", str(OWNERS), "unknown"):
        due = Timeout.objects.due().filter(share=owner).count()
        assert (due == 0) == (owner == "unknown")
        assert len(gathered(batches, owner)) == min(due, 500)
        # Of few rows PostgreSQL reads all, and sorts them.
        check(plans_of(partial(gathered, batches, owner)), "delayq_share", is_short=due < 500)
