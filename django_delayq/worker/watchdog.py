"""Notice a thread of the worker that waits for the database without end.

A proxy, a firewall or a frozen server may swallow what a connection sends, and a lock on a table may be held for hours.
No driver has a time limit for that, and a thread that waits in one neither fires anything nor notices a signal.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Final

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_delayq.ledger.db_connections import give_up

logger = logging.getLogger("django_delayq.worker")

CHECK_SECONDS: Final = 0.5
"""How much later than its limit a hanging statement is noticed."""
HANGS_SECONDS: Final = 60.0
"""A main loop that has not come on for so long does not recover: the process ends, for its supervisor to restart it."""
ABORT_SECONDS: Final = 5.0
"""How long a main loop that hangs is waited for after the second signal."""


class Progress:
    """Since when one thread of a worker has been busy with one step, and with which connection.

    Args:
        name: of the thread, for the log.
        using: the database.
        limit: after so many seconds the connection is given up. A statement of the thread needs milliseconds.
    """

    def __init__(self, name: str, using: str, limit: float) -> None:
        self.name = name
        self._using = using
        self._longest = limit
        self._began_at = self._limit = inf
        self._connection: BaseDatabaseWrapper | None = None

    @property
    def seconds(self) -> float:
        """Return how long the present step has taken; 0 between two steps."""
        return max(0.0, time.monotonic() - self._began_at)

    @contextmanager
    def step(self, *, may_be_long: bool = False) -> Iterator[None]:
        """Note that the calling thread is busy during the block."""
        self._connection = connections[self._using]
        self._limit = inf if may_be_long else self._longest
        self._began_at = time.monotonic()
        try:
            yield
        finally:
            self._began_at = inf

    def renew(self) -> None:
        """Note that the step has come on. For the thread itself, between two pages of a long job."""
        self._began_at, self._limit = time.monotonic(), self._longest

    @property
    def hangs(self) -> bool:
        """Return whether the step has taken far too long."""
        return self._limit < inf and self.seconds > HANGS_SECONDS

    def check(self) -> None:
        """If the step takes too long, log it, and give its connection up, so that the statement fails.

        Again after twice the time, because the next statement may wait, too.
        """
        if self.seconds <= self._limit or self._connection is None:
            return
        self._limit *= 2
        logger.warning(
            "The %s of the worker has waited for the database for %.0f s, and opens another connection. Either a lock "
            "on a table is held, or the network or the server is silent",
            self.name,
            self.seconds,
            extra={"event": "database_silent"},
        )
        # In a thread of its own: to cancel a statement at a silent server may take long, too.
        threading.Thread(target=give_up, args=(self._connection,), name="delayq-give-up", daemon=True).start()


@contextmanager
def watching(
    watched: Sequence[Progress], is_aborted: Callable[[], bool], exits: Callable[[int], object] | None
) -> Iterator[None]:
    """Check `watched` in a thread until the block ends. The first of them is the main loop.

    Args:
        watched: the threads' progress.
        is_aborted: whether the worker was ordered to end at once.
        exits: what ends the process; None: it is not the worker's own, and continues.
    """
    has_ended, loop = threading.Event(), watched[0]

    def watch() -> None:
        aborted_at = inf
        while not has_ended.wait(CHECK_SECONDS):
            for progress in watched:
                progress.check()
            if is_aborted():
                aborted_at = min(aborted_at, time.monotonic())
            seconds_since = time.monotonic() - aborted_at
            if exits is not None and (loop.hangs or min(seconds_since, loop.seconds) > ABORT_SECONDS):
                logger.error(
                    "The %s of the worker has not come on for %.0f s: the process ends. What it held fires when its "
                    "leases expire",
                    loop.name,
                    loop.seconds,
                    extra={"event": "worker_hangs"},
                )
                exits(1)

    threading.Thread(target=watch, name="delayq-watchdog", daemon=True).start()
    try:
        yield
    finally:
        has_ended.set()


def exit_at_once(code: int) -> None:
    """End the process without waiting for any of its threads."""
    logging.shutdown()
    os._exit(code)
