"""Periodic jobs that share a thread and its database connection."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from django.db import Error as DatabaseError
from django.db import connections

from django_delayq.backoff import Backoff, StateLog
from django_delayq.exceptions import EngineError
from django_delayq.ledger.db_connections import check_connections
from django_delayq.ledger.scrubbing import message_of, shown

logger = logging.getLogger("django_delayq.worker")

FIRST_RETRY_SECONDS: Final = 1.0
LONGEST_RETRY_SECONDS: Final = 30.0


class Job:
    """A periodic job, and the time of its next run. For one thread.

    `work` is called every `seconds` (a callable is called each time), also at the start if it `is_immediate`, and
    `at_end` when the thread ends. A failure never ends the job. It is logged once while errors of the same kind follow,
    and the job is run again after 1, 2, 4 ... 30 seconds, or its own interval if that is longer.
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
        self._backoff = Backoff(FIRST_RETRY_SECONDS, max(self._interval(), LONGEST_RETRY_SECONDS))
        self._log = StateLog(logger, "duty_failed", "duty_back", duty=self.name)
        self._due_at = time.monotonic() + (0 if is_immediate else self._interval())

    @property
    def seconds_left(self) -> float:
        """Return how long it is until the next run. 0: it is due."""
        return max(0.0, self._due_at - time.monotonic())

    def run(self) -> None:
        """Run the job once, and once more on another connection if its own was broken. Raises nothing."""
        failure = self._attempt()
        # The server may have cut it while it was idle. To test it before each run would cost a statement each time.
        if failure is not None and check_connections(error=failure):
            failure = self._attempt()
        if failure is not None:
            self._backoff.failed()
            if not isinstance(failure, EngineError):  # `RedisHealth` logs an outage of Redis
                self._log.failed(
                    "%s failed and is tried again: %s",
                    self.name,
                    message_of(failure),
                    kind=type(failure),
                    exc_info=None if isinstance(failure, DatabaseError) else shown(failure),
                )
        else:
            self._backoff.succeeded()
            self._log.recovered("%s works again", self.name, level=logging.INFO)
        check_connections(error=failure)
        self._due_at = self._backoff.retry_at if failure else time.monotonic() + self._interval()

    def _attempt(self) -> Exception | None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - the other jobs need this thread
            return error
        return None

    def _interval(self) -> float:
        return float(self._seconds() if callable(self._seconds) else self._seconds)


class PeriodicThread(threading.Thread):
    """A thread that runs its `jobs` when they are due, the first one first, until stopped.

    A job that takes long calls `run_urgent` between its pages, so that it does not delay the jobs before it.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=f"delayq-{name}", daemon=True)
        self.jobs: list[Job] = []
        """In order of priority. Fill it before the start."""
        self._running: Job | None = None
        self._stopping = threading.Event()

    def stop(self) -> None:
        """End the thread after the current job."""
        self._stopping.set()

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._run_due(self.jobs)
                self._stopping.wait(min((job.seconds_left for job in self.jobs), default=None))
            for job in self.jobs:
                job.at_end()
        finally:
            connections.close_all()

    def run_urgent(self) -> None:
        """Run the due jobs before the current one. For that job, between two pages, outside a transaction.

        Also return a pooled connection, so that another thread of the worker can use it meanwhile.
        """
        check_connections()
        running = self._running
        if threading.current_thread() is self and running is not None:
            self._run_due(self.jobs[: self.jobs.index(running)])
            self._running = running

    def _run_due(self, jobs: list[Job]) -> None:
        """Run those of `jobs` that are due. After each run the first one has priority again."""
        while not self._stopping.is_set():
            self._running = next((job for job in jobs if not job.seconds_left), None)
            if self._running is None:
                return
            self._running.run()
