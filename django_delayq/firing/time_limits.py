"""Abandon handlers that take longer than their limit.

A thread cannot be ended from outside, and what it does may be right. But it occupies one of the worker's threads, and
locks its object (unless `atomic=False`). So works that take longer than a second, or than a lease, are logged.

The limit is `Limits(run=...)` or the setting `HANDLER_LIMIT`; `confirm` has one of its own. The works of a policy with
a limit run in a thread of
their own, which borrows the database connections of the thread that called `firing.run`. If a call of a handler takes
too long, the caller revokes the connections, cuts them, records the failed attempt, and continues with new ones.
The other thread is asked to end, and can change nothing any more.

One lock decides whether a call has returned or is abandoned, so a limit never strikes during COMMIT. If an `on_commit`
callback takes too long, its transaction is committed, and counts.
"""

from __future__ import annotations

import contextvars
import ctypes
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any, Final

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_delayq.conf import get_settings
from django_delayq.exceptions import Abandoned, TimeLimitExceeded
from django_delayq.firing import rails
from django_delayq.firing.handler import raised_by, run_callbacks, tracked
from django_delayq.firing.report import ReportBuilder
from django_delayq.firing.settling import persistently, settle
from django_delayq.firing.state import firing_state
from django_delayq.firing.works import Call, RunningWork
from django_delayq.ledger.controls import stop_cache
from django_delayq.ledger.db_connections import cut, revoke, share_with_thread, unshare
from django_delayq.ledger.error_texts import PACKAGE, is_user_code
from django_delayq.times.clock import plural

logger = logging.getLogger("django_delayq.firing")

POLL_SECONDS: Final = 0.25
"""How often a thread whose handlers have a limit is checked while none of them is running."""
CANCEL_SECONDS: Final = 0.2
"""How long a cancelled coroutine may take to end before its thread is interrupted."""
SLOW_SECONDS: Final = 1.0
"""A work that takes longer is logged, and its policy is slow."""
MAX_FRAMES: Final = 3
"""The innermost frames of the user's code: a whole stack would hide the line that waits."""


def run_within_limit(act: Callable[[], None], running: RunningWork) -> bool:
    """Run `act`, which fires `running.work`; raise what it raises. Return True if a call in it took too long.

    Then its report has what that call means for its timeout, and lacks the timeouts that were not fired. That is all of
    a batch, to be fired one by one.

    Inside another handler, or inside a transaction, as in a `TestCase`, the connections cannot be cut: then `act` runs
    without a limit of its own.
    """
    policy = running.policy
    limit = (policy and policy.limits and policy.limits.run) or get_settings().handler_limit
    if (
        policy is None
        or (limit is None and policy.confirmation is None)
        or firing_state.current is not None
        or any(connection.in_atomic_block for connection in connections.all(initialized_only=True))
    ):
        act()
        return False
    limited = _LimitedThread(running, inf if limit is None else limit.total_seconds())
    call = limited.run(act)
    if call is None:
        return False
    if call.timeout_ids:
        _record(call, limited)
    else:
        _complete(limited)
    return True


