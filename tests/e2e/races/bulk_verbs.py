"""What a scheduling process does with many orders at a time: bulk verbs over the same objects in different orders."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from django.db import Error as DatabaseError
from django.db import transaction

import django_delayq as dq
from django_delayq.models import Timeout
from tests.testapp.models import Effect, Order


def anything(orders: Sequence[int], times: int, seed: str) -> tuple[dict[str, int], list[str]]:
    """Call a bulk function with most of `orders`, in any order, in a transaction or not, `times` times.

    Return how often each was called, and the errors of the database.
    """
    dice = random.Random(seed)
    counts: Counter[str] = Counter()
    complaints = []
    for _ in range(times):
        verb = dice.choice(VERBS)
        some = _most_of(orders, dice)
        try:
            # One call in each transaction, because a caller must order several calls itself.
            with transaction.atomic() if dice.random() < 0.6 else nullcontext():
                counts[_do(verb, some, dice)] += 1
                Effect.objects.create(what="usable", object_id="")
        except DatabaseError as error:
            complaints.append(f"{verb.__name__}: {error!r}")
    return dict(counts), complaints


def _do(verb: Any, some: list[int], dice: random.Random) -> str:
    try:
        verb(some, dice)
    except dq.TimeoutConflict:
        return "TimeoutConflict"
    name: str = verb.__name__
    return name


def _most_of(orders: Sequence[int], dice: random.Random) -> list[int]:
    """Return a contiguous part, so that two processes often begin at different ends, or a sample; shuffled."""
    if dice.random() < 0.5:
        begin = dice.randrange(len(orders) // 2)
        some = list(orders[begin : len(orders) - dice.randrange(len(orders) // 10)])
    else:
        some = dice.sample(orders, len(orders) * 4 // 5)
    dice.shuffle(some)
    return some


def _objects(some: list[int], dice: random.Random) -> Any:
    """As a list in the order of `some`, or as a queryset with an order of its own."""
    rows = Order.objects.filter(pk__in=some)
    if dice.random() < 0.5:
        return rows.order_by(dice.choice(["pk", "-pk", "status", "-created_at"]))
    by_key = rows.in_bulk()
    return [by_key[pk] for pk in some]


def _rows(some: list[int], dice: random.Random) -> Any:
    rows = dq.pending_timeouts(Order.objects.filter(pk__in=some), "remind")
    if dice.random() < 0.5:
        return rows.order_by(dice.choice(["-run_at", "slot", "-id"]))
    found: list[Timeout] = list(rows)
    dice.shuffle(found)
    return found


def _schedule(some: list[int], dice: random.Random) -> None:
    mode: Any = dice.choice(["replace", "keep", "error"])
    dq.schedule_timeouts(_objects(some, dice), "remind", hours=dice.randint(1, 9), on_conflict=mode)


def _cancel(some: list[int], dice: random.Random) -> None:
    dq.cancel_timeouts(_rows(some, dice))


def _extend(some: list[int], dice: random.Random) -> None:
    dq.extend_timeouts(_rows(some, dice), minutes=5)


def _reschedule(some: list[int], dice: random.Random) -> None:
    dq.reschedule_timeouts(_rows(some, dice), hours=dice.randint(1, 9))


def _sync(some: list[int], dice: random.Random) -> None:
    """Of another policy, whose rows lie between those that the others write."""
    dq.sync_timeouts(_objects(some, dice))


VERBS = [_schedule, _schedule, _cancel, _extend, _reschedule, _sync]
