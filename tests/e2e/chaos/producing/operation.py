"""One operation of a producer; its journal and a marker in the database show whether it committed."""

from __future__ import annotations

import random
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.db import OperationalError, connection, transaction
from django.utils import timezone

from tests.e2e.chaos.audit import AUTOMATIC_SECONDS
from tests.e2e.chaos.journal import Journal
from tests.testapp.models import Order

Perform = Callable[["Operation"], None]
MOST_OWN = 300
SHARED = 40


class Undo(Exception):
    """The producer changes its mind, and its transaction is rolled back."""


@dataclass
class Hands:
    """Who acts: its luck, its name and the orders that it has placed."""

    name: str
    random: random.Random
    journal: Journal
    own: deque[int] = field(default_factory=lambda: deque(maxlen=MOST_OWN))

    def an_order(self) -> Order:
        """Return an order of this producer, or sometimes a recent one of any producer, to cause conflicts."""
        if self.own and self.random.random() < 0.7:
            return Order.objects.get(pk=self.random.choice(self.own))
        latest = Order.objects.exclude(note__startswith="out-").order_by("-pk").values_list("pk", flat=True)
        keys = list(latest[:SHARED])
        if not keys:
            raise Undo
        return Order.objects.get(pk=self.random.choice(keys))

    def seconds(self) -> float:
        """How long until a deadline."""
        luck = self.random.random()
        if luck < 0.1:
            return 0.0
        return self.random.uniform(0.2, 3.0) if luck < 0.75 else self.random.uniform(3.0, 8.0)


@dataclass
class Operation:
    """One operation in progress."""

    hands: Hands
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    orders: list[int] = field(default_factory=list)
    """The orders that it places."""

    @property
    def random(self) -> random.Random:
        return self.hands.random

    def note(self, *claims: dict[str, Any]) -> None:
        """In the transaction, when all is done: its number, and the journal's line before COMMIT."""
        if not connection.in_atomic_block:
            raise RuntimeError("an operation is noted in its transaction")
        check_savepoint()
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO chaos_operation (id) VALUES (%s)", [self.id])
        self.hands.journal.write(self.id, "commit", claims=claims)


def claim(verb: str, order: int, policy: str, key: str = "", **what: Any) -> dict[str, Any]:
    """Return the declared effects of an operation, with datetimes as strings."""
    texts = {name: value.isoformat() if isinstance(value, datetime) else value for name, value in what.items()}
    return {"verb": verb, "order": order, "policy": policy, "key": key, **texts}


def in_(seconds: float) -> datetime:
    return timezone.now() + timedelta(seconds=seconds)


def counted_from(due_at: datetime) -> datetime:
    """Return the `created_at` with which the automatic timeout of an order is due at this time."""
    return due_at - timedelta(seconds=AUTOMATIC_SECONDS)


def locked(order: Order) -> Order:
    """Lock and return the row. If the order no longer exists, abort the operation."""
    found = Order.objects.select_for_update().filter(pk=order.pk).first()
    if found is None:
        raise Undo
    return found


def check_savepoint() -> None:
    """Raise OperationalError if the connection was lost while a savepoint was rolled back.

    Django shows this error to no caller, and raises one of its own at the next statement.
    """
    if connection.needs_rollback:
        raise OperationalError("The connection was lost while a savepoint was rolled back.")


def atomically(perform: Perform) -> Perform:
    """Perform the operation in its own transaction."""

    def run(operation: Operation) -> None:
        with transaction.atomic():
            perform(operation)

    run.__name__ = getattr(perform, "__name__", "operation")
    return run
