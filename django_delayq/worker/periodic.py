"""What a worker does every few seconds beside firing: jobs that share a thread and its one database connection."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from math import inf
from typing import Final

from django.db import Error as DatabaseError
from django.db import connections

from django_delayq.exceptions import EngineError
from django_delayq.ledger.db_connections import check_connections
from django_delayq.ledger.scrubbing import message_of, shown

logger = logging.getLogger("django_delayq.worker")

FIRST_RETRY_SECONDS: Final = 1.0
LONGEST_RETRY_SECONDS: Final = 30.0


class Job:
    """One periodic duty, and the time of its next run. For one thread.

    A failure never ends it. It is logged, once while errors of the same kind follow, and the job is run again after
    1, 2, 4 ... 30 seconds, or its own interval if that is longer.

    Args:
        name: in log lines and in their `duty`.
        work: what to run. It may be repeated at any time.
        seconds: the time between two runs; a callable is asked each time.
        is_immediate: False: the first run is after `seconds` too.
        at_end: called when the thread ends.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], object],
        seconds: float | Callable[[], float],
        *,
        is_immediate: bool = True,
        at_end: Callable[[], object] = lambda: None,
    ) -> None:
        self.name = f"delayq-{name}"
        self.at_end = at_end
        self._work = work
        self._seconds = seconds
        self._failure: type[BaseException] | None = None
        self._failures = 0
        self._due_at = time.monotonic() + (0 if is_immediate else self._pause())

    @property
    def seconds_left(self) -> float:
        """Return how long it is until the next run; 0: it is due."""
        return max(0.0, self._due_at - time.monotonic())

    def run(self) -> None:
        """Run it once, on a connection that works. Raises nothing."""
        failure: Exception | None = None
        check_connections(idle_seconds=inf)
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - whatever it is, later timeouts need this thread
            failure = error
            self._failures += 1
            self._log(error)
        else:
            if self._failures:
                logger.info("%s works again", self.name, extra={"event": "duty_back", "duty": self.name})
            self._failure, self._failures = None, 0
        check_connections(error=failure)
        self._due_at = time.monotonic() + self._pause()

    def _pause(self) -> float:
        seconds = float(self._seconds() if callable(self._seconds) else self._seconds)
        if not self._failures:
            return seconds
        longest = max(seconds, LONGEST_RETRY_SECONDS)
        return min(longest, FIRST_RETRY_SECONDS * 2.0 ** min(self._failures - 1, 12)) * random.uniform(0.5, 1.0)

    def _log(self, error: Exception) -> None:
        if isinstance(error, EngineError):
            return  # `Link` logs an outage of Redis
        is_known, self._failure = self._failure is type(error), type(error)
        logger.log(
            logging.DEBUG if is_known else logging.WARNING,
            "%s failed and is tried again: %s",
            self.name,
            message_of(error),
            exc_info=None if isinstance(error, DatabaseError) else shown(error),
            extra={"event": "duty_failed", "duty": self.name},
        )


class PeriodicThread(threading.Thread):
    """Runs its `jobs` when they are due, the first one first, until stopped.

    A job that takes long calls `run_urgent` between its pages, so that it holds up no job that stands before it.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=f"delayq-{name}", daemon=True)
        self.jobs: list[Job] = []
        """In order of priority. To be filled before the start."""
        self._running: Job | None = None
        self._stopping = threading.Event()

    def stop(self) -> None:
        """End after the job that runs now."""
        self._stopping.set()

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._run_due()
                self._stopping.wait(min((job.seconds_left for job in self.jobs), default=None))
            for job in self.jobs:
                job.at_end()
        finally:
            connections.close_all()

    def run_urgent(self) -> None:
        """Run the due jobs before the running one. For that job, between two pages, outside a transaction.

        A pooled connection is returned, so that another thread of the worker can use it meanwhile.
        """
        check_connections()
        running = self._running
        if threading.current_thread() is self and running is not None:
            self._run_due(before=running)
            self._running = running

    def _run_due(self, before: Job | None = None) -> None:
        """Run each job that is due, `before` the given one only. After each run the first one has priority again."""
        jobs = self.jobs if before is None else self.jobs[: self.jobs.index(before)]
        while not self._stopping.is_set():
            self._running = next((job for job in jobs if not job.seconds_left), None)
            if self._running is None:
                return
            self._running.run()
