"""One operation of a producer; its journal and a marker in the database show whether it committed."""

from __future__ import annotations

import random
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.db import OperationalError, connection, transaction
from django.utils import timezone

from tests.e2e.chaos.journal import Journal
from tests.testapp.models import Order

Perform = Callable[["Operation"], None]
REPERTOIRE: dict[Perform, float] = {}
"""All operations with their weights."""
MOST_OWN = 300
SHARED = 40
FICKLE = 0.05


class Undo(Exception):
    """The producer changes its mind, and its transaction is rolled back."""


@dataclass
class Hands:
    """Who acts: its luck, its name and the orders that it has placed."""

    name: str
    random: random.Random
    journal: Journal
    own: deque[int] = field(default_factory=lambda: deque(maxlen=MOST_OWN))


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
        """In the transaction, when all is done: its number, and the journal's line before COMMIT; or Undo."""
        check_savepoint()
        if self.random.random() < FICKLE:
            raise Undo
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO chaos_operation (id) VALUES (%s)", [self.id])
        self.hands.journal.write(self.id, "commit", claims=claims)

    def an_order(self) -> Order:
        """Return an order of this producer, or sometimes a recent one of any producer, to cause conflicts."""
        keys = list(self.hands.own)
        if not keys or self.random.random() >= 0.7:
            latest = Order.objects.exclude(note__startswith="out-").order_by("-pk").values_list("pk", flat=True)
            keys = list(latest[:SHARED])
        if not keys:
            raise Undo
        return Order.objects.get(pk=self.random.choice(keys))

    def a_locked_order(self, status: str) -> Order:
        """Lock an order and return it, if it has this status; otherwise abort the operation."""
        found = Order.objects.select_for_update().filter(pk=self.an_order().pk, status=status).first()
        if found is None:
            raise Undo
        return found

    def a_deadline(self) -> datetime:
        luck = self.random.random()
        if luck < 0.1:
            return in_(0)
        return in_(self.random.uniform(0.2, 3.0) if luck < 0.75 else self.random.uniform(3.0, 8.0))


def operation(weight: float, *, is_atomic: bool = True) -> Callable[[Perform], Perform]:
    """Add a function to the repertoire, which runs it in its own transaction."""

    def add(perform: Perform) -> Perform:
        REPERTOIRE[transaction.atomic(perform) if is_atomic else perform] = weight
        return perform

    return add


def claim(verb: str, order: int, policy: str, key: str = "", **what: Any) -> dict[str, Any]:
    """Return the declared effects of an operation, with datetimes as strings."""
    texts = {name: value.isoformat() if isinstance(value, datetime) else value for name, value in what.items()}
    return {"verb": verb, "order": order, "policy": policy, "key": key, **texts}


def in_(seconds: float) -> datetime:
    return timezone.now() + timedelta(seconds=seconds)


def half(act: Callable[[], object]) -> None:
    """Act in a savepoint that is rolled back."""
    with suppress(Undo), transaction.atomic():
        act()
        raise Undo
    check_savepoint()


def check_savepoint() -> None:
    """Raise OperationalError if the connection was lost while a savepoint was rolled back.

    Django shows this error to no caller, and raises one of its own at the next statement.
    """
    if connection.needs_rollback:
        raise OperationalError("The connection was lost while a savepoint was rolled back.")
