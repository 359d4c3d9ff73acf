"""A replica that is behind: no decision, signal or answer of the library reads from it, and no verb writes to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db.models import prefetch_related_objects
from django.utils import timezone

import django_delayq as dq
from django_delayq import operations
from django_delayq.contrib.countdown import countdown_of, pending_countdowns
from django_delayq.models import Timeout
from tests.support.seen import heard
from tests.testapp.models import Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True, databases=["default", "replica"])]
BY = "admin:alice"


@pytest.fixture
def row(order: Order) -> Timeout:
    """Return the timeout as the application reads it. The writer has moved its deadline since."""
    dq.reschedule_timeout(order, "cancel_unpaid", hours=5)
    return Timeout.objects.get()


def written() -> Timeout:
    return Timeout.objects.using("default").get()


def test_a_payment_view_reads_the_order_from_the_replica_and_pays_on_the_writer(order: Order) -> None:
    Order.objects.using("default").update(note="written since")
    with heard("cancelled") as got, dq.before_deadline(order, "cancel_unpaid") as timeout:
        assert (order.note, order._state.db) == ("written since", "default")
        assert timeout is not None and timeout.state == "cancelled"
        order.status = "paid"
        order.save()
    assert (written().state, written().cause) == ("cancelled", "condition")
    ((_, told),) = got
    obj: Any = told.content_object
    assert (told._state.db, told.state, obj.note) == ("default", "cancelled", "written since")


def test_a_payment_after_the_deadline_is_refused_although_the_replica_still_shows_it_pending(order: Order) -> None:
    Timeout.objects.using("default").update(state="fired", cause="due", settled_at=timezone.now(), slot_taken=None)
    with pytest.raises(dq.DeadlinePassed) as late, dq.before_deadline(order, "cancel_unpaid"):
        pytest.fail("the block ran")
    assert late.value.timeout.state == "fired"


def test_an_order_that_the_replica_does_not_have_yet_can_be_paid(replicate: Callable[[], None]) -> None:
    order = Order.objects.create(created_at=timezone.now())
    assert dq.cancel_timeout(order, "cancel_unpaid") is True
    assert written().state == "cancelled"


@pytest.mark.parametrize("given", ["order", "row"])
@pytest.mark.parametrize("verb", [dq.cancel_timeout, dq.reschedule_timeout, dq.extend_timeout])
def test_a_verb_acts_on_the_writer_whatever_it_is_given(
    order: Order, row: Timeout, given: str, verb: Callable[..., Any]
) -> None:
    arguments: tuple[Any, ...] = (order, "cancel_unpaid") if given == "order" else (row,)
    before, is_cancel = written().due_at, verb is dq.cancel_timeout
    with heard("cancelled", "rescheduled") as got:
        verb(*arguments, **{} if is_cancel else {"hours": 9})
    after, ((_, told),) = written(), got
    assert (after.state == "cancelled", after.due_at > before) == (is_cancel, not is_cancel)
    seen = (told._state.db, told.state, told.due_at, told.history)
    assert seen == ("default", after.state, after.due_at, after.history)


def test_scheduling_saving_and_deleting_an_order_of_the_replica_changes_timeouts_on_the_writer(order: Order) -> None:
    assert dq.schedule_timeout(order, "remind", hours=1)._state.db == "default"
    dq.schedule_timeouts(Order.objects.all(), "remind", key="many", hours=1)
    for order.status in ("paid", "unpaid"):
        order.save()
    order.delete()
    rows = Timeout.objects.using("default").order_by("id").values_list("policy", "state", "cause")
    ends = [(label.rpartition(".")[2], state, cause) for label, state, cause in rows]
    unpaid, reminder = ("cancel_unpaid", "cancelled"), ("remind", "cancelled", "gone")
    assert ends == [(*unpaid, "condition"), reminder, reminder, (*unpaid, "gone")]


SOURCES: dict[str, Callable[[Order], Any]] = {
    "the relation": lambda order: order.timeouts.all(),
    "a queryset": lambda order: Timeout.objects.filter(state="pending"),
    "a slice": lambda order: Timeout.objects.order_by("id")[:5],
    "a list": lambda order: list(Timeout.objects.all()),
    "pending_timeouts": lambda order: dq.pending_timeouts(order),
    "all pending_timeouts": lambda order: dq.pending_timeouts(),
    "those of a queryset": lambda order: dq.pending_timeouts(Order.objects.filter(status="unpaid")),
    "a row": lambda order: Timeout.objects.get(),
}
BULK: dict[str, Callable[[Any], Any]] = {
    "cancel_timeouts": dq.cancel_timeouts,
    "extend_timeouts": lambda rows: dq.extend_timeouts(rows, hours=1),
    "reschedule_timeouts": lambda rows: dq.reschedule_timeouts(rows, hours=9),
    "cancel": lambda rows: operations.cancel(rows, by=BY),
    "postpone": lambda rows: operations.postpone(rows, by=BY, hours=1),
    "fire_now": lambda rows: operations.fire_now(rows, by=BY),
}


@pytest.mark.parametrize(
    ("source", "verb"),
    [*((source, "extend_timeouts") for source in SOURCES), *(("the relation", verb) for verb in BULK)],
)
@pytest.mark.usefixtures("row")
def test_a_bulk_verb_changes_the_rows_of_the_writer(order: Order, source: str, verb: str) -> None:
    before = (written().state, written().due_at)
    changed = BULK[verb](SOURCES[source](order))
    assert getattr(changed, "changed", changed) == 1
    assert (written().state, written().due_at) != before


def test_every_answer_is_the_writer_s(order: Order, row: Timeout) -> None:
    due = written().due_at
    assert row.due_at != due
    assert {dq.get_deadline(order, "cancel_unpaid"), dq.get_deadline(row)} == {due}
    assert {timeout.due_at for timeout in [*dq.pending_timeouts(order), *dq.pending_timeouts(row)]} == {due}
    assert [timeout.due_at for timeout in dq.pending_timeouts()] == [due]
    assert countdown_of(order, "cancel_unpaid").due_at == due
    prefetch_related_objects([order], "timeouts")
    assert countdown_of(order, "cancel_unpaid").due_at == due
    assert [seen and seen.due_at for seen in pending_countdowns([order], "cancel_unpaid")] == [due]
    dq.cancel_timeout(order, "cancel_unpaid", reason="by phone")
    assert "by phone" in str(dq.explain_timeout(order, "cancel_unpaid"))
    assert "by phone" in str(dq.explain_timeout(row))
    assert not dq.pending_timeouts(order).exists()


def test_a_row_of_the_replica_refreshes_itself_and_its_deferred_columns_from_the_writer(row: Timeout) -> None:
    lazy = Timeout.objects.defer("history", "due_at").get()
    assert (lazy.history, lazy.due_at) == (written().history, written().due_at)
    row.refresh_from_db()
    assert row.due_at == written().due_at


def test_sync_decides_by_the_writer(order: Order) -> None:
    Order.objects.using("default").update(status="paid")
    assert dq.sync_timeouts(order) == 1
    Order.objects.using("default").update(status="unpaid")
    assert dq.sync_timeouts(Timeout.objects.get()) == 1
    Order.objects.using("default").update(status="paid")
    assert dq.sync_timeouts(Order.objects.filter(status="paid")) == 1  # which the replica does not have
