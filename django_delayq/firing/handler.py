"""Call a handler, sync or async, and contain what it raises."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from asgiref.sync import async_to_sync
from django.db import connections, transaction

from django_delayq.firing.state import firing_state
from django_delayq.ledger.locking import begin_write
from django_delayq.ledger.scrubbing import shown
from django_delayq.models import Timeout
from django_delayq.policies import TimeoutPolicy

logger = logging.getLogger("django_delayq.firing")
T = TypeVar("T")


def guarded(act: Callable[[], T], failed: Callable[[BaseException], T]) -> T:
    """Return what `act` returns, or what `failed` returns for the exception that `act` raised.

    Only KeyboardInterrupt passes. SystemExit does not: a handler must not end the worker.
    """
    try:
        return act()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - see above
        return failed(error)


def call_handler(policy: TimeoutPolicy[Any], target: Any, timeouts: Timeout | list[Timeout]) -> None:
    """Call the policy's handler, and await its result if it is awaitable. Whatever the handler raises passes.

    The ORM calls of an async handler come back to this thread, and so to this connection and transaction.
    """
    running = firing_state.running[threading.get_ident()]
    running.timeout_ids = tuple([row.pk for row in timeouts]) if isinstance(timeouts, list) else (timeouts.pk,)
    try:
        result = policy.handler(target, timeouts)
        if inspect.isawaitable(result):
            running.awaited = result
            async_to_sync(_awaited)(result)
    finally:
        running.timeout_ids, running.awaited = (), None


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


@contextmanager
def firing_transaction(using: str) -> Iterator[None]:
    """Open a transaction that takes the write lock first, and whose `on_commit` callbacks cannot fail the firing."""
    connection: Any = connections[using]
    is_outermost = not connection.in_atomic_block
    with transaction.atomic(using=using):
        begin_write(using)
        yield
        if is_outermost and connection.run_on_commit:
            # A callback that raises would prevent those behind it, which may belong to 49 other timeouts, and would
            # look like a handler that failed.
            connection.run_on_commit = [
                (savepoints, _contained(callback), True) for savepoints, callback, *_ in connection.run_on_commit
            ]


def _contained(callback: Callable[[], Any]) -> Callable[[], None]:
    def log(error: BaseException) -> None:
        logger.error("An on_commit() callback raised; its transaction is committed.", exc_info=shown(error))

    return lambda: guarded(callback, log)
