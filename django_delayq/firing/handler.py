"""Call a handler, sync or async, and contain what it raises."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from asgiref.sync import async_to_sync
from django.db import connections, transaction

from django_delayq.firing.state import Abandoned, Call, RunningWork, firing_state
from django_delayq.ledger.locking import begin_write
from django_delayq.ledger.scrubbing import shown
from django_delayq.models import Timeout
from django_delayq.policies import TimeoutPolicy

logger = logging.getLogger("django_delayq.firing")
T = TypeVar("T")


def guarded(act: Callable[[], T], failed: Callable[[BaseException], T]) -> T:
    """Return what `act` returns, or what `failed` returns for the exception that `act` raised.

    Only KeyboardInterrupt and Abandoned pass. SystemExit does not: a handler must not end the worker.
    """
    try:
        return act()
    except (KeyboardInterrupt, Abandoned):
        raise
    except BaseException as error:  # see above
        running = firing_state.running.get(threading.get_ident())
        if running is not None and running.is_abandoned:  # a connection that was cut replaces the exception
            raise Abandoned from error
        failure = error
    try:
        return failed(failure)  # not in the block above: what it raises would have this exception as its context
    finally:
        del failure  # its traceback refers to this frame


def call_handler(policy: TimeoutPolicy[Any], target: Any, timeouts: Timeout | list[Timeout], call: Call) -> None:
    """Call the policy's handler, and await its result if it is awaitable. Whatever the handler raises passes.

    The ORM calls of an async handler come back to this thread, and so to this connection and transaction.
    """
    running = firing_state.running[threading.get_ident()]

    def act() -> None:
        result = policy.handler(target, timeouts)
        if result is not None and inspect.isawaitable(result):
            running.awaited = result
            async_to_sync(_awaited)(result, running)

    try:
        running.make(call, act)
    finally:
        running.awaited = running.cancel = None


async def _awaited(result: Awaitable[Any], running: RunningWork) -> Any:
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    running.cancel = None if task is None else partial(loop.call_soon_threadsafe, task.cancel)
    with running.run_by_this_thread():
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
            callbacks = deque(_contained(callback) for _, callback, *_ in connection.run_on_commit)
            if (running := firing_state.running.get(threading.get_ident())) is not None:
                running.callbacks = callbacks
            connection.run_on_commit = [(set(), partial(run_callbacks, callbacks), True)]


def run_callbacks(callbacks: deque[Callable[[], None]]) -> None:
    """Run `callbacks`, each of which is removed before it begins."""
    while callbacks:
        callbacks.popleft()()


def _contained(callback: Callable[[], Any]) -> Callable[[], None]:
    def log(error: BaseException) -> None:
        logger.error("An on_commit() callback raised; its transaction is committed.", exc_info=shown(error))

    def act() -> None:
        running = firing_state.running.get(threading.get_ident())
        if running is None:
            callback()
        else:
            running.make(Call(), callback)

    return lambda: guarded(act, log)
