"""Call the handler, sync or async, inside the transaction of its firing."""

from __future__ import annotations

import inspect
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from asgiref.sync import async_to_sync
from django.db import connections, transaction

from django_delayq.firing.long_runs import awaiting, handling
from django_delayq.ledger.locking import begin_write
from django_delayq.ledger.scrubbing import shown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from django_delayq.policies import TimeoutPolicy

logger = logging.getLogger("django_delayq.firing")


def call(policy: TimeoutPolicy[Any], *arguments: Any) -> None:
    """The handler has run. What it returns is of no interest; what it raises passes.

    An async handler's ORM calls come back to this thread, and so to this connection and transaction.
    """
    with handling(arguments):
        result = policy.handler(*arguments)
        if inspect.isawaitable(result):
            awaiting(result)
            async_to_sync(_awaited)(result)


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


@contextmanager
def firing_transaction(using: str) -> Iterator[None]:
    """One transaction that writes from its beginning, and whose callbacks cannot fail what is committed."""
    connection = connections[using]
    is_outermost = not connection.in_atomic_block
    with transaction.atomic(using=using):
        begin_write(using)
        yield
        if is_outermost:
            _make_robust(connection)


def _make_robust(connection: Any) -> None:
    """Let no `on_commit` callback of a handler hurt another one.

    They run when all is committed. One that raises would take the callbacks behind it along, which may be those of
    49 other timeouts, and would look like a handler that failed.
    """
    connection.run_on_commit = [
        (savepoints, _robust(callback), True) for savepoints, callback, *_ in connection.run_on_commit
    ]


def _robust(callback: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        try:
            callback()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            logger.error(
                "A callback for on_commit() raised; what it belongs to is committed and stays so.",
                exc_info=shown(error),
            )

    return run
