"""The bulk verbs, pending timeouts, deadlines as columns, stories, signals and the async twins."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction
from django.utils import timezone

import django_delayq as dq
from django_delayq import clock, operations
from django_delayq.ledger.paging import update_each
from django_delayq.models import Timeout, TimeoutQuerySet
from tests.support.seen import heard, sql_of
from tests.testapp.models import ExpressOrder, Order, Parcel, Voucher

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def orders() -> list[Order]:
    return [Order.objects.create(status="new") for _ in range(5)]


@pytest.mark.parametrize("by_operator", [False, True])
def test_cancelling_many_that_are_firing_takes_as_many_statements_as_two(
    orders: list[Order], by_operator: bool
) -> None:
    dq.schedule_timeouts(orders, "remind", minutes=5)
    firing = Timeout.objects.filter(state="firing")
    cancel: Any = partial(operations.cancel, by="hand") if by_operator else dq.cancel_timeouts
    counts = set()
    for few in (orders[:2], orders[2:]):
        Timeout.objects.filter(object_id__in=[str(order.pk) for order in few]).update(state="firing", slot_taken=None)
        counts.add(len(sql_of(lambda: cancel(firing, reason="stop"))))
        for row in firing:
            event = row.history[-1]
            assert (row.final_attempt, event["what"], event["reason"]) == (True, "cancel_requested", "stop")
        firing.update(state="cancelled", cause="hand", settled_at=timezone.now())
    assert len(counts) == 1


def test_scheduling_many_keeps_or_refuses_what_is_pending(orders: list[Order]) -> None:
    first = dq.schedule_timeout(orders[0], "remind", minutes=1)
    assert dq.schedule_timeouts(orders, "remind", minutes=9, on_conflict="keep") == 4
    assert Timeout.objects.get(pk=first.pk).due_at == first.due_at
    with pytest.raises(dq.TimeoutConflict):
        dq.schedule_timeouts(orders, "remind", minutes=9, on_conflict="error")


def test_cancelling_extending_and_moving_many(orders: list[Order]) -> None:
    dq.schedule_timeouts(orders, "remind", minutes=5)
    before = {row.pk: row.due_at for row in dq.pending_timeouts(orders, "remind")}
    assert dq.extend_timeouts(dq.pending_timeouts(orders[:2], "remind"), minutes=1, reason="rain") == 2
    moved = [row for row in dq.pending_timeouts(Order) if row.due_at != before[row.pk]]
    found = {(row.due_at - before[row.pk], row.history[-1]["reason"]) for row in moved}
    assert found == {(timedelta(minutes=1), "rain")}
    assert dq.reschedule_timeouts(dq.pending_timeouts(Order, "remind"), hours=1) == 5
    assert dq.cancel_timeouts(dq.pending_timeouts(orders[0], "remind"), reason="stop") == 1
    assert dq.cancel_timeouts(dq.pending_timeouts(Order)[:1]) == 1
    assert dq.cancel_timeouts(list(dq.pending_timeouts(Order))) == 3
    assert dq.cancel_timeouts(Timeout.objects.all()) == 0
    assert {(row.state, row.cause) for row in Timeout.objects.all()} == {("cancelled", "hand")}


def test_extending_leaves_a_retry_waiting(orders: list[Order]) -> None:
    """The handler failed, and its next attempt must not come early."""
    row = dq.schedule_timeout(orders[0], "remind", minutes=1)
    retry_at = row.due_at + timedelta(hours=5)
    Timeout.objects.update(run_at=retry_at, attempts=1)
    assert dq.extend_timeouts(dq.pending_timeouts(Order, "remind"), minutes=1) == 1
    row.refresh_from_db()
    assert (row.run_at, row.due_at) == (retry_at, retry_at - timedelta(hours=4, minutes=59))


def test_extensions_go_on_when_their_number_no_longer_fits_the_column(orders: list[Order]) -> None:
    """A timeout that is extended once a minute has 32,767 extensions after 23 days, the most for a small integer."""
    dq.schedule_timeouts(orders[:2], "remind", minutes=5)
    Timeout.objects.filter(object_id=str(orders[0].pk)).update(extensions=32_767)
    begin = dq.get_deadline(orders[0], "remind")
    for _ in range(2):
        assert dq.extend_timeout(orders[0], "remind", minutes=1)
        assert dq.extend_timeouts(dq.pending_timeouts(Order, "remind"), minutes=1) == 2
    row = dq.pending_timeouts(orders[0], "remind").get()
    assert row.extensions == 32_000, "no policy can declare a higher max_extensions"
    assert begin is not None and row.due_at == begin + timedelta(minutes=4)


def test_bulk_verbs_send_no_signals_and_single_ones_send_them_after_commit(orders: list[Order]) -> None:
    def fail(**_: Any) -> None:
        raise RuntimeError("a receiver that raises stops nothing")

    dq.timeout_scheduled.connect(fail)
    with heard("scheduled", "rescheduled", "cancelled") as got:
        dq.schedule_timeouts(orders, "remind", minutes=5)
        dq.cancel_timeouts(dq.pending_timeouts(Order))
        with transaction.atomic():
            row = dq.schedule_timeout(orders[0], "remind", minutes=5)
            dq.extend_timeout(row, minutes=1)
            dq.cancel_timeout(row)
            assert got == []
    dq.timeout_scheduled.disconnect(fail)
    assert got == [("scheduled", row), ("rescheduled", row), ("cancelled", row)]


def test_no_objects_select_no_timeouts_and_never_all_of_them(orders: list[Order]) -> None:
    dq.schedule_timeouts(orders, "remind", minutes=5)
    nothing: Any
    for nothing in ([], (), Order.objects.none(), Order.objects.filter(status="nope")):
        assert dq.cancel_timeouts(dq.pending_timeouts(nothing)) == 0
        assert dq.schedule_timeouts(nothing, "remind", minutes=1) == 0
    assert dq.pending_timeouts(Order).count() == 5


def test_what_a_relation_gives_is_for_reading_and_for_the_verbs(orders: list[Order]) -> None:
    order = orders[0]
    relation: Any = order.timeouts
    dq.schedule_timeouts(orders, "remind", hours=1)
    mine = order.timeouts.filter(state="pending")
    for write in (
        lambda: order.timeouts.all().delete(),
        lambda: mine.update(state="fired"),
        lambda: mine.create(policy="x"),
        lambda: mine.order_by("pk").bulk_update([], ["state"]),
        lambda: async_to_sync(TimeoutQuerySet.aupdate)(mine, state="fired"),
        lambda: Order.objects.prefetch_related("timeouts")[0].timeouts.all().delete(),
        *(relation.clear, relation.create, relation.acreate, relation.bulk_create),
        lambda: setattr(order, "timeouts", []),
    ):
        with pytest.raises(TypeError, match="not written through a relation|schedule_timeout"):
            write()
    prefetched = Order.objects.prefetch_related("timeouts").get(pk=order.pk)
    assert list(pickle.loads(pickle.dumps(prefetched)).timeouts.all()) == list(mine)
    assert dq.extend_timeouts(mine, minutes=1) == 1
    assert dq.cancel_timeouts(mine) == 1
    assert Timeout.objects.filter(state="pending").count() == 4


def test_a_deadline_is_a_column_to_annotate_filter_and_sort_by(orders: list[Order]) -> None:
    late = dq.schedule_timeout(orders[0], "remind", hours=2)
    soon = dq.schedule_timeout(orders[1], "remind", hours=1)
    dq.schedule_timeout(orders[2], "remind", minutes=1, key="other")
    due = Order.objects.annotate(due=dq.Deadline("remind")).filter(due__isnull=False).order_by("due")
    assert list(due.values_list("pk", "due")) == [(orders[1].pk, soon.due_at), (orders[0].pk, late.due_at)]
    found = Order.objects.alias(due=dq.Deadline("remind")).filter(due__gt=soon.due_at)
    assert list(found) == [orders[0]]
    assert Order.objects.order_by(dq.Deadline("remind", key="other").asc(nulls_last=True)).first() == orders[2]
    voucher = Voucher.objects.create(code="Ünï", issued_at=timezone.now())
    assert Voucher.objects.annotate(due=dq.Deadline("expire")).get().due == dq.get_deadline(voucher, "expire")
    with pytest.raises(dq.UnknownPolicy):
        Order.objects.annotate(due=dq.Deadline("nope"))


def test_the_story_tells_every_round_in_order(orders: list[Order]) -> None:
    order = orders[0]
    dq.schedule_timeout(order, "remind", minutes=5, reason="first")
    dq.extend_timeout(order, "remind", minutes=5, reason="asked for it")
    dq.cancel_timeout(order, "remind", reason="no need")
    dq.schedule_timeout(order, "remind", minutes=7)
    story = dq.explain_timeout(order, "remind")
    assert [event.what for event in story] == ["scheduled", "extended", "cancelled", "scheduled"]
    assert all(words in str(story) for words in ("asked for it", "no need", "It is due at"))


def test_the_async_twins_do_the_same(orders: list[Order]) -> None:
    async def play(order: Order) -> list[Any]:
        row = await dq.aschedule_timeout(order, "remind", minutes=5)
        extended = await dq.aextend_timeout(order, "remind", minutes=5)
        moved = await dq.areschedule_timeout(order, "remind", minutes=1)
        assert moved is not None and await dq.aget_deadline(order, "remind") == moved.due_at
        assert await dq.acancel_timeout(order, "remind")
        return [row, extended, moved]

    assert async_to_sync(play)(orders[0]) == list(Timeout.objects.all()) * 3


# Many rows: the same as one by one, in few statements.
DIFFERENT = {"id", "idempotency_key"}
ODD_KEYS = ["a", "Ünï", 'quote"d', "com,ma", "back\\slash", "percent%s", "{brace}", "new\nline"]


@pytest.fixture
def now() -> Iterator[datetime]:
    moment = timezone.now().replace(microsecond=123456)
    with clock.set_to(moment):
        yield moment


def columns() -> list[dict[str, Any]]:
    names = [field.attname for field in Timeout._meta.concrete_fields if field.name not in DIFFERENT]
    return list(Timeout.objects.order_by("object_id").values(*names))


@pytest.mark.parametrize("model", [Order, ExpressOrder, Parcel, Voucher])
def test_a_row_scheduled_in_bulk_is_the_row_scheduled_alone(model: Any, now: datetime, declare: Any) -> None:
    keys = [{"code": code} for code in ODD_KEYS] if model is Voucher else [{}] * 3
    objects = [model.objects.create(status="new", **key) for key in keys]
    policy = declare(model, name="bulky", queue="other")
    words: Any = {"key": "k\"'%s", "payload": {"n": [1, None, "ü", {"deep": "\\"}]}, "reason": "Because ü", "hours": 2}
    for obj in objects:
        dq.schedule_timeout(obj, policy, **words)
    alone = columns()
    Timeout.objects.all().delete()
    assert dq.schedule_timeouts(model.objects.filter(status="new"), policy, **words) == len(objects)
    assert columns() == alone
    keys_of_rows = set(Timeout.objects.values_list("idempotency_key", flat=True))
    assert (len(keys_of_rows), {len(key) for key in keys_of_rows}) == (len(objects), {32})


def test_rows_written_together_are_as_those_written_alone(now: datetime) -> None:
    values: dict[str, Any] = {
        "queue": "ü\"'\\ {x}", "due_at": now, "run_at": now - timedelta(days=1), "since_at": None, "attempts": 7,
        "payload": {"n": [1, None, "ü\"'\\n", {}]}, "history": [{"what": "x", "at": now.isoformat()}], "reason": "%s",
        "claims": 3, "claimed_until": now, "final_attempt": True, "extensions": 2, "idempotency_key": "f" * 32,
        "state": "cancelled", "cause": "hand", "settled_at": now, "slot_taken": None,
    }  # fmt: skip
    dq.schedule_timeouts([Order.objects.create(status="new") for _ in range(5)], "remind", hours=1)
    *rows, fired = Timeout.objects.order_by("object_id")
    for row in (*rows, fired):
        vars(row).update(values)
    rows[2].payload = rows[0].payload = None
    Timeout.objects.filter(pk=fired.pk).update(state="fired", cause="due", settled_at=now, slot_taken=None)
    for page in (rows[:1], rows[1:2], [*rows[2:], fired]):
        update_each(page, "default")
    same = [{**row, "object_id": "", "slot": ""} for row in columns()]
    assert same[:2] == same[2:4]
    assert all(same[1][name] == value for name, value in values.items() if name not in DIFFERENT)
    fired.refresh_from_db()
    assert (fired.state, fired.attempts) == ("fired", 0), "it was settled meanwhile"


def test_only_what_was_changed_in_one_of_the_rows_is_written() -> None:
    dq.schedule_timeouts([Order.objects.create(status="new") for _ in range(3)], "remind", hours=1)
    rows = list(Timeout.objects.order_by("pk"))
    Timeout.objects.update(reason="by another transaction")
    rows[1].extensions = 2
    sent = sql_of(lambda: update_each(rows, "default"))
    sent += sql_of(lambda: update_each(rows, "default"))  # nothing has changed since
    assert all("reason" not in sql for sql in sent)
    found = Timeout.objects.order_by("pk").values_list("extensions", "reason")
    assert list(found) == [(number, "by another transaction") for number in (0, 2, 0)]
