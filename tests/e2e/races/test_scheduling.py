"""Several processes schedule, cancel, save and fire the same slots at once: one pending each, and no deadlock."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import DEFAULT_DB_ALIAS
from django.utils import timezone

from django_delayq.arming.sync import Synced, sync_policy
from django_delayq.models import Timeout
from tests.e2e.races.sessions import deadlocks
from tests.e2e.races.single_verbs import USABLE
from tests.e2e.races.stage import Actor, all_answer
from tests.support.waiting import wait_until
from tests.testapp.models import Effect, Order
from tests.testapp.timeouts import cancel_unpaid

pytestmark = [pytest.mark.dialect, pytest.mark.slow, pytest.mark.django_db(transaction=True)]
logger = logging.getLogger(__name__)

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


def deadlines(answers: Collection[dict[str, Any]]) -> list[datetime]:
    return [datetime.fromisoformat(answer["due_at"]) for answer in answers]


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in_a_transaction"])
def test_one_slot_scheduled_at_once_by_many_has_one_row(four: list[Actor], inside: bool) -> None:
    for _ in range(20):
        row, answers = all_schedule(four, "replace", inside=inside)
        assert {answer["row"] for answer in answers} == {row.pk}
        assert row.due_at in deadlines(answers)


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in_a_transaction"])
def test_of_many_who_keep_what_is_there_all_get_the_first_ones_deadline(four: list[Actor], inside: bool) -> None:
    for _ in range(20):
        row, answers = all_schedule(four, "keep", inside=inside)
        assert {answer["row"] for answer in answers} == {row.pk}
        assert set(deadlines(answers)) == {row.due_at}


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in_a_transaction"])
def test_of_many_who_refuse_a_conflict_exactly_one_schedules(four: list[Actor], inside: bool) -> None:
    for _ in range(20):
        row, answers = all_schedule(four, "error", inside=inside)
        won = [answer for answer in answers if "row" in answer]
        assert [answer["row"] for answer in won] == [row.pk]
        assert deadlines(won) == [row.due_at]
        assert [answer["in_the_way"] for answer in answers if answer not in won] == [row.pk] * (ACTORS - 1)


@pytest.mark.usefixtures("two_workers")
def test_any_verbs_over_the_same_orders_leave_one_row_per_slot_and_no_complaint(four: list[Actor]) -> None:
    since = timezone.now() - timedelta(minutes=30)
    orders = [Order.objects.create(created_at=since).pk for _ in range(6)]
    for number, actor in enumerate(four):
        actor.tell("single", orders=orders, times=150, seed=f"single {number}")
    counts = told(all_answer(four))
    assert all(counts[verb] for verb in ("_save", "_schedule", "_cancel", "_pay", "_extend", "_reschedule")), counts
    due = Timeout.objects.due()
    wait_until(lambda: not due.exists(), "the due timeouts have fired")
    assert no_slot_is_taken_twice()
    left = sync_policy(cancel_unpaid, DEFAULT_DB_ALIAS, backfill=True, dry_run=True)
    assert left == Synced(), [vars(row) for row in Timeout.objects.filter(policy=cancel_unpaid.label)]
    fired = Timeout.objects.filter(state=Timeout.State.FIRED).values_list("pk", flat=True)
    effects = Effect.objects.exclude(what=USABLE).values_list("timeout_id", flat=True)
    assert Counter(effects) == Counter(fired), "each that fired took effect once"
    assert fired, "the workers fired meanwhile"


@pytest.mark.usefixtures("two_workers")
def test_transactions_over_different_orders_never_deadlock(four: list[Actor]) -> None:
    since = timezone.now() - timedelta(minutes=30)
    orders = [Order.objects.create(created_at=since).pk for _ in range(40)]
    for number, actor in enumerate(four):
        actor.tell("own", orders=orders[number::ACTORS], times=80, seed=f"own {number}")
    counts = told(all_answer(four))
    assert counts["_schedule"], counts
    assert no_slot_is_taken_twice()


def test_bulk_verbs_over_the_same_orders_in_different_orders_never_deadlock(four: list[Actor]) -> None:
    # More than one page, and keys whose order as strings differs from that of the numbers.
    Order.objects.bulk_create([Order(pk=pk, created_at=timezone.now()) for pk in range(99_700, 100_400)])
    orders = list(Order.objects.values_list("pk", flat=True).order_by("pk"))
    for number, actor in enumerate(four):
        actor.tell("bulk", orders=orders, times=10, seed=f"bulk {number}")
    counts = told(all_answer(four))
    assert len(counts) > 3, counts
    assert no_slot_is_taken_twice()


@pytest.mark.usefixtures("two_workers", "counted_deadlocks")
def test_all_verbs_deletes_syncs_and_firings_over_the_same_objects_never_deadlock(four: list[Actor]) -> None:
    since = timezone.now() - timedelta(minutes=30)
    orders = [Order.objects.create(created_at=since).pk for _ in range(30)]
    before = deadlocks()
    for number, actor in enumerate(four):
        actor.tell("any", orders=orders, times=40, seed=f"any {number}")
    counts = told(all_answer(four))
    assert all(counts[name] for name in ("_one", "_many", "_make_due", "_save_some", "_delete", "_steer", "_sync")), (
        counts
    )
    due = Timeout.objects.due()
    wait_until(lambda: not due.exists(), "the due timeouts have fired")
    assert deadlocks() == before, "also none that a worker repeated"
    assert no_slot_is_taken_twice()
    fired = Timeout.objects.filter(state=Timeout.State.FIRED).values_list("pk", flat=True)
    effects = Effect.objects.exclude(what=USABLE).values_list("timeout_id", flat=True)
    assert Counter(effects) == Counter(fired), "each that fired took effect once"
    assert fired, "the workers fired meanwhile"


def told(answers: list[tuple[dict[str, int], list[str]]]) -> Counter[str]:
    """How often each verb came up in all processes, none of which heard a complaint from the database."""
    complaints = [complaint for _, theirs in answers for complaint in theirs]
    assert not complaints, f"{len(complaints)} complaints: {complaints[:5]}"
    counts = sum((Counter(counts) for counts, _ in answers), Counter[str]())
    logger.info("%s", dict(counts))
    return counts


def no_slot_is_taken_twice() -> bool:
    """By what a slot is about, not by the column that the constraint is on."""
    waiting = Timeout.objects.pending().values_list("policy", "content_type_id", "object_id", "key")
    return max(Counter(waiting).values(), default=0) <= 1