@dataclass(slots=True)
class _LimitedThread:
    """Another thread that runs a work with the connections of this one.

    Attributes:
        running: the work.
        limit: how many seconds a call of the handler may take.
        error: what the work has raised in the other thread.
        interruption: what a signal handler has raised in this thread meanwhile.
        end: how the call that was abandoned has ended, and where it was then.
        shared: the connections.

    The first to acquire the lock `_begun` decides: the other thread, which begins, or this one, to prevent that.
    """

    running: RunningWork
    limit: float
    error: BaseException | None = None
    interruption: BaseException | None = None
    end: str = ""
    shared: Sequence[BaseDatabaseWrapper] = field(default_factory=connections.all)
    _begun: threading.Lock = field(default_factory=threading.Lock)
    _ended: threading.Lock = field(default_factory=threading.Lock)

    def run(self, act: Callable[[], None]) -> Call | None:
        """Run `act` in the other thread. Return None when it has ended, or the call that was abandoned.

        An exception of a signal handler, such as a time limit of Celery, abandons the call, too: this thread would
        otherwise use the connections together with the other one.
        """
        self._ended.acquire()
        # A copy of the context, so that tracing, for example, continues.
        target = partial(contextvars.copy_context().run, self._act_with_shared, act)
        thread = threading.Thread(target=target, name=f"{threading.current_thread().name}-limited", daemon=True)
        share_with_thread(self.shared)
        try:
            thread.start()
            call = self._watch()
        except BaseException as error:  # noqa: BLE001 - raised again, or recorded
            self.interruption = error
            call = None if self._begun.acquire(blocking=False) else self._watch(at_once=True)
        if call is not None:
            self._abandon(thread, call)
        else:
            unshare(self.shared)
        try:
            if self.interruption is not None and (call is None or isinstance(self.interruption, KeyboardInterrupt)):
                raise self.interruption
            if call is None and self.error is not None:
                raise self.error
        finally:
            self.error = None  # its traceback refers to this frame: the cycle would keep what handlers have read
        return call

    @property
    def cause(self) -> BaseException:
        """Return the error of the call that was abandoned."""
        return self.interruption or TimeLimitExceeded(f"It {self.end}")

    def _act_with_shared(self, act: Callable[[], None]) -> None:
        if not self._begun.acquire(blocking=False):
            return
        with suppress(Abandoned):
            try:
                for connection in self.shared:
                    connections[connection.alias] = connection
                self.error = raised_by(act)
            finally:
                self._ended.release()
        for connection in self.shared if self.running.is_abandoned else ():
            with suppress(Exception):
                connection.close()

    def _watch(self, *, at_once: bool = False) -> Call | None:
        """Wait until the other thread has ended and return None, or until a call took too long and return it."""
        seconds = 0.0 if at_once else min(POLL_SECONDS, self.limit)
        while not self._ended.acquire(timeout=seconds):
            if overdue := self.running.abandon(self.limit, at_once=at_once):
                return overdue
            call = self.running.call
            left = POLL_SECONDS if call is None else call.began + call.within(self.limit) - time.monotonic()
            seconds = min(POLL_SECONDS, max(left, 0.001))
        return None

    def _abandon(self, thread: threading.Thread, call: Call) -> None:
        """Take the connections away, cut them, and ask the thread to end: at the latest it ends with the process."""
        broken = self.interruption and f"was interrupted by {type(self.interruption).__name__}"
        end = broken or f"took longer than {call.within(self.limit):g} s"
        self.end = f"{end}, and was abandoned: {activity(thread.ident or 0, self.running)}"
        revoke(self.shared)
        cut(self.shared)
        firing_state.abandoned.append(thread)
        for observer in call.observers:
            observer.abandoned(self.cause)
        if (cancel := self.running.cancel) is not None:  # read once: a coroutine that has just ended removes it
            with suppress(RuntimeError):  # its event loop has just been closed
                cancel()
            if self._ended.acquire(timeout=CANCEL_SECONDS):
                return
        self.running.interrupt(_interrupt)


def _interrupt(thread_id: int) -> None:
    """Raise Abandoned in the thread when it next executes Python code.

    Not while it logs: it may hold the lock of the log without being prepared to release it, and all threads log. Not
    under a debugger or profiler of Python 3.11: until that thread executes Python code, all threads with one would
    repeat the first instruction of a function, and the process would hang.
    """
    if sys.version_info < (3, 12) and (sys.gettrace() or sys.getprofile()):
        return
    if any(frame.f_code.co_filename == logging.__file__ for frame in _stack(thread_id)):
        return
    with suppress(AttributeError):  # not every Python has it
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(Abandoned))


def _record(call: Call, limited: _LimitedThread) -> None:
    """Record the failed attempt of the timeout whose handler hangs; of a batch only log it."""
    running, error = limited.running, limited.cause
    policy, using = running.policy, running.using
    if len(call.timeout_ids) > 1:
        logger.warning(
            "A handler of %s is called again with each of its %d timeouts alone. %s",
            *(policy.label, len(call.timeout_ids), error),
            extra={"event": "batch_abandoned", "policy": policy.label, "timeout_ids": call.timeout_ids},
        )
        return
    [timeout_id] = call.timeout_ids

    def record() -> ReportBuilder:
        found = settle(policy, error, using, call)
        if timeout_id in found.uncounted:  # its row is still locked
            cut(limited.shared)
        return found

    running.report.add(persistently(record, timeout_id, using))


