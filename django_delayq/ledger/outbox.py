"""After commit: send to Redis what a transaction changed, in one call, and send signals to their receivers.

A push is a hint. If it fails, that is logged once for each outage and the sweep adds what is missing. The caller gets
no error, and waits for Redis no longer than the client's timeout.

Each push is an on-commit callback with its own changes. The first one to run sends the changes of all that still
exist. So a savepoint that rolls back drops its callbacks, and with them exactly its changes, and no flag can be left
behind that would prevent a later push.
"""

from __future__ import annotations

import functools
import itertools
import logging
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

from django.db import connections, transaction

from django_delayq.conf import get_settings
from django_delayq.engine.records import MAX_DUE_MS, Change
from django_delayq.exceptions import EngineError
from django_delayq.models import Timeout
from django_delayq.policy.policies import registry
from django_delayq.redis_clients import get_engine
from django_delayq.signals import timeouts_settling
from django_delayq.times import clock
from django_delayq.times.clock import plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime

    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.dispatch import Signal

logger = logging.getLogger("django_delayq.outbox")

Line: TypeAlias = tuple[str, str]
"""The queue and the policy of a row, which name the line of its entry in Redis."""


def line_of(row: Timeout) -> Line:
    """Return the line of a row."""
    return row.queue, row.policy


def announce(signal: Signal, row: Timeout, using: str) -> None:
    """Send `signal` for `row` once the transaction has committed; what a receiver raises is logged.

    Nothing is sent where the caller manages the transaction itself, without `atomic()`: its end is not known here.
    """
    if not signal.receivers:  # then `cancel_pending` has not read the other columns
        return
    policy = registry.get(row.policy)
    sender = policy.model if policy else Timeout
    if not signal.has_listeners(sender):
        return
    connection = connections[using]
    if connection.in_atomic_block or connection.get_autocommit():
        transaction.on_commit(functools.partial(signal.send_robust, sender, timeout=row), using=using, robust=True)


def record_settled(rows: Iterable[Timeout], using: str) -> None:
    """Send `timeouts_settling` for those of `rows` that are settled, in the transaction that settles them.

    Raises what a receiver raises, so that the transaction rolls back.
    """
    if timeouts_settling.has_listeners(Timeout) and (settled := [row for row in rows if row.is_settled]):
        timeouts_settling.send(Timeout, timeouts=settled, using=using)


def push_rows(rows: Iterable[Timeout], using: str, *, earlier_only: bool = False) -> None:
    """Push when the pending `rows`, as they were written, are due: see `push_due`."""
    push_due(((row.queue, row.policy, row.pk, row.run_at) for row in rows), using, earlier_only=earlier_only)


def push_due(due: Iterable[tuple[str, str, int, datetime]], using: str, *, earlier_only: bool) -> None:
    """Push when pending rows are due, given by their queues, policies, ids and `run_at`.

    A row that is due within `HORIZON`, or before a sweep would add it, gets an entry. One that is due later stays out
    of Redis until then, so the entry that it had before it was moved is removed.

    `earlier_only`: for new rows, of which Redis has nothing that would be wrong. Otherwise a later due time replaces
    the one that Redis has.
    """
    if get_settings().redis is None:  # `push` checks this, too, but then all rows have been read
        return
    changes, end = [], _end_of_redis()
    for queue, label, row_id, at in due:
        if at <= end:
            changes.append(Change(queue, label, row_id, due_ms_of(at), earlier_only))
        elif not earlier_only:
            changes.append(Change(queue, label, row_id, None))
    push(using, changes)


def _end_of_redis() -> datetime:
    """Return until when Redis has the pending rows."""
    return clock.now() + max(get_settings().horizon, 2 * get_settings().sweep_interval)


def remove_entries(rows: Iterable[Timeout], using: str) -> None:
    """Remove the cancelled `rows` from Redis. This only saves a worker a check, so not those that were due later."""
    if get_settings().redis is not None:
        end = _end_of_redis()
        remove_ids({row.pk: line_of(row) for row in rows if row.run_at <= end}, using)


def remove_ids(entries: Mapping[int, Line], using: str) -> None:
    """Remove these ids, with their lines, from Redis."""
    push(using, [Change(*line, row_id, None) for row_id, line in entries.items()])


def push(using: str, changes: Iterable[Change]) -> None:
    """Send `changes` to Redis once the current transaction has committed; at once where there is none.

    Call it after writing the rows. Nothing is raised, whatever happens to Redis. Without Redis nothing is done.
    """
    changes = tuple(changes)
    if not changes or get_settings().redis is None:
        return
    connection = connections[using]
    if connection.in_atomic_block:
        transaction.on_commit(_Push(connection, changes), using=using, robust=True)
    else:
        # Committed already, or the caller manages the transaction itself, and its end is not known here. A hint before
        # its row costs a worker one check, and the sweep finds the row. Without it the timeout would always be late.
        _send(changes, using)


def due_ms_of(moment: datetime) -> int:
    """Return the datetime as the engine counts it, within what it can count."""
    return min(max(clock.to_ms(moment), 0), MAX_DUE_MS)


class _Push:
    """An on-commit callback with its changes."""

    def __init__(self, connection: BaseDatabaseWrapper, changes: tuple[Change, ...]) -> None:
        self.changes = changes
        self.using = connection.alias
        self.pending = _pending.setdefault(connection, WeakValueDictionary())
        self.pending[next(_numbers)] = self

    def __call__(self) -> None:
        pushes = list(self.pending.values())
        self.pending.clear()
        if pushes:
            _send(tuple(itertools.chain.from_iterable(each.changes for each in pushes)), self.using)


_numbers = itertools.count()
# The pushes of each connection that wait for its commit, in order. Weak: Django's list of callbacks alone decides
# which of them still exist.
_pending: WeakKeyDictionary[BaseDatabaseWrapper, WeakValueDictionary[int, _Push]] = WeakKeyDictionary()


def _send(changes: Sequence[Change], using: str) -> None:
    try:
        engine = get_engine(using)
        if engine is not None:
            engine.apply(changes)
    except Exception as error:  # Django logs it in callbacks only, and other callers must not fail for a hint
        is_known = isinstance(error, EngineError)  # the circuit breaker has logged it, once
        level, words = logging.DEBUG if is_known else logging.ERROR, plural(len(changes), "change was", "changes were")
        logger.log(level, "%s not pushed: %s", words, error, exc_info=not is_known, extra={"event": "push_failed"})
