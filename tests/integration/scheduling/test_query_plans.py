"""Each look-up of the scheduling side goes through its index, on every database: none may scan the ledger.

Nor may a page view or a save read all rounds of an object that has very many, such as of a policy that schedules itself
each minute. The plans of the sweep and the poll are held beside the worker, on far more rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.contrib.contenttypes.models import ContentType
from django.db import connection
from django.db.models import Q, QuerySet
from django.utils import timezone

import django_delayq as dq
from django_delayq.arming.changes import Arming
from django_delayq.arming.reconcile import diff
from django_delayq.arming.row_state import ledger_fits, row_state, row_states
from django_delayq.ledger.subjects import subject_of
from django_delayq.models import Timeout, slot_of
from django_delayq.operations.selection import CONDITIONS
from django_delayq.scheduling import story
from tests.support.seen import sql_of
from tests.support.typed import Declare
from tests.testapp.models import Order

pytestmark = [pytest.mark.slow, pytest.mark.dialect, pytest.mark.django_db]

ROWS = 3000
TABLE = Timeout._meta.db_table


def analyze() -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"ANALYZE {'TABLE ' * (connection.vendor == 'mysql')}{TABLE}")


@pytest.fixture(scope="module")
def orders(django_db_setup: None, django_db_blocker: Any) -> Iterator[list[Order]]:
    """Many orders, each with one settled and one pending row, and statistics that the planner has seen."""
    with django_db_blocker.unblock():
        now, rows = timezone.now(), []
        Order.objects.bulk_create([Order(status="bulk") for _ in range(ROWS)])
        made = list(Order.objects.filter(status="bulk"))
        kind, label = ContentType.objects.get_for_model(Order).pk, dq.get_policy((Order, "remind")).label
        for order in made:
            due_at, key = now + timedelta(days=1), str(order.pk)
            common = {
                "policy": label, "content_type_id": kind, "object_id": key, "slot": slot_of(label, kind, key, ""),
                "created_at": now, "due_at": due_at, "run_at": due_at, "first_due_at": now,
                "queue": "rare" if order.pk % 100 == 7 else "default", "attempts": order.pk % 80 == 0,
            }  # fmt: skip
            settled = now - timedelta(days=order.pk % 60)
            fired = Timeout(**common, state="fired", cause="due", settled_at=settled, slot_taken=None)
            rows += [Timeout(**common), fired]
        Timeout.objects.bulk_create(rows, batch_size=500)
        analyze()
        yield made
        Timeout.objects.all().delete()
        Order.objects.filter(status="bulk")._raw_delete("default")
        analyze()


def long_ago() -> datetime:
    return timezone.now() - timedelta(days=59)


def queued(state: str) -> QuerySet[Any]:
    """As `delayq_list --queue` reads it."""
    return Timeout.objects.filter(CONDITIONS["queue"]("rare"), state=state).order_by("run_at", "id")[:51]


def failing() -> QuerySet[Any, Any]:
    rows = Timeout.objects.filter(policy="testapp.order.remind").failing()
    return rows.order_by("policy", "state", "attempts", "id").values("pk")[:10_001]


LOOK_UPS: dict[str, tuple[Callable[[Order], QuerySet[Any, Any]], str]] = {
    "slot": (lambda order: subject_of(order, "remind").pending(), "delayq_one_pending_per_slot"),
    "rounds": (lambda order: subject_of(order, "remind").rounds(), "delayq_one_pending_per_slot"),
    "relation": (lambda order: order.timeouts.all(), "delayq_object"),
    "pending": (lambda order: dq.pending_timeouts(order).order_by("id"), "delayq_object"),
    "pending of some": (
        lambda order: dq.pending_timeouts([order, Order(pk=order.pk + 1)], "remind").order_by("id"), "delayq_object",
    ),
    "annotated": (
        lambda order: Order.objects.filter(pk=order.pk).annotate(due=dq.Deadline("remind")), "delayq_object",
    ),
    "joined": (lambda order: Order.objects.filter(pk=order.pk, timeouts__state="pending"), "delayq_object"),
    "excluded": (
        lambda order: Order.objects.filter(pk=order.pk).exclude(timeouts__state="dead"), "delayq_object",
    ),
    "to prune": (
        lambda order: Timeout.objects.filter(settled_at__lt=long_ago()).order_by("settled_at")[:99],
        "delayq_settled",
    ),
    # Of 1,000,000 rows, those of a rare queue are few, and so are those of a policy that fail.
    "a rare queue": (lambda order: queued("pending"), "delayq_queue"),
    "a rare queue, settled": (lambda order: queued("fired"), "delayq_queue"),
    "failing": (lambda order: failing(), "delayq_failing"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOK_UPS)
def test_a_look_up_uses_its_index(orders: list[Order], name: str) -> None:
    query, index = LOOK_UPS[name]
    plan = query(orders[ROWS // 2]).explain()
    if connection.vendor == "sqlite" and index == "delayq_one_pending_per_slot":
        index = "sqlite_autoindex_django_delayq_timeout"  # SQLite names the index of a constraint itself
    assert index in plan, plan


# One object with very many settled rounds.
ROUNDS = 3000
MINUTE = timedelta(minutes=1)


def write_rounds(order: Order, name: str, count: int) -> None:
    """Write so many rounds of a policy that have fired, a minute apart, the last one a minute ago."""
    kind, label, now = ContentType.objects.get_for_model(Order).pk, f"testapp.order.{name}", timezone.now()
    own: dict[str, Any] = {"policy": label, "content_type_id": kind, "object_id": str(order.pk)}
    own |= {"slot": slot_of(label, kind, str(order.pk), ""), "slot_taken": None, "state": "fired", "cause": "due"}
    moments = [now - number * MINUTE for number in range(count, 0, -1)]
    rows = [
        Timeout(**own, due_at=at, run_at=at, first_due_at=at, created_at=at, settled_at=at, since_at=at - MINUTE)
        for at in moments
    ]
    Timeout.objects.bulk_create(rows, batch_size=500)


@pytest.fixture(scope="module")
def old_order(django_db_setup: None, django_db_blocker: Any) -> Iterator[Order]:
    """An order with many rounds of two policies, among many other pending timeouts, and statistics of the table."""
    with django_db_blocker.unblock():
        order = Order.objects.create(status="unpaid", created_at=timezone.now())
        for name in ("remind", "cancel_unpaid"):
            write_rounds(order, name, ROUNDS)
        dq.schedule_timeouts(Order.objects.bulk_create([Order(status="new") for _ in range(1000)]), "remind", hours=1)
        analyze()
        yield order
        Timeout.objects.all().delete()
        Order.objects.all()._raw_delete("default")
        analyze()


def _read_so_far() -> int:
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "SELECT coalesce(sum(seq_tup_read + coalesce(idx_tup_fetch, 0)), 0) FROM pg_stat_xact_user_tables"
                " WHERE relname = %s",
                [TABLE],
            )
            return int(cursor.fetchone()[0])
        cursor.execute("SHOW SESSION STATUS LIKE 'Handler_read%%'")
        return sum(int(value) for _, value in cursor.fetchall())


def reads_few(call: Callable[[], object]) -> bool:
    """Return whether `call` makes the database read less than a tenth of the rounds of one policy."""
    call()  # what is read once in a process
    if connection.vendor == "sqlite":
        steps: list[int] = []
        connection.connection.set_progress_handler(lambda: steps.append(1), 10)  # a row takes ten steps and more
        try:
            call()
        finally:
            connection.connection.set_progress_handler(None, 10)
        return len(steps) < ROUNDS / 10
    before = _read_so_far()
    call()
    return _read_so_far() - before < ROUNDS / 10


def test_a_save_whose_round_is_pending_reads_no_closed_ones(old_order: Order) -> None:
    old_order.save()
    policies = [dq.get_policy((Order, "cancel_unpaid"))]
    assert ledger_fits(policies, old_order.pk, "default")
    assert reads_few(lambda: ledger_fits(policies, old_order.pk, "default"))
    assert reads_few(lambda: row_state(policies, old_order.pk, "default", lock=True))
    assert reads_few(old_order.save)


@pytest.mark.parametrize("is_callable", [False, True])
def test_closed_rounds_are_loaded_only_for_the_present_since_and_once(
    is_callable: bool, old_order: Order, declare: Declare
) -> None:
    """Many rounds have one `since` if, for example, a handler schedules the next one itself."""
    since: Any = (lambda order: order.created_at) if is_callable else "created_at"
    policy = declare(Order, name="often", since=since, after=MINUTE, when=Q(status="unpaid"))
    write_rounds(old_order, "often", 50)
    newest = Timeout.objects.filter(policy=policy.label).latest("id")
    for since_at, closed in ((old_order.created_at, 0), (newest.since_at, 1), (newest.since_at, 50)):
        Order.objects.filter(pk=old_order.pk).update(created_at=since_at)
        if closed == 50:
            Timeout.objects.filter(policy=policy.label).update(since_at=since_at)
        inserted = list[Any]()

        def compare(inserted: list[Any] = inserted) -> None:
            changes = diff(row_states([policy], [old_order.pk], "default"), Arming("default", None))
            inserted.extend(each.since_at for each in changes.insert)

        *_, sql = (sql for sql in sql_of(compare) if TABLE in sql)
        assert inserted == ([] if closed else [since_at])
        with connection.cursor() as cursor:
            cursor.execute(sql)
            assert len(cursor.fetchall()) == min(closed, 1)


def test_the_objects_of_a_large_page_find_their_closed_rounds(declare: Declare) -> None:
    """So many values of `since` are compared as one range."""
    policy = declare(Order, name="often", since="created_at", after=MINUTE, when=Q(status="unpaid"))
    now = timezone.now()
    Order.objects.bulk_create([Order(status="unpaid", created_at=now - each * MINUTE) for each in range(450)])
    orders = list(Order.objects.filter(status="unpaid"))
    assert dq.sync_timeouts(orders) >= 450
    Timeout.objects.filter(policy=policy.label).update(state="fired", cause="due", settled_at=now, slot_taken=None)
    dq.sync_timeouts(orders)
    assert not Timeout.objects.filter(policy=policy.label).pending().exists()


def test_a_story_shows_the_newest_rounds_and_a_pending_one_and_says_so(old_order: Order) -> None:
    told = list[Any]()
    sent = sql_of(lambda: told.append(dq.explain_timeout(old_order, "remind")))
    newest = Timeout.objects.filter(object_id=str(old_order.pk), policy="testapp.order.remind").order_by("-id")
    assert {event.timeout_id for event in told[0]} == {row.pk for row in newest[: story.MAX_ROUNDS]}
    assert told[0].note == f"Only the newest {story.MAX_ROUNDS} rounds are shown."
    assert str(told[0]).splitlines()[1] == f"  {told[0].note}"
    (sql,) = (sql for sql in sent if "history" in sql)
    assert f"LIMIT {story.MAX_ROUNDS + 1}" in sql
    oldest = newest.reverse()[0]  # which an operator may have retried
    Timeout.objects.filter(pk=oldest.pk).update(state="pending", cause="", settled_at=None, slot_taken=1)
    again = dq.explain_timeout(old_order, "remind")
    assert oldest.pk in {event.timeout_id for event in again}
    assert "It is due at" in again.outlook
