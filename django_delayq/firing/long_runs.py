"""Log what the threads of slow works are doing: those that take longer than a second, or longer than a lease.

A thread cannot be ended from outside, and what it does may be right. But it occupies one of the worker's threads, and
locks its object (unless `atomic=False`).
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

from django_delayq.firing.state import RunningWork, firing_state
from django_delayq.ledger.scrubbing import PACKAGE, is_user_code

logger = logging.getLogger("django_delayq.firing")

SLOW_SECONDS: Final = 1.0
LOG_INTERVAL_SECONDS: Final = 60.0
"""Slow works of one policy are logged at most once in this time."""
MAX_FRAMES: Final = 3


@contextmanager
def tracked(running: RunningWork) -> Iterator[None]:
    """Register `running` as what this thread runs, until the block ends. May be nested: a handler may fire others."""
    thread = threading.get_ident()
    outer, firing_state.running[thread] = firing_state.running.get(thread), running
    try:
        with running.run_by_this_thread():
            yield
    finally:
        if outer is None:
            firing_state.running.pop(thread, None)
        else:
            firing_state.running[thread] = outer


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
            run.is_logged, run.logged_after = True, lasted
            _log(run, lasted, logging.WARNING, "handler_runs_long", activity(thread, run))
        elif lasted >= SLOW_SECONDS and not run.is_logged:
            run.is_logged = True
            label = run.work.policy
            if now - firing_state.slow_logged_at.get(label, -LOG_INTERVAL_SECONDS) < LOG_INTERVAL_SECONDS:
                continue
            firing_state.slow_logged_at[label] = now
            level = logging.WARNING if 0 < threads <= len(busy) else logging.INFO
            words = f"; {len(busy)} of {threads} threads are busy" if threads else ""
            _log(run, lasted, level, "handler_slow", activity(thread, run) + words)


def _log(run: RunningWork, lasted: float, level: int, event: str, activity: str) -> None:
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
    frames = [*_stack(sys._current_frames().get(thread)), *_awaited(run.awaited)]
    in_handler = bool(run.timeout_ids)
    elsewhere = "it is in the handler" if in_handler else f"after the checkpoint {run.checkpoint!r}"
    parts = [_database_activity(frames) or elsewhere]
    places = [_place(frame) for frame in frames if in_handler and is_user_code(frame.f_code.co_filename)]
    if places:
        parts.append("at " + " > ".join(places[-MAX_FRAMES:]))
    return ", ".join(parts)


def _stack(frame: FrameType | None) -> list[FrameType]:
    """Return `frame` and its callers up to the call of the handler, the outermost first."""
    stack = []
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
