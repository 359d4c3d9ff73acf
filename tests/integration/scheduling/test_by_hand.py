"""Schedule, cancel, reschedule and extend by hand (DESIGN 3.2), in autocommit and in transactions."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import transaction

import django_delayq as dq
from django_delayq import clock
from django_delayq.models import Timeout
from tests.integration.operations.conftest import as_if
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
State = Timeout.State


def test_a_scheduled_timeout_waits_as_a_row_with_its_deadline(order: Order) -> None:
    with clock.set_to(NOON):
        row = dq.schedule_timeout(order, "remind", minutes=30, payload={"a": [1, None]}, reason="on request")
    row.refresh_from_db()
    assert (row.state, row.due_at, row.run_at, row.first_due_at) == ("pending", *[NOON + timedelta(minutes=30)] * 3)
    assert (row.policy, row.payload, row.reason) == ("testapp.order.remind", {"a": [1, None]}, "on request")
    assert row.content_object == order
    assert list(order.timeouts.all()) == [row]


@pytest.mark.parametrize(
    ("delay", "length"),
    [
        ({"weeks": 1, "days": 1}, timedelta(days=8)),
        ({"hours": 0.5, "minutes": 1, "seconds": 2}, timedelta(seconds=1862)),
        ({"after": timedelta(minutes=3)}, timedelta(minutes=3)),
        ({"at": NOON + timedelta(days=2)}, timedelta(days=2)),
        ({"at": NOON - timedelta(days=2)}, timedelta(0)),
        ({"seconds": 0}, timedelta(0)),
    ],
)
def test_the_delay_grammar_names_the_deadline(order: Order, delay: dict[str, Any], length: timedelta) -> None:
    with clock.set_to(NOON):
        assert dq.schedule_timeout(order, "remind", **delay).due_at == NOON + length


def test_scheduling_again_replaces_the_pending_round_but_keeps_its_first_deadline_and_extensions(order: Order) -> None:
    first = dq.schedule_timeout(order, "remind", minutes=1, payload=1, reason="old")
    Timeout.objects.update(attempts=3, extensions=2, history=[{"what": "failed", "at": "2026-01-01T00:00:00Z"}])
    again = dq.schedule_timeout(order, "remind", hours=1, payload=2)
    row = Timeout.objects.get()
    assert row.pk == first.pk == again.pk
    assert (row.payload, row.attempts, row.extensions, row.history, row.reason) == (2, 0, 2, [], "")
    assert row.first_due_at == first.first_due_at
    assert next(iter(dq.explain_timeout(row))).details == {"to": row.due_at}
    assert row.idempotency_key != first.idempotency_key
    assert row.due_at == again.due_at > first.due_at


@pytest.mark.parametrize("in_bulk", [False, True])
def test_replacing_does_not_give_back_extensions_that_are_used_up(
    order: Order, declare: Callable[..., Any], in_bulk: bool
) -> None:
    declare(Order, name="cart", max_extensions=2)
    first = dq.schedule_timeout(order, "cart", minutes=10)
    for _ in range(2):
        dq.extend_timeout(order, "cart", minutes=10)
        if in_bulk:
            dq.schedule_timeouts([order], "cart", minutes=10)
        else:
            dq.schedule_timeout(order, "cart", minutes=10)
    with pytest.raises(dq.ExtensionLimit):
        dq.extend_timeout(order, "cart", minutes=10)
    assert dq.extend_timeouts(dq.pending_timeouts(order), minutes=10) == 0
    assert Timeout.objects.get().first_due_at == first.first_due_at


def test_on_conflict_keeps_or_refuses_what_is_pending_and_schedules_otherwise(order: Order) -> None:
    first = dq.schedule_timeout(order, "remind", minutes=1, payload=1, on_conflict="error")
    kept = dq.schedule_timeout(order, "remind", hours=1, payload=2, on_conflict="keep")
    assert (kept.pk, kept.due_at, kept.payload) == (first.pk, Timeout.objects.get().due_at, 1)
    with pytest.raises(dq.TimeoutConflict) as conflict:
        dq.schedule_timeout(order, "remind", hours=1, on_conflict="error")
    assert conflict.value.timeout == first


def test_keys_are_slots_of_their_own_case_and_all(order: Order) -> None:
    rows = [dq.schedule_timeout(order, "remind", minutes=1, key=key) for key in ("", "a", "A", "ä", "a ")]
    assert len({row.pk for row in rows}) == 5
    assert dq.cancel_timeout(order, "remind", key="A")
    assert set(dq.pending_timeouts(order).values_list("key", flat=True)) == {"", "a", "ä", "a "}


def test_without_a_delay_the_policy_decides(order: Order) -> None:
    Order.objects.filter(pk=order.pk).update(created_at=NOON)
    row = dq.schedule_timeout(order, "cancel_unpaid")
    assert (row.due_at, row.since_at) == (NOON + timedelta(minutes=30), NOON)


def test_cancel_says_true_and_keeps_cause_and_reason(order: Order) -> None:
    dq.schedule_timeout(order, "remind", minutes=1)
    assert dq.cancel_timeout(order, "remind", reason="paid by phone") is True
    row = Timeout.objects.get()
    assert (row.state, row.cause, row.reason) == ("cancelled", "hand", "paid by phone")
    assert row.settled_at is not None
    assert dq.cancel_timeout(order, "remind") is True  # again, and nothing changes
    assert Timeout.objects.get().reason == "paid by phone"
    assert dq.cancel_timeout(order, "remind", key="never armed") is True


@pytest.mark.parametrize("state", [State.FIRED, State.FIRING])
def test_cancel_says_false_when_the_newest_round_has_fired_or_is_firing(order: Order, state: str) -> None:
    row = dq.schedule_timeout(order, "remind", minutes=1)
    as_if(row, state, "due" if state == State.FIRED else "")
    assert dq.cancel_timeout(order, "remind") is False
    row.refresh_from_db()
    assert row.state == state
    assert row.final_attempt is (state == State.FIRING)


def test_cancel_buries_a_dead_one(order: Order) -> None:
    row = dq.schedule_timeout(order, "remind", minutes=1)
    as_if(row, State.DEAD, "retries")
    assert dq.cancel_timeout(order, "remind") is True
    row.refresh_from_db()
    assert (row.state, row.cause) == ("cancelled", "hand")


def test_scheduling_while_one_is_firing_makes_the_next_round(order: Order) -> None:
    row = dq.schedule_timeout(order, "remind", minutes=1)
    as_if(row, State.FIRING)
    following = dq.schedule_timeout(order, "remind", minutes=1)
    assert following.pk != row.pk
    assert dq.cancel_timeout(order, "remind") is True


def test_reschedule_moves_the_pending_one_and_tells_its_history(order: Order) -> None:
    with clock.set_to(NOON):
        first = dq.schedule_timeout(order, "remind", minutes=1)
        moved = dq.reschedule_timeout(order, "remind", hours=2, reason="holiday")
    assert moved is not None
    moved.refresh_from_db()
    assert (moved.pk, moved.due_at, moved.run_at) == (first.pk, NOON + timedelta(hours=2), NOON + timedelta(hours=2))
    assert moved.first_due_at == first.due_at
    assert [(event["what"], event["reason"]) for event in moved.history] == [("rescheduled", "holiday")]
    with pytest.raises(dq.InvalidDelay):
        dq.reschedule_timeout(order, "remind")


def test_moving_what_is_not_pending_gives_none(order: Order) -> None:
    assert dq.reschedule_timeout(order, "remind", minutes=1) is None
    assert dq.extend_timeout(order, "remind", minutes=1) is None


def test_extend_adds_to_the_deadline_up_to_the_limit(order: Order, declare: Any) -> None:
    policy = declare(Order, name="hold", max_extensions=1)
    with clock.set_to(NOON):
        dq.schedule_timeout(order, policy, minutes=10)
        extended = dq.extend_timeout(order, "hold", minutes=5)
        assert extended is not None
        assert (extended.due_at, extended.extensions) == (NOON + timedelta(minutes=15), 1)
        with transaction.atomic(), pytest.raises(dq.ExtensionLimit, match="max_extensions=1 is used up") as limit:
            dq.extend_timeout(order, "hold", minutes=5)
    assert limit.value.timeout.due_at == Timeout.objects.get().due_at == NOON + timedelta(minutes=15)
    with pytest.raises(dq.InvalidDelay):
        dq.extend_timeout(order, "hold", at=NOON)  # type: ignore[call-arg]


@pytest.mark.parametrize("gone", [{"content_type_id": 99_999}, {"object_id": "nonsense"}], ids=["model", "object"])
def test_a_row_whose_policy_is_gone_too_can_still_be_told_and_cancelled(order: Order, gone: dict[str, Any]) -> None:
    row = dq.schedule_timeout(order, "remind", minutes=30)
    Timeout.objects.filter(pk=row.pk).update(policy="testapp.order.gone", **gone)
    row.refresh_from_db()
    assert [event.what for event in dq.explain_timeout(row)] == ["scheduled"]
    assert dq.cancel_timeout(row) is True
    row.refresh_from_db()
    assert row.state == "cancelled"


def test_a_rolled_back_savepoint_takes_only_its_own(order: Order) -> None:
    with transaction.atomic():
        dq.schedule_timeout(order, "remind", minutes=1, key="stays")
        with pytest.raises(RuntimeError), transaction.atomic():
            dq.schedule_timeout(order, "remind", minutes=1, key="goes")
            dq.cancel_timeout(order, "remind", key="stays")
            raise RuntimeError
        dq.schedule_timeout(order, "remind", minutes=1, key="after")
    assert set(dq.pending_timeouts(order).values_list("key", flat=True)) == {"stays", "after"}


def test_the_relation_reads_and_refuses_to_write(order: Order) -> None:
    row = dq.schedule_timeout(order, "remind", minutes=1)
    assert order.timeouts.get() == row
    assert [list(o.timeouts.all()) for o in Order.objects.prefetch_related("timeouts")] == [[row]]
    relation: Any = order.timeouts
    for write in (relation.clear, relation.create, relation.acreate, relation.bulk_create):
        with pytest.raises(TypeError, match="schedule_timeout"):
            write()
    with pytest.raises(TypeError, match="schedule_timeout"):
        order.timeouts = []


def test_deleting_an_object_keeps_its_story_and_cancels(order: Order) -> None:
    dq.schedule_timeout(order, "remind", minutes=1)
    order.delete()
    row = Timeout.objects.get()
    assert (row.state, row.cause) == ("cancelled", "gone")
    assert row.content_object is None


def test_rows_whose_content_type_is_gone_are_still_told_moved_and_cancelled(order: Order) -> None:
    row = dq.schedule_timeout(order, "remind", minutes=5)
    other = dq.schedule_timeout(order, "remind", minutes=5, key="b")
    Timeout.objects.update(content_type_id=10**6, policy="gone.order.policy")
    row.refresh_from_db()
    assert "no longer declared" in str(dq.explain_timeout(row))
    assert dq.extend_timeouts(Timeout.objects.filter(pk=other.pk), minutes=5) == 1
    assert dq.cancel_timeout(row)
    assert dq.cancel_timeouts(Timeout.objects.filter(pk=other.pk)) == 1


def test_rescheduling_does_not_count_as_an_extension(order: Order) -> None:
    dq.schedule_timeout(order, "remind", minutes=5)
    moved = dq.reschedule_timeout(order, "remind", minutes=9)
    extended = dq.extend_timeout(order, "remind", minutes=9)
    assert moved is not None
    assert extended is not None
    assert (moved.extensions, extended.extensions) == (0, 1)
