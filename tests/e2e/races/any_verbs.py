"""What a process of the great mix does: any verb over the same objects, one, some or most of them, in any order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
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
from tests.e2e.races import bulk_verbs, single_verbs
from tests.testapp.models import Effect, ExpressOrder, Order

Operation = Callable[[Sequence[int], random.Random], object]


def anything(orders: Sequence[int], times: int, seed: str) -> tuple[dict[str, int], list[str]]:
    """Perform one operation in each transaction, or without one, `times` times.

    Return how often each was performed, and the errors of the database.
    """
    dice = random.Random(seed)
    counts: Counter[str] = Counter()
    complaints = []
    for _ in range(times):
        operation = dice.choice(OPERATIONS)
        try:
            with transaction.atomic() if dice.random() < 0.6 and _may_be_one(operation) else nullcontext():
                counts[_do(operation, orders, dice)] += 1
                Effect.objects.create(what=single_verbs.USABLE, object_id="")
        except DatabaseError as error:
            if _is_our_own(error):
                counts["saved_what_was_deleted"] += 1
            else:
                complaints.append(f"{operation.__name__}: {error!r}")
    return dict(counts), complaints


def _may_be_one(operation: Operation) -> bool:
    """Whether `operation` may be one transaction.

    On MySQL and MariaDB not one that saves several, one after the other: it holds gaps between the slots of its first
    ones while it waits for the next object, and the holder of that object may want such a gap. See docs/databases.md.
    """
    return connection.vendor != "mysql" or operation is not _save_some


def _is_our_own(error: DatabaseError) -> bool:
    """Save an object that another process may delete, which inserts it again; of two at once, one fails.

    With `update_fields` it inserts nothing, and raises.
    """
    if "did not affect any rows" in str(error):
        return True
    return isinstance(error, IntegrityError) and any(table in str(error) for table in ("testapp_", "'PRIMARY'"))


def _do(operation: Operation, orders: Sequence[int], dice: random.Random) -> str:
    try:
        operation(orders, dice)
    except (dq.DelayqError, Order.DoesNotExist, ValueError) as refusal:  # it fired, is pending, or is deleted
        return type(refusal).__name__
    return operation.__name__


def _one(orders: Sequence[int], dice: random.Random) -> None:
    single_verbs._do(dice.choice(single_verbs.VERBS), Order.objects.get(pk=dice.choice(orders)), dice)


def _many(orders: Sequence[int], dice: random.Random) -> None:
    verb: Any = dice.choice(bulk_verbs.VERBS)
    verb(bulk_verbs._most_of(orders, dice), dice)


def _make_due(orders: Sequence[int], dice: random.Random) -> None:
    """Schedule groups and batches for the workers."""
    some = Order.objects.filter(pk__in=dice.sample(list(orders), len(orders) // 3))
    policy = dice.choice(["remind", "remind_many", "cancel_unpaid"])
    dq.schedule_timeouts(some, policy, seconds=0, on_conflict="keep")


def _save_some(orders: Sequence[int], dice: random.Random) -> None:
    """As a view does that saves several: in the order of their keys, like everybody."""
    for order in Order.objects.filter(pk__in=dice.sample(list(orders), 4)).order_by("pk"):
        order.status = dice.choice(["unpaid", "paid"])
        order.created_at = timezone.now() - timedelta(minutes=30)
        order.save()


def _delete(orders: Sequence[int], dice: random.Random) -> None:
    """Delete an order with its child through the parent model, and create a new one in its place."""
    pk = dice.choice(orders)
    with transaction.atomic():
        Order.objects.filter(pk=pk).delete()
        kind: Any = dice.choice([Order, ExpressOrder])
        if not Order.objects.filter(pk=pk).exists():
            kind.objects.create(pk=pk, status="unpaid", created_at=timezone.now() - timedelta(minutes=29, seconds=59))


def _steer(orders: Sequence[int], dice: random.Random) -> None:
    """Run an operation on many timeouts, including cancelled and fired ones."""
    verb: Any = dice.choice([operations.cancel, operations.fire_now, operations.retry, _postpone])
    rows = Timeout.objects.filter(object_id__in=[str(pk) for pk in dice.sample(list(orders), len(orders) // 2)])
    verb(rows.order_by(dice.choice(["id", "-id", "slot"])), by="a race")


def _postpone(rows: Any, by: str) -> None:
    operations.postpone(rows, by=by, seconds=1)


def _sync(orders: Sequence[int], dice: random.Random) -> None:
    """As the worker does it: never inside a transaction, as its pages are one each."""
    if not connection.in_atomic_block:
        for policy in automatic_policies(DEFAULT_DB_ALIAS):
            sync_policy(policy, DEFAULT_DB_ALIAS)


OPERATIONS: list[Operation] = [_one, _one, _one, _many, _make_due, _save_some, _delete, _steer, _sync]
