"""What a scheduling process does with one order at a time: one verb at once with others, or any verbs in any order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

from django.db import Error as DatabaseError
from django.db import transaction
from django.utils import timezone

import django_delayq as dq
from tests.testapp.models import Effect, Order

USABLE = "the transaction is usable"


def schedule(order: int, mode: Any, minutes: int, inside: bool) -> dict[str, Any]:
    """Schedules `order` in `minutes`. Returns the row and its deadline, or the row that was in the way."""
    found = Order.objects.get(pk=order)
    with transaction.atomic() if inside else nullcontext():
        try:
            row = dq.schedule_timeout(found, "remind", minutes=minutes, on_conflict=mode)
            answer = {"row": row.pk, "due_at": row.due_at.isoformat()}
        except dq.TimeoutConflict as conflict:
            answer = {"in_the_way": conflict.timeout.pk}
        Effect.objects.create(what=USABLE, object_id=str(order))
    return answer


def anything(orders: Sequence[int], times: int, seed: str) -> tuple[dict[str, int], list[str]]:
    """Up to three verbs on a random one of `orders`, in a transaction or not, `times` times.

    Returns how often each came up, and what the database complained of.
    """
    dice = random.Random(seed)
    counts: Counter[str] = Counter()
    complaints = []
    for _ in range(times):
        try:
            # One order in each transaction, because a caller that locks several must order them itself.
            order = Order.objects.get(pk=dice.choice(orders))
            with transaction.atomic() if dice.random() < 0.5 else nullcontext():
                for verb in dice.choices(VERBS, k=dice.randint(1, 3)):
                    counts[_do(verb, order, dice)] += 1
                Effect.objects.create(what=USABLE, object_id=str(order.pk))
        except DatabaseError as error:
            complaints.append(repr(error))
    return dict(counts), complaints


def one_after_the_other(orders: Sequence[int], times: int, seed: str) -> tuple[dict[str, int], list[str]]:
    """Verbs on several of `orders`, which no other process uses, in one transaction, `times` times; as `anything`."""
    dice = random.Random(seed)
    counts: Counter[str] = Counter()
    complaints = []
    for _ in range(times):
        try:
            with transaction.atomic():
                for order in Order.objects.filter(pk__in=dice.sample(orders, 4)).order_by("?"):
                    counts[_do(dice.choice(VERBS), order, dice)] += 1
        except DatabaseError as error:
            complaints.append(repr(error))
    return dict(counts), complaints


def _do(verb: Callable[[Order, random.Random], object], order: Order, dice: random.Random) -> str:
    try:
        verb(order, dice)
    except dq.DelayqError as refusal:
        return type(refusal).__name__
    return verb.__name__


def _save(order: Order, dice: random.Random) -> None:
    """Armed by saving, with a deadline some hundred milliseconds ago, now, or far away; or paid for."""
    order.status = dice.choice(["unpaid", "unpaid", "paid"])
    since = timezone.now() - timedelta(minutes=dice.choice([30, 30, 20]))
    order.created_at = dice.choice([order.created_at, since])
    order.save(update_fields=dice.choice([None, ["status", "created_at"]]))


def _schedule(order: Order, dice: random.Random) -> None:
    mode: Any = dice.choice(["replace", "keep", "error"])
    dq.schedule_timeout(order, "remind", seconds=dice.choice([0, 0, 1, 1000]), on_conflict=mode, key=_key(dice))


def _cancel(order: Order, dice: random.Random) -> None:
    dq.cancel_timeout(order, "remind", key=_key(dice))


def _cancel_automatic(order: Order, dice: random.Random) -> None:
    dq.cancel_timeout(order, "cancel_unpaid")


def _pay(order: Order, dice: random.Random) -> None:
    with dq.before_deadline(order, "cancel_unpaid"):
        order.status = "paid"
        order.save()


def _reschedule(order: Order, dice: random.Random) -> None:
    dq.reschedule_timeout(order, dice.choice(["remind", "cancel_unpaid"]), seconds=dice.choice([0, 100]))


def _extend(order: Order, dice: random.Random) -> None:
    dq.extend_timeout(order, dice.choice(["remind", "cancel_unpaid"]), seconds=1)


def _update_and_sync(order: Order, dice: random.Random) -> None:
    with transaction.atomic():
        Order.objects.filter(pk=order.pk).update(status=dice.choice(["unpaid", "paid"]))
        dq.sync_timeouts(order)


def _key(dice: random.Random) -> str:
    return dice.choice(["", "second"])


VERBS = [_save, _schedule, _cancel, _cancel_automatic, _pay, _reschedule, _extend, _update_and_sync]
