"""What a process of a race does: one verb at once with others, or any verbs, on one object or on most of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

from django.db import DEFAULT_DB_ALIAS, IntegrityError, connection, transaction
from django.db import Error as DatabaseError
from django.utils import timezone

import django_delayq as dq
from django_delayq import operations
from django_delayq.arming.sync import automatic_policies, sync_policy
from django_delayq.models import Timeout
from tests.testapp.models import Effect, ExpressOrder, Order

USABLE = "the transaction is usable"
Dice = random.Random
Act = Callable[[Sequence[int], Dice], Iterable[str] | None]


def schedule(order: int, mode: Any, minutes: int, inside: bool) -> dict[str, Any]:
    """Schedule `order` in `minutes`. Return the row and its deadline, or the row that was in the way."""
    found = Order.objects.get(pk=order)
    with transaction.atomic() if inside else nullcontext():
        try:
            row = dq.schedule_timeout(found, "remind", minutes=minutes, on_conflict=mode)
            answer = {"row": row.pk, "due_at": row.due_at.isoformat()}
        except dq.TimeoutConflict as conflict:
            answer = {"in_the_way": conflict.timeout.pk}
        Effect.objects.create(what=USABLE, object_id=str(order))
    return answer


def anything(kind: str, orders: Sequence[int], times: int, seed: str) -> tuple[dict[str, int], list[str]]:
    """Perform one of the acts of this kind, in a transaction or without one, `times` times.

    Return how often each verb was performed or refused, and the errors of the database.
    """
    dice, counts, complaints = Dice(seed), Counter[str](), []
    for _ in range(times):
        act = dice.choice(KINDS[kind])
        try:
            with transaction.atomic() if _is_one_transaction(act, dice) else nullcontext():
                counts.update(_try(act, orders, dice))
                Effect.objects.create(what=USABLE, object_id="")
        except DatabaseError as error:
            if _is_our_own(error):
                counts["saved_what_was_deleted"] += 1
            else:
                complaints.append(f"{act.__name__}: {error!r}")
    return dict(counts), complaints


def _is_one_transaction(act: Act, dice: Dice) -> bool:
    """Return whether `act` is one transaction.

    On MySQL and MariaDB not one that saves several, one after the other: it holds gaps between the slots of its first
    ones while it waits for the next object, and the holder of that object may want such a gap. See docs/databases.md.
    """
    if act is save_some and connection.vendor == "mysql":
        return False
    return act is four_of_its_own or dice.random() < 0.6


def _is_our_own(error: DatabaseError) -> bool:
    """Return whether an object was saved that another process has deleted, which inserts it again; of two, one fails.

    With `update_fields` it inserts nothing, and raises.
    """
    if "did not affect any rows" in str(error):
        return True
    return isinstance(error, IntegrityError) and any(table in str(error) for table in ("testapp_", "'PRIMARY'"))


def _try(act: Callable[..., Any], *arguments: Any) -> Iterable[str]:
    try:
        return act(*arguments) or [act.__name__]
    except (dq.DelayqError, Order.DoesNotExist, ValueError) as refusal:  # it fired, is pending, or is deleted
        return [type(refusal).__name__]


# Verbs on one order


def save(order: Order, dice: Dice) -> None:
    """Save it with a deadline some hundred milliseconds ago, now, or far away; or paid for."""
    order.status = dice.choice(["unpaid", "unpaid", "paid"])
    since = timezone.now() - timedelta(minutes=dice.choice([30, 30, 20]))
    order.created_at = dice.choice([order.created_at, since])
    order.save(update_fields=dice.choice([None, ["status", "created_at"]]))


def schedule_one(order: Order, dice: Dice) -> None:
    mode: Any = dice.choice(["replace", "keep", "error"])
    dq.schedule_timeout(order, "remind", seconds=dice.choice([0, 0, 1, 1000]), on_conflict=mode, key=_key(dice))


def cancel(order: Order, dice: Dice) -> None:
    dq.cancel_timeout(order, "remind", key=_key(dice))


def cancel_automatic(order: Order, dice: Dice) -> None:
    dq.cancel_timeout(order, "cancel_unpaid")


def pay(order: Order, dice: Dice) -> None:
    with dq.before_deadline(order, "cancel_unpaid"):
        order.status = "paid"
        order.save()


def reschedule(order: Order, dice: Dice) -> None:
    dq.reschedule_timeout(order, dice.choice(["remind", "cancel_unpaid"]), seconds=dice.choice([0, 100]))


def extend(order: Order, dice: Dice) -> None:
    dq.extend_timeout(order, dice.choice(["remind", "cancel_unpaid"]), seconds=1)


def update_and_sync(order: Order, dice: Dice) -> None:
    with transaction.atomic():
        Order.objects.filter(pk=order.pk).update(status=dice.choice(["unpaid", "paid"]))
        dq.sync_timeouts(order)


def _key(dice: Dice) -> str:
    return dice.choice(["", "second"])


SINGLE = [save, schedule_one, cancel, cancel_automatic, pay, reschedule, extend, update_and_sync]


def one(orders: Sequence[int], dice: Dice) -> list[str]:
    """Perform up to three verbs on one order: a caller that locks several must order them itself."""
    order = Order.objects.get(pk=dice.choice(orders))
    return [name for verb in dice.choices(SINGLE, k=dice.randint(1, 3)) for name in _try(verb, order, dice)]


def four_of_its_own(orders: Sequence[int], dice: Dice) -> list[str]:
    """Perform a verb on each of four orders that no other process uses."""
    some = Order.objects.filter(pk__in=dice.sample(orders, 4)).order_by("?")
    return [name for order in some for name in _try(dice.choice(SINGLE), order, dice)]


# Verbs on many orders


def _most_of(orders: Sequence[int], dice: Dice) -> list[int]:
    """Return a contiguous part, so that two processes often begin at different ends, or a sample; shuffled."""
    if dice.random() < 0.5:
        begin = dice.randrange(len(orders) // 2)
        some = list(orders[begin : len(orders) - dice.randrange(len(orders) // 10)])
    else:
        some = dice.sample(orders, len(orders) * 4 // 5)
    dice.shuffle(some)
    return some


def _objects(orders: Sequence[int], dice: Dice) -> Any:
    """Return most of them as a list in any order, or as a queryset with an order of its own."""
    some = _most_of(orders, dice)
    rows = Order.objects.filter(pk__in=some)
    if dice.random() < 0.5:
        return rows.order_by(dice.choice(["pk", "-pk", "status", "-created_at"]))
    by_key = rows.in_bulk()
    return [by_key[pk] for pk in some if pk in by_key]


def _rows(orders: Sequence[int], dice: Dice) -> Any:
    rows = dq.pending_timeouts(Order.objects.filter(pk__in=_most_of(orders, dice)), "remind")
    if dice.random() < 0.5:
        return rows.order_by(dice.choice(["-run_at", "slot", "-id"]))
    found: list[Timeout] = list(rows)
    dice.shuffle(found)
    return found


def schedule_many(orders: Sequence[int], dice: Dice) -> None:
    mode: Any = dice.choice(["replace", "keep", "error"])
    dq.schedule_timeouts(_objects(orders, dice), "remind", hours=dice.randint(1, 9), on_conflict=mode)


def cancel_many(orders: Sequence[int], dice: Dice) -> None:
    dq.cancel_timeouts(_rows(orders, dice))


def extend_many(orders: Sequence[int], dice: Dice) -> None:
    dq.extend_timeouts(_rows(orders, dice), minutes=5)


def reschedule_many(orders: Sequence[int], dice: Dice) -> None:
    dq.reschedule_timeouts(_rows(orders, dice), hours=dice.randint(1, 9))


def sync_many(orders: Sequence[int], dice: Dice) -> None:
    """Sync another policy, whose rows are between those that the others write."""
    dq.sync_timeouts(_objects(orders, dice))


MANY = [schedule_many, schedule_many, cancel_many, extend_many, reschedule_many, sync_many]


# Besides


def many(orders: Sequence[int], dice: Dice) -> list[str]:
    return list(_try(dice.choice(MANY), orders, dice))


def make_due(orders: Sequence[int], dice: Dice) -> None:
    """Schedule groups and batches for the workers."""
    some = Order.objects.filter(pk__in=dice.sample(list(orders), len(orders) // 3))
    dq.schedule_timeouts(some, dice.choice(["remind", "remind_many", "cancel_unpaid"]), seconds=0, on_conflict="keep")


def save_some(orders: Sequence[int], dice: Dice) -> None:
    """Save as a view does that saves several: in the order of their keys."""
    for order in Order.objects.filter(pk__in=dice.sample(list(orders), 4)).order_by("pk"):
        order.status = dice.choice(["unpaid", "paid"])
        order.created_at = timezone.now() - timedelta(minutes=30)
        order.save()


def delete(orders: Sequence[int], dice: Dice) -> None:
    """Delete an order with its child through the parent model, and create a new one in its place."""
    pk = dice.choice(orders)
    with transaction.atomic():
        Order.objects.filter(pk=pk).delete()
        kind: Any = dice.choice([Order, ExpressOrder])
        if not Order.objects.filter(pk=pk).exists():
            kind.objects.create(pk=pk, status="unpaid", created_at=timezone.now() - timedelta(minutes=29, seconds=59))


def operate(orders: Sequence[int], dice: Dice) -> None:
    """Run an operation on many timeouts, including cancelled and fired ones."""
    rows = Timeout.objects.filter(object_id__in=[str(pk) for pk in dice.sample(list(orders), len(orders) // 2)])
    rows = rows.order_by(dice.choice(["id", "-id", "slot"]))
    if operation := dice.choice([operations.cancel, operations.fire_now, operations.retry, None]):
        operation(rows, by="a race")
    else:
        operations.postpone(rows, by="a race", seconds=1)


def sync(orders: Sequence[int], dice: Dice) -> None:
    """Sync as the worker does: never inside a transaction, because its pages are one each."""
    if not connection.in_atomic_block:
        for policy in automatic_policies(DEFAULT_DB_ALIAS):
            sync_policy(policy, DEFAULT_DB_ALIAS)


KINDS: dict[str, list[Any]] = {
    "single": [one],
    "own": [four_of_its_own],
    "bulk": MANY,
    "any": [one, one, one, many, make_due, save_some, delete, operate, sync],
}
