"""What a process of a race does: one verb at once with others, or any verbs, on one object or on most of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
Verbs = Mapping[str, Callable[[Any, Dice], object]]


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
        name = dice.choice([*KINDS[kind]])
        # On MySQL and MariaDB, a transaction that saves several, one after the other, holds gaps between the slots of
        # its first ones while it waits for the next object, whose holder may want such a gap. See docs/databases.md.
        is_one = dice.random() < 0.6 and not (name == "save_some" and connection.vendor == "mysql")
        try:
            with transaction.atomic() if is_one else nullcontext():
                counts.update(_try(KINDS[kind], name, orders, dice))
                Effect.objects.create(what=USABLE, object_id="")
        except DatabaseError as error:
            if _is_our_own(error):
                counts["saved_what_was_deleted"] += 1
            else:
                complaints.append(f"{name}: {error!r}")
    return dict(counts), complaints


def _is_our_own(error: DatabaseError) -> bool:
    """Return whether an object was saved that another process has deleted, which inserts it again; of two, one fails.

    With `update_fields` it inserts nothing, and raises.
    """
    if "did not affect any rows" in str(error):
        return True
    return isinstance(error, IntegrityError) and any(table in str(error) for table in ("testapp_", "'PRIMARY'"))


def _try(verbs: Verbs, name: str, target: Any, dice: Dice) -> list[str]:
    """Perform a verb; return its name, those of the verbs that it has performed, or that of its refusal."""
    try:
        done = verbs[name](target, dice)
    except (dq.DelayqError, Order.DoesNotExist, ValueError) as refusal:  # it fired, is pending, or is deleted
        return [type(refusal).__name__]
    return done if isinstance(done, list) else [name]


# Verbs on one order


def _save(order: Order, dice: Dice) -> None:
    """Save it with a deadline some hundred milliseconds ago, now, or far away; or paid for."""
    order.status = dice.choice(["unpaid", "unpaid", "paid"])
    since = timezone.now() - timedelta(minutes=dice.choice([30, 30, 20]))
    order.created_at = dice.choice([order.created_at, since])
    order.save(update_fields=dice.choice([None, ["status", "created_at"]]))


def _schedule_one(order: Order, dice: Dice) -> None:
    mode: Any = dice.choice(["replace", "keep", "error"])
    dq.schedule_timeout(order, "remind", seconds=dice.choice([0, 0, 1, 1000]), on_conflict=mode, key=_key(dice))


def _pay(order: Order, dice: Dice) -> None:
    with dq.before_deadline(order, "cancel_unpaid"):
        order.status = "paid"
        order.save()


def _update_and_sync(order: Order, dice: Dice) -> None:
    with transaction.atomic():
        Order.objects.filter(pk=order.pk).update(status=dice.choice(["unpaid", "paid"]))
        dq.sync_timeouts(order)


def _key(dice: Dice) -> str:
    return dice.choice(["", "second"])


def _policy(dice: Dice) -> str:
    return dice.choice(["remind", "cancel_unpaid"])


SINGLE: Verbs = {
    "save": _save,
    "schedule": _schedule_one,
    "cancel": lambda order, dice: dq.cancel_timeout(order, "remind", key=_key(dice)),
    "cancel_automatic": lambda order, dice: dq.cancel_timeout(order, "cancel_unpaid"),
    "pay": _pay,
    "reschedule": lambda order, dice: dq.reschedule_timeout(order, _policy(dice), seconds=dice.choice([0, 100])),
    "extend": lambda order, dice: dq.extend_timeout(order, _policy(dice), seconds=1),
    "update_and_sync": _update_and_sync,
}


def _one(orders: Sequence[int], dice: Dice) -> list[str]:
    """Perform up to three verbs on one order: a caller that locks several must order them itself."""
    order = Order.objects.get(pk=dice.choice(orders))
    names = dice.choices([*SINGLE], k=dice.randint(1, 3))
    return [done for name in names for done in _try(SINGLE, name, order, dice)]


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


def _schedule_many(orders: Sequence[int], dice: Dice) -> None:
    mode: Any = dice.choice(["replace", "keep", "error"])
    dq.schedule_timeouts(_objects(orders, dice), "remind", hours=dice.randint(1, 9), on_conflict=mode)


MANY: Verbs = {
    "schedule_many": _schedule_many,
    "cancel_many": lambda orders, dice: dq.cancel_timeouts(_rows(orders, dice)),
    "extend_many": lambda orders, dice: dq.extend_timeouts(_rows(orders, dice), minutes=5),
    "reschedule_many": lambda orders, dice: dq.reschedule_timeouts(_rows(orders, dice), hours=dice.randint(1, 9)),
    # of another policy, whose rows are between those that the others write
    "sync_many": lambda orders, dice: dq.sync_timeouts(_objects(orders, dice)),
}

# Besides


def _make_due(orders: Sequence[int], dice: Dice) -> None:
    """Schedule groups and batches for the workers."""
    some = Order.objects.filter(pk__in=dice.sample(list(orders), len(orders) // 3))
    dq.schedule_timeouts(some, dice.choice(["remind", "remind_many", "cancel_unpaid"]), seconds=0, on_conflict="keep")


def _save_some(orders: Sequence[int], dice: Dice) -> None:
    """Save as a view does that saves several: in the order of their keys."""
    for order in Order.objects.filter(pk__in=dice.sample(list(orders), 4)).order_by("pk"):
        order.status = dice.choice(["unpaid", "paid"])
        order.created_at = timezone.now() - timedelta(minutes=30)
        order.save()


def _delete(orders: Sequence[int], dice: Dice) -> None:
    """Delete an order with its child through the parent model, and create a new one in its place."""
    pk = dice.choice(orders)
    with transaction.atomic():
        Order.objects.filter(pk=pk).delete()
        kind: Any = dice.choice([Order, ExpressOrder])
        if not Order.objects.filter(pk=pk).exists():
            kind.objects.create(pk=pk, status="unpaid", created_at=timezone.now() - timedelta(minutes=29, seconds=59))


def _operate(orders: Sequence[int], dice: Dice) -> None:
    """Run an operation on many timeouts, including cancelled and fired ones."""
    rows = Timeout.objects.filter(object_id__in=[str(pk) for pk in dice.sample(list(orders), len(orders) // 2)])
    rows = rows.order_by(dice.choice(["id", "-id", "slot"]))
    if operation := dice.choice([operations.cancel, operations.fire_now, operations.retry, None]):
        operation(rows, by="a race")
    else:
        operations.postpone(rows, by="a race", seconds=1)


def _sync(orders: Sequence[int], dice: Dice) -> None:
    """Sync as the worker does: never inside a transaction, because its pages are one each."""
    if not connection.in_atomic_block:
        for policy in automatic_policies(DEFAULT_DB_ALIAS):
            sync_policy(policy, DEFAULT_DB_ALIAS)


ANY: Verbs = {
    "one": _one,
    "another": _one,
    "many": lambda orders, dice: _try(MANY, dice.choice([*MANY]), orders, dice),
    "make_due": _make_due,
    "save_some": _save_some,
    "delete": _delete,
    "operate": _operate,
    "sync": _sync,
}
KINDS: Mapping[str, Verbs] = {"single": {"one": _one}, "bulk": MANY, "any": ANY}