def _complete(limited: _LimitedThread) -> None:
    """Report the transaction whose `on_commit` callback hangs as fired, and run the callbacks behind it.

    If one of those hangs, too, the rest are lost, as if the process had died after the commit.
    """
    running, rest = limited.running, limited.running.callbacks
    policy, using, committed = running.policy, running.using, running.committed
    running.report.add(committed)
    after = RunningWork(running.work, using, running.report, policy)

    def act() -> None:
        with tracked(after):
            run_callbacks(after, rest)

    if rest:
        _LimitedThread(after, limited.limit).run(act)
    logger.error(
        "An on_commit() callback of %s %s; its transaction is committed%s",
        *(policy.label, limited.end),
        f"; {plural(len(rest), 'callback')} behind it did not run" if rest else "",
        extra={"event": "callback_abandoned", "policy": policy.label},
    )
    rails.committed(policy, committed, stop_cache.guards(policy, using), using)


def log_long_runs(lease_seconds: float, threads: int = 0) -> None:
    """Log each work of this process that takes long, and what its thread is doing or waiting for.

    After a second once: at level INFO, or WARNING if all of `threads` are busy; at most once a minute for a policy.
    After `lease_seconds`: as a warning, and again each time that its duration has doubled.
    """
    now = time.monotonic()
    busy = [(thread, run) for thread, run in list(firing_state.running.items()) if not run.is_abandoned]
    for thread, run in busy:
        lasted = now - run.began
        if lasted >= max(lease_seconds, 2 * run.logged_after):
            run.logged_after = lasted
            _log_run(run, lasted, logging.WARNING, "handler_runs_long", activity(thread, run))
        elif lasted >= SLOW_SECONDS and not run.logged_after:
            run.logged_after = lasted
            if firing_state.is_time_to_log(run.work.policy):
                level = logging.WARNING if 0 < threads <= len(busy) else logging.INFO
                words = f"; {len(busy)} of {threads} threads are busy" if threads else ""
                _log_run(run, lasted, level, "handler_slow", activity(thread, run) + words)


def _log_run(run: RunningWork, lasted: float, level: int, event: str, activity: str) -> None:
    work, ids = run.work, run.timeout_ids or run.work.ids
    objects = dict(zip(work.ids, work.object_ids, strict=True))
    logger.log(
        level,
        f"The handler of {work.policy} has been running for {lasted:.1f} s, with timeout {ids[0]} of object "
        f"{objects.get(ids[0], '?')}{f' and {len(ids) - 1} more' if len(ids) > 1 else ''}: {activity}",
        extra={"event": event, "policy": work.policy, "timeout_id": ids[0], "timeout_ids": ids, "seconds": lasted},
    )


def activity(thread: int, run: RunningWork) -> str:
    """Describe what the thread does or waits for, and where in the user's code."""
    frames = [*_stack(thread), *_awaited(run.awaited)]
    in_handler = bool(run.timeout_ids)
    elsewhere = "it is in the handler" if in_handler else f"after the checkpoint {run.checkpoint!r}"
    does = _database_activity(frames) or elsewhere
    places = [_place(frame) for frame in frames if in_handler and is_user_code(frame.f_code.co_filename)]
    return f"{does}, at {' > '.join(places[-MAX_FRAMES:])}" if places else does


def _stack(thread: int) -> list[FrameType]:
    """Return what the thread executes, from the call of the handler on, the outermost frame first."""
    stack, frame = list[FrameType](), sys._current_frames().get(thread)
    while frame is not None:
        stack.append(frame)
        if frame.f_code.co_filename.startswith(PACKAGE) and frame.f_code.co_name == "call_handler":
            break
        frame = frame.f_back
    return stack[::-1]


def _awaited(result: Any) -> Iterator[FrameType]:
    """Yield the frames of a suspended coroutine, which no thread has on its stack."""
    while (frame := getattr(result, "cr_frame", None)) is not None:
        yield frame
        result = result.cr_await


def _database_activity(frames: Sequence[FrameType]) -> str | None:
    """Describe what the thread waits for in a database, or return None. A statement, which may hold secrets, is cut."""
    for frame in frames:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if "/django/db/backends/" not in file:
            continue
        if name in {"connect", "get_new_connection"}:
            return "it waits for a database connection"
        if name in {"_commit", "_rollback"}:
            return f"it waits for {name[1:].upper()}"
        sql = frame.f_locals.get("sql") if name == "_execute" else None
        if isinstance(sql, str) and sql:
            locks = "UPDATE" in sql[-60:] if sql[:6] == "SELECT" else sql[:5] == "BEGIN"
            return f"it waits for {'a lock' if locks else 'the database'}, in a statement {sql.split()[0]}"
    return None


def _place(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno} in {frame.f_code.co_name}"
