"""After commit: tell Redis what changed, and the receivers of our signals what happened."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from django.db import connections, transaction

from django_delayq.engine import Change
from django_delayq.ledger import outbox
from django_delayq.models import Timeout
from django_delayq.policies import registry

if TYPE_CHECKING:
    from collections.abc import Iterable

    from django.dispatch import Signal


def announce(signal: Signal, row: Timeout, using: str) -> None:
    """Once the transaction has committed, `signal` is sent for `row`; what a receiver raises is logged."""
    policy = registry.get(row.policy)
    sender = policy.model if policy else Timeout
    if not signal.has_listeners(sender):
        return
    connection = connections[using]
    if connection.in_atomic_block or connection.get_autocommit():
        transaction.on_commit(functools.partial(signal.send_robust, sender, timeout=row), using=using, robust=True)


def push(rows: Iterable[Timeout], using: str, *, earlier_only: bool = False) -> None:
    """Once the transaction has committed, Redis knows when `rows` are due.

    `earlier_only` for new rows; otherwise a later due time replaces the one that Redis has.
    """
    changes = (outbox.change_for(row, earlier_only=earlier_only) for row in rows)
    outbox.push(using, [change for change in changes if change is not None])


def withdraw(rows: Iterable[tuple[str, int]], using: str) -> None:
    """Once the transaction has committed, Redis forgets these (queue, id). Only saves a worker a look."""
    outbox.push(using, [Change(queue, row_id, None) for queue, row_id in rows])
