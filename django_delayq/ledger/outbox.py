"""From the ledger to Redis: what a transaction changed goes there after its commit, all in one call.

A push is a hint. If it fails nobody hears of it but the log, once for each outage, and the sweep makes up for it:
whoever schedules is never told about Redis, and never waits for it longer than `connections.PRODUCER` allows.

Every push is an on-commit callback of its own that carries its own changes, and the first one to run sends the
changes of all that are still there. So Django itself keeps the books: a savepoint that rolls back drops its callbacks
and with them exactly its changes, and no flag can be left behind that would keep a later push from happening.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakValueDictionary

from django.db import connections, transaction

from django_delayq import clock
from django_delayq.conf import get_settings
from django_delayq.engine import Change
from django_delayq.engine.records import MAX_DUE_MS
from django_delayq.exceptions import EngineError
from django_delayq.redis_clients import get_engine

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_delayq.models import Timeout

logger = logging.getLogger("django_delayq.outbox")


def push(using: str, changes: Iterable[Change]) -> None:
    """Redis learns of `changes` once the present transaction has committed; at once where there is none.

    Call it after writing the rows. Whatever happens to Redis, nothing is raised. Without Redis nothing is done.
    """
    changes = tuple(changes)
    if not changes or get_settings().redis is None:
        return
    connection = connections[using]
    if not connection.in_atomic_block and not connection.get_autocommit():
        # The caller manages his transaction himself, and nobody will tell us when it ends. A hint that comes before
        # its row costs a look in vain, and the sweep finds the row; no hint at all would always be late.
        _send(changes)
        return
    push = _Push(_outboxes.setdefault(connection, _Outbox()), changes)
    transaction.on_commit(push, using=using, robust=True)


def change_for(timeout: Timeout, *, earlier_only: bool = False) -> Change | None:
    """What Redis has to learn about `timeout` as it is now; None: nothing.

    A row that waits within `HORIZON` gets an entry, due at its `run_at`. One that waits longer stays out of Redis
    until a sweep brings it in, so an entry that it had before it was moved must go, and so must that of a row which
    does not wait.

    Args:
        timeout: as it was written.
        earlier_only: True for a row that is new: it can have no entry that would be wrong.
    """
    is_near = timeout.run_at - clock.now() <= get_settings().horizon
    if timeout.state == timeout.State.PENDING and is_near:
        return Change(timeout.queue, timeout.pk, due_ms_of(timeout.run_at), earlier_only)
    return None if earlier_only else Change(timeout.queue, timeout.pk, None)


def due_ms_of(moment: datetime) -> int:
    """The moment as the engine counts it, and within what it can count."""
    return min(max(clock.to_ms(moment), 0), MAX_DUE_MS)


class _Outbox:
    """The pushes of one connection that wait for their commit, in the order in which they were made."""

    def __init__(self) -> None:
        # Weak, so that the list of Django's callbacks alone decides which of them still exist.
        self._pushes: WeakValueDictionary[int, _Push] = WeakValueDictionary()
        self._numbers = itertools.count()

    def add(self, push: _Push) -> None:
        self._pushes[next(self._numbers)] = push

    def flush(self) -> None:
        waiting = list(self._pushes.values())
        self._pushes.clear()
        changes = tuple(itertools.chain.from_iterable(push.take() for push in waiting))
        if changes:
            _send(changes)


class _Push:
    """One on-commit callback with its changes."""

    __slots__ = ("__weakref__", "_changes", "_outbox")

    def __init__(self, outbox: _Outbox, changes: tuple[Change, ...]) -> None:
        self._outbox = outbox
        self._changes = changes
        outbox.add(self)

    def __call__(self) -> None:
        self._outbox.flush()

    def take(self) -> tuple[Change, ...]:
        changes, self._changes = self._changes, ()
        return changes


_outboxes: WeakKeyDictionary[BaseDatabaseWrapper, _Outbox] = WeakKeyDictionary()


def _send(changes: Sequence[Change]) -> None:
    try:
        engine = get_engine()
        if engine is not None:
            engine.apply(changes)
    except EngineError as error:
        # The breaker has told the operator, once.
        logger.debug("%d changes were not pushed: %s", len(changes), error, extra={"event": "push_failed"})
    except Exception:
        # Not only in callbacks, where Django would log it: whoever manages his transaction himself is called back by
        # nobody, and his order must not fail for a hint.
        logger.exception("%d changes were not pushed", len(changes), extra={"event": "push_failed"})
