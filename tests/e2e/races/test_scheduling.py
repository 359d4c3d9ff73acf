"""Several processes schedule, cancel, save and fire the same slots at once: one pending each, and no deadlock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import DEFAULT_DB_ALIAS
from django.utils import timezone

from django_delayq.arming.sync import Synced, sync_policy
from django_delayq.models import Timeout
from tests.e2e.races.actor import Actor, all_answer
from tests.e2e.races.sessions import deadlocks
from tests.e2e.races.verbs import SINGLE, USABLE
from tests.support.waiting import wait_until
from tests.testapp.models import Effect, Order
from tests.testapp.timeouts import cancel_unpaid

pytestmark = [pytest.mark.dialect, pytest.mark.slow, pytest.mark.django_db(transaction=True)]

ACTORS = 4


@pytest.fixture
def four(actors: Callable[[int], list[Actor]]) -> list[Actor]:
    return actors(ACTORS)


def all_schedule(four: list[Actor], mode: str, *, inside: bool) -> tuple[Timeout, list[dict[str, Any]]]:
    """Each of `four` schedules the same new order with another deadline; the row that waits then, and their answers."""
    order = Order.objects.create(status="paid")
    for number, actor in enumerate(four):
        actor.tell("schedule", order=order.pk, mode=mode, minutes=10 + number, inside=inside)
    answers = all_answer(four)
    assert Effect.objects.filter(what=USABLE, object_id=str(order.pk)).count() == len(four)
    return Timeout.objects.get(object_id=str(order.pk)), answers


@pytest.mark.parametrize(("mode", "inside"), [("replace", False), ("keep", True), ("error", False)])
def test_one_slot_scheduled_at_once_by_many_has_one_row_and_each_knows_which(
    four: list[Actor], mode: str, inside: bool
) -> None:
    """With `keep` all get the deadline of the first one; with `error` one schedules, and the others get its row."""
    for _ in range(10):
        row, answers = all_schedule(four, mode, inside=inside)
        won = [answer for answer in answers if "row" in answer]
        assert {answer["row"] for answer in won} == {row.pk}
        assert len(won) == (1 if mode == "error" else ACTORS)
        assert [answer["in_the_way"] for answer in answers if answer not in won] == [row.pk] * (ACTORS - len(won))
        deadlines = {datetime.fromisoformat(answer["due_at"]) for answer in won}
        assert row.due_at in deadlines if mode == "replace" else deadlines == {row.due_at}


def let_act(four: list[Actor], kind: str, orders: list[int], times: int) -> Counter[str]:
    """Let each of the four do any acts of this kind; return how often each verb was performed in all processes.

    Raise AssertionError if the database complained.
    """
    for number, actor in enumerate(four):
        actor.tell("anything", kind=kind, orders=orders, times=times, seed=f"{kind} {number}")
    answers = all_answer(four)
    complaints = [complaint for _, found in answers for complaint in found]
    assert not complaints, f"{len(complaints)} complaints: {complaints[:5]}"
    counts = sum((Counter(counts) for counts, _ in answers), Counter[str]())
    taken = Timeout.objects.pending().values_list("policy", "content_type_id", "object_id", "key")
    assert max(Counter(taken).values(), default=0) <= 1, "no slot is taken twice, by what it is about"
    return counts


def unpaid(count: int) -> list[int]:
    """Create orders that are due to be cancelled."""
    since = timezone.now() - timedelta(minutes=30)
    return [Order.objects.create(created_at=since).pk for _ in range(count)]


def each_that_fired_took_effect_once() -> None:
    due = Timeout.objects.due()
    wait_until(lambda: not due.exists(), "the due timeouts have fired")
    fired = Timeout.objects.filter(state=Timeout.State.FIRED).values_list("pk", flat=True)
    effects = Effect.objects.exclude(what=USABLE).values_list("timeout_id", flat=True)
    assert Counter(effects) == Counter(fired)
    assert fired, "the workers fired meanwhile"


@pytest.mark.usefixtures("two_workers")
def test_any_verbs_over_the_same_orders_leave_one_row_per_slot_and_no_complaint(four: list[Actor]) -> None:
    counts = let_act(four, "single", unpaid(6), times=150)
    assert all(counts[name] for name in SINGLE), counts
    each_that_fired_took_effect_once()
    left = sync_policy(cancel_unpaid, DEFAULT_DB_ALIAS, backfill=True, dry_run=True)
    assert left == Synced(), [vars(row) for row in Timeout.objects.filter(policy=cancel_unpaid.label)]


def test_bulk_verbs_over_the_same_orders_in_different_orders_never_deadlock(four: list[Actor]) -> None:
    # More than one page, and keys whose order as strings differs from that of the numbers.
    Order.objects.bulk_create([Order(pk=pk, created_at=timezone.now()) for pk in range(99_700, 100_400)])
    counts = let_act(four, "bulk", list(Order.objects.values_list("pk", flat=True).order_by("pk")), times=10)
    assert len(counts) > 3, counts


@pytest.mark.usefixtures("two_workers", "counted_deadlocks")
def test_all_verbs_deletes_syncs_and_firings_over_the_same_objects_never_deadlock(four: list[Actor]) -> None:
    before = deadlocks()
    counts = let_act(four, "any", unpaid(30), times=40)
    assert all(counts[name] for name in ("save", "make_due", "save_some", "delete", "operate", "sync")), counts
    each_that_fired_took_effect_once()
    assert deadlocks() == before, "also none that a worker repeated"
