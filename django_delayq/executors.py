"""Where firings run: in threads of the worker's process, or wherever the class named by `DELAYQ["EXECUTOR"]` says."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from datetime import timedelta
from math import inf
from typing import Protocol, TypeAlias

from django.db import connections
from django.utils.module_loading import import_string

from django_delayq import clock
from django_delayq.conf import ConfigError, get_settings
from django_delayq.db_connections import check_connections, open_connection
from django_delayq.firing import Report, Work, run
from django_delayq.scrubbing import shown

logger = logging.getLogger("django_delayq.worker")

Done: TypeAlias = Callable[[Work, Report], None]
"""Told what became of a work, in any thread."""


class Executor(Protocol):
    """Runs works, several at a time. Made as `cls(using, concurrency)` in the worker's main thread."""

    def submit(self, work: Work, done: Done) -> None:
        """`work` will be run by `firing.run`, in its turn, and `done` be told. Returns at once."""

    def withdraw(self) -> list[Work]:
        """The works that have not begun; they never will, and `done` is not told of them."""

    def close(self, *, wait: bool = True) -> None:
        """Nothing more is submitted. With `wait`, whatever was submitted and not withdrawn has been run."""


class Line:
    """Works that wait for a thread. The next one is of the policy that has the fewest under way.

    So that a policy whose handlers are slow cannot have all threads while another one waits: the next thread to be
    free is the other's. Within a policy the first comes first; between equals, the one that has waited longer.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[tuple[Work, Done]]] = {}
        self._running: Counter[str] = Counter()
        self._is_closed = False

    def put(self, work: Work, done: Done) -> None:
        """`work` waits for its turn."""
        with self._changed:
            self._waiting.setdefault(work.policy, deque()).append((work, done))
            self._changed.notify()

    def take(self) -> tuple[Work, Done] | None:
        """The next work, waited for; it is under way until `ended`. None: closed, and nothing is left."""
        with self._changed:
            while not self._waiting:
                if self._is_closed:
                    return None
                self._changed.wait()
            policy = min(self._waiting, key=self._running.__getitem__)
            rest = self._waiting.pop(policy)
            item = rest.popleft()
            if rest:
                self._waiting[policy] = rest  # behind its equals
            self._running[policy] += 1
            return item

    def ended(self, work: Work) -> None:
        """`work` is not under way any more."""
        with self._changed:
            self._running[work.policy] -= 1
            if not self._running[work.policy]:
                del self._running[work.policy]

    def withdraw(self) -> list[Work]:
        """What waits, and will not be taken any more."""
        with self._changed:
            withdrawn = [work for waiting in self._waiting.values() for work, _ in waiting]
            self._waiting.clear()
            return withdrawn

    def close(self) -> None:
        """Who takes and finds nothing need not wait any longer."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class ThreadExecutor:
    """Daemon threads, each with its own database connection, open already when the first deadline comes.

    Daemons, so that a worker that is told to stop a second time need not wait for a handler that hangs.
    """

    def __init__(self, using: str, concurrency: int) -> None:
        self._using = using
        self._broken_at = 0.0
        self._line = Line()
        self._threads = [
            threading.Thread(target=self._serve, name=f"delayq-handler-{number}", daemon=True)
            for number in range(1, concurrency + 1)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Work, done: Done) -> None:
        self._line.put(work, done)

    def withdraw(self) -> list[Work]:
        return self._line.withdraw()

    def close(self, *, wait: bool = True) -> None:
        self._line.close()
        for thread in self._threads if wait else ():
            thread.join()

    def _serve(self) -> None:
        open_connection(self._using)
        used_at = time.monotonic()
        try:
            while (item := self._line.take()) is not None:
                work, done = item
                # Where one connection broke, most likely all did: the others are tried before they are used.
                is_suspect = self._broken_at >= used_at
                check_connections(idle_seconds=inf if is_suspect else time.monotonic() - used_at)
                report = self._run(work)
                used_at = time.monotonic()
                check_connections()
                if connections[self._using].connection is None:
                    self._broken_at = used_at
                self._line.ended(work)
                done(work, report)
        finally:
            connections.close_all()

    def _run(self, work: Work) -> Report:
        try:
            return run(work, self._using)
        except BaseException as error:  # `run` lets nothing out, but a thread that is lost is lost for good
            logger.error(
                "A firing was interrupted; its timeouts come again",
                exc_info=shown(error),
                extra={"event": "interrupted"},
            )
            return Report(again=dict.fromkeys(work.ids, clock.now() + timedelta(seconds=1)))


def make_executor(using: str, concurrency: int) -> Executor:
    """The executor that the settings name.

    Raises:
        ConfigError: `DELAYQ["EXECUTOR"]` cannot be imported.
    """
    path = get_settings().executor
    if path is None:
        return ThreadExecutor(using, concurrency)
    try:
        executor: Executor = import_string(path)(using, concurrency)
    except ImportError as error:
        raise ConfigError(f"DELAYQ['EXECUTOR'] names {path!r}, which cannot be imported: {error}") from error
    return executor
