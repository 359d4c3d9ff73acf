"""Repeat a settled round as a new one, which arming leaves alone, and which a worker fires if `when` holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.utils import timezone

from django_delayq import InvalidDelay, explain_timeout, schedule_timeout, sync_timeouts
from django_delayq.arming.sync import sync_policy
from django_delayq.models import Timeout
from django_delayq.operations import Refusal, Result, refire, retry
from django_delayq.policy.policies import get_policy
from django_delayq.testing import fire_due
from tests.integration.operations.conftest import BY, as_if, dead, pending, refused, said
from tests.integration.operations.names import DAY, HOUR, Declare, PagesOf
from tests.testapp.models import Effect, Order, OrderProxy

pytestmark = pytest.mark.django_db(transaction=True)


def fired(order: Order | None = None, policy: Any = "remind", **delay: Any) -> Timeout:
    return as_if(pending(order or Order.objects.create(), policy, **delay), "fired", "due")


def newest() -> Timeout:
    found: Timeout = Timeout.objects.order_by("-pk")[0]
    return found


@pytest.mark.parametrize(
    ("state", "cause"), [("fired", "due"), ("skipped", "condition"), ("cancelled", "hand"), ("dead", "retries")]
)
def test_every_settled_row_is_repeated_by_a_new_one_and_stays(order: Order, state: str, cause: str) -> None:
    row = schedule_timeout(order, "remind", hours=1, key="second", payload={"to": "anna"})
    Timeout.objects.filter(pk=row.pk).update(queue="mail")
    row = as_if(row, state, cause, attempts=3, reason="as it was")
    result = refire(row, by=BY, reason="the provider lost it")
    assert (result.verb, result.changed, result.ids, result.unchanged) == ("refire", 1, (row.pk,), 0)
    new, events = newest(), said(row)
    assert (row.state, row.cause, row.attempts, row.reason) == (state, cause, 3, "as it was")
    assert (new.state, new.attempts, new.extensions, new.reason) == ("pending", 0, 0, "the provider lost it")
    same = ("policy", "content_type_id", "object_id", "key", "queue", "payload", "slot")
    assert all(getattr(new, name) == getattr(row, name) for name in same)
    assert new.due_at == new.run_at == new.first_due_at <= timezone.now()
    assert new.idempotency_key != row.idempotency_key
    assert (events[-1], said(new)) == (("refired", BY, "the provider lost it"), [("refires", *events[-1][1:])])
    assert (row.history[-1]["timeout"], new.history[-1]["timeout"]) == (new.pk, row.pk)
    story = str(explain_timeout(order, "remind", key="second"))
    assert f"fired again by the new round {new.pk}" in story and f"repeats the round {row.pk}" in story
    assert refused(refire(row, by=BY)) == {row.pk: "slot_taken"}, "while the first is pending"
    assert fire_due() == 1
    assert Effect.objects.get().timeout_id == new.pk


def test_each_policy_of_a_table_gets_objects_of_its_own_model(order: Order, declare: Declare) -> None:
    asked: list[type[Order]] = []

    def since(obj: Order) -> Any:
        asked.append(type(obj))
        return timezone.now()

    for number, model in enumerate((Order, OrderProxy, Order)):
        policy = declare(model, name=f"of_{number}", since=since, after=HOUR)
        as_if(schedule_timeout(model.objects.get(pk=order.pk), policy), "fired", "due")
    asked.clear()
    assert refire(Timeout.objects.all(), by=BY).changed == 3
    assert sorted(asked, key=str) == [Order, Order, OrderProxy]


@pytest.mark.parametrize(("verb", "make"), [(refire, fired), (retry, dead)], ids=["refire", "retry"])
def test_of_rounds_on_several_pages_only_the_newest_is_repeated(
    order: Order, pages_of: PagesOf, verb: Any, make: Callable[[Order], Timeout]
) -> None:
    """A worker fires what a page has begun before the next page is read."""
    pages_of(2)
    older, *_, newer = (make(each) for each in (order, Order.objects.create(), Order.objects.create(), order))
    rows = Timeout.objects.filter(state=older.state)
    dry = verb(rows, by=BY, dry_run=True)
    result = verb(rows, by=BY, progress=lambda page: fire_due())
    assert newer.pk in result.ids and dry.changed == result.changed == 3 == Effect.objects.count()
    assert dry.refusals == result.refusals == ((older.pk, Refusal.SLOT_TAKEN),)


def test_a_round_is_not_repeated_after_one_that_was_fired_meanwhile(order: Order, pages_of: PagesOf) -> None:
    pages_of(1)
    row, other = fired(order), fired()

    def schedule_and_fire(page: Result) -> None:
        if page.ids == (other.pk,):
            pending(order, seconds=0)
            fire_due(obj=order)

    result = refire(Timeout.objects.filter(state="fired"), by=BY, progress=schedule_and_fire)
    assert (result.ids, result.refusals) == ((other.pk,), ((row.pk, Refusal.SLOT_TAKEN),))


def test_a_closed_round_of_an_automatic_policy_is_repeated_and_neither_save_nor_sync_cancels_it() -> None:
    """The handler has run, but its effect was lost: the order is unpaid again, and its round stays closed."""
    order = Order.objects.create(created_at=timezone.now() - HOUR)
    Timeout.objects.update(run_at=timezone.now())
    assert fire_due() == 1
    Order.objects.filter(pk=order.pk).update(status="unpaid")
    sync_timeouts(order)
    assert not Timeout.objects.filter(state="pending").exists()
    (row,) = Timeout.objects.all()
    assert refire(row, by=BY).changed == 1
    order.refresh_from_db()
    order.save()
    sync_policy(get_policy((Order, "cancel_unpaid")), "default", backfill=True)
    sync_timeouts(order)
    assert newest().state == "pending" and newest().since_at == order.created_at
    assert fire_due() == 1
    order.refresh_from_db()
    assert order.status == "cancelled"
    assert [row.state for row in Timeout.objects.all()] == ["fired", "fired"]
    sync_timeouts(order)
    assert not Timeout.objects.filter(state="pending").exists()


def test_a_repetition_counts_from_the_present_value_of_since_not_from_the_former_one(declare: Declare) -> None:
    order = Order.objects.create(created_at=timezone.now() - 30 * DAY)
    row = fired(order, "cancel_unpaid", seconds=0)
    moved = timezone.now() - 20 * DAY
    Order.objects.filter(pk=order.pk).update(created_at=moved)
    refire(row, by=BY, at=timezone.now() + HOUR)
    order.refresh_from_db()
    order.save()
    assert (newest().state, newest().since_at) == ("pending", moved)

    def since(order: Order) -> Any:
        if order.note == "broken":
            raise KeyError("no")
        return moved

    declare(Order, name="called", since=since, after=9 * DAY)
    row = fired(policy="called")
    refire(row, by=BY)
    assert newest().since_at == moved, "a callable is asked again"
    Timeout.objects.filter(pk=newest().pk).delete()
    Order.objects.update(note="broken")
    with pytest.raises(InvalidDelay, match=rf"object {row.object_id}: KeyError"):
        refire(row, by=BY)


@pytest.mark.parametrize("state", ["fired", "cancelled", "skipped"])
def test_a_dead_round_stays_dead_after_a_newer_one_of_its_object(order: Order, state: str) -> None:
    """To retry all that are dead must not send what the newer one has sent, or what a customer has cancelled."""
    older = dead(order)
    as_if(pending(order), state, "due" if state == "fired" else "hand")
    assert refused(retry(Timeout.objects.all(), by=BY)) == {older.pk: "superseded", older.pk + 1: "not_dead"}
    older.refresh_from_db()
    assert older.state == "dead"
