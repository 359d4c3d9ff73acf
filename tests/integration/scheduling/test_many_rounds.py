"""One object with very many settled rounds, such as of a policy that schedules itself each minute.

What a page view or a save does must not read all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.contenttypes.models import ContentType
from django.db import connection
from django.db.models import Q
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

import django_delayq as dq
from django_delayq.arming.changes import Arming
from django_delayq.arming.reconcile import diff
from django_delayq.arming.row_state import ledger_fits, row_state, row_states
from django_delayq.contrib.countdown import countdown_of
from django_delayq.models import Timeout, slot_of
from django_delayq.scheduling import story
from tests.testapp.models import Order

pytestmark = [pytest.mark.slow, pytest.mark.dialect]

ROUNDS = 3000
MINUTE = timedelta(minutes=1)
TABLE = Timeout._meta.db_table


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
    """An order with many rounds of two policies, among many other timeouts."""
    with django_db_blocker.unblock():
        order = Order.objects.create(status="unpaid", created_at=timezone.now())
        for name in ("remind", "cancel_unpaid"):
            write_rounds(order, name, ROUNDS)
        dq.schedule_timeouts(Order.objects.bulk_create([Order(status="new") for _ in range(1000)]), "remind", hours=1)
        with connection.cursor() as cursor:
            cursor.execute(f"ANALYZE {'TABLE ' * (connection.vendor == 'mysql')}{TABLE}")
        yield order
        Timeout.objects.all().delete()
        Order.objects.all()._raw_delete("default")
        with connection.cursor() as cursor:
            cursor.execute(f"ANALYZE {'TABLE ' * (connection.vendor == 'mysql')}{TABLE}")


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


def rows_read(call: Callable[[], object]) -> int:
    """Return about how many rows of the ledger `call` makes the database read."""
    call()  # what is read once in a process
    if connection.vendor == "sqlite":
        steps: list[int] = []
        connection.connection.set_progress_handler(lambda: steps.append(1), 10)  # a row takes ten steps and more
        try:
            call()
        finally:
            connection.connection.set_progress_handler(None, 10)
        return len(steps)
    before = _read_so_far()
    call()
    return _read_so_far() - before


@pytest.mark.django_db
def test_a_pending_deadline_is_read_without_the_rounds_before_it(old_order: Order) -> None:
    row = dq.schedule_timeout(old_order, "remind", minutes=5)
    assert rows_read(lambda: dq.get_deadline(old_order, "remind")) < ROUNDS / 10
    assert rows_read(lambda: countdown_of(old_order, "remind")) < ROUNDS / 10
    found = countdown_of(old_order, "remind")
    assert (found.timeout_id, found.due_at, found.state) == (row.pk, row.due_at, "pending")
    assert abs(found.now - timezone.now()) < timedelta(seconds=30)


@pytest.mark.django_db
def test_a_countdown_is_one_statement(old_order: Order) -> None:
    with CaptureQueriesContext(connection) as captured:
        assert countdown_of(old_order, "remind").state == "fired"
    assert len(captured) == 1
    assert countdown_of(Order.objects.create(status="new"), "remind").state == ""


@pytest.mark.django_db
def test_a_save_whose_round_is_pending_reads_no_closed_ones(old_order: Order) -> None:
    old_order.save()
    policies = [dq.get_policy((Order, "cancel_unpaid"))]
    assert ledger_fits(policies, old_order.pk, "default")
    assert rows_read(lambda: ledger_fits(policies, old_order.pk, "default")) < ROUNDS / 10
    assert rows_read(lambda: row_state(policies, old_order.pk, "default", lock=True)) < ROUNDS / 10
    assert rows_read(old_order.save) < ROUNDS / 10


@pytest.mark.django_db
def test_a_save_that_moves_since_into_a_closed_round_arms_nothing(old_order: Order) -> None:
    closed_since = Timeout.objects.filter(policy="testapp.order.cancel_unpaid").latest("id").since_at
    old_order.created_at, before = closed_since, old_order.created_at
    old_order.save()
    old_order.created_at = before
    rows = Timeout.objects.filter(policy="testapp.order.cancel_unpaid")
    assert not rows.pending().exists()
    assert list(rows.filter(state="cancelled").values_list("cause", flat=True)) == ["superseded"]


@pytest.mark.django_db
@pytest.mark.parametrize("is_callable", [False, True])
def test_the_closed_rounds_of_another_since_are_not_loaded(
    is_callable: bool, old_order: Order, declare: Callable[..., Any]
) -> None:
    since: Any = (lambda order: order.created_at) if is_callable else "created_at"
    policy = declare(Order, name="often", since=since, after=MINUTE, when=Q(status="unpaid"))
    write_rounds(old_order, "often", 50)
    newest = Timeout.objects.filter(policy=policy.label).latest("id")
    for since_at, is_closed in ((old_order.created_at, False), (newest.since_at, True)):
        Order.objects.filter(pk=old_order.pk).update(created_at=since_at)
        with CaptureQueriesContext(connection) as captured:
            changes = diff(row_states([policy], [old_order.pk], "default"), Arming("default", None))
        assert [each.since_at for each in changes.insert] == ([] if is_closed else [since_at])
        _, sql = (query["sql"] for query in captured if TABLE in query["sql"])
        with connection.cursor() as cursor:
            cursor.execute(sql)
            assert len(cursor.fetchall()) == is_closed


@pytest.mark.django_db
def test_of_many_closed_rounds_with_one_since_one_row_is_loaded(old_order: Order, declare: Callable[..., Any]) -> None:
    """Such as those of a handler that schedules the next round itself."""
    when = Q(status="unpaid")
    policy = declare(Order, name="often", since=lambda order: order.created_at, after=MINUTE, when=when)
    write_rounds(old_order, "often", 50)
    Timeout.objects.filter(policy=policy.label).update(since_at=old_order.created_at)
    with CaptureQueriesContext(connection) as captured:
        assert not diff(row_states([policy], [old_order.pk], "default"), Arming("default", None)).pks
    *_, sql = (query["sql"] for query in captured if TABLE in query["sql"])
    with connection.cursor() as cursor:
        cursor.execute(sql)
        assert len(cursor.fetchall()) == 1


@pytest.mark.django_db
def test_the_objects_of_a_large_page_find_their_closed_rounds(declare: Callable[..., Any]) -> None:
    """So many values of `since` are compared as one range."""
    policy = declare(Order, name="often", since="created_at", after=MINUTE, when=Q(status="unpaid"))
    now = timezone.now()
    Order.objects.bulk_create([Order(status="unpaid", created_at=now - each * MINUTE) for each in range(450)])
    orders = list(Order.objects.filter(status="unpaid"))
    assert dq.sync_timeouts(orders) >= 450
    Timeout.objects.filter(policy=policy.label).update(state="fired", cause="due", settled_at=now, slot_taken=None)
    dq.sync_timeouts(orders)
    assert not Timeout.objects.filter(policy=policy.label).pending().exists()


@pytest.mark.django_db
def test_a_story_shows_the_newest_rounds_and_says_so(old_order: Order) -> None:
    with CaptureQueriesContext(connection) as captured:
        told = dq.explain_timeout(old_order, "remind")
    assert len({event.timeout_id for event in told}) == story.MAX_ROUNDS
    newest = Timeout.objects.filter(object_id=str(old_order.pk), policy="testapp.order.remind").order_by("-id")
    assert {event.timeout_id for event in told} == {row.pk for row in newest[: story.MAX_ROUNDS]}
    assert told.note == f"Only the newest {story.MAX_ROUNDS} rounds are shown."
    assert str(told).splitlines()[1] == f"  {told.note}"
    (sql,) = (query["sql"] for query in captured if "history" in query["sql"])
    assert f"LIMIT {story.MAX_ROUNDS + 1}" in sql


@pytest.mark.django_db
def test_a_story_shows_a_pending_round_that_is_older_than_the_newest(old_order: Order) -> None:
    """An operator may have retried it."""
    oldest = Timeout.objects.filter(policy="testapp.order.remind").earliest("id")
    Timeout.objects.filter(pk=oldest.pk).update(state="pending", cause="", settled_at=None, slot_taken=1)
    told = dq.explain_timeout(old_order, "remind")
    assert oldest.pk in {event.timeout_id for event in told}
    assert "It is due at" in told.outlook


@pytest.mark.django_db
def test_a_story_of_few_rounds_is_whole() -> None:
    order = Order.objects.create(status="new")
    write_rounds(order, "remind", 3)
    told = dq.explain_timeout(order, "remind")
    assert (told.note, len({event.timeout_id for event in told})) == ("", 3)
