"""Works that take longer than a second, or longer than a lease: log what their threads are doing.

No thread can be ended from outside, and what it does may be right. But it holds the lock of its object (unless
`atomic=False`) and one of the worker's threads for as long as it lasts.
"""

from __future__ import annotations

import logging
import sys
import sysconfig
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import asgiref
import django

from django_delayq.firing.checkpoints import forget_step, step_of
from django_delayq.models import Timeout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from django_delayq.firing.report import Work

logger = logging.getLogger("django_delayq.firing")

SLOW_SECONDS: Final = 1.0
POLICY_SECONDS: Final = 60.0
"""The log has at most one line about slow works of a policy within this time."""
FRAMES: Final = 3

_OURS = str(Path(__file__).parent.parent)
_NOT_THE_USERS = (_OURS, *(str(Path(package.__file__ or "").parent) for package in (django, asgiref)))
_STANDARD = sysconfig.get_path("stdlib")
_DRIVERS = ("/psycopg/", "/psycopg_pool/", "/psycopg2/", "/MySQLdb/")


@dataclass(slots=True)
class _Run:
    work: Work
    began: float = field(default_factory=time.monotonic)
    ids: tuple[int, ...] = ()
    """The timeouts of the handler call that is under way; (): none is."""
    result: Any = None
    """What the handler returned, if it is awaited."""
    is_noted: bool = False
    logged_after: float = 0.0
    """After how many seconds it was last reported as longer than a lease."""


_runs: dict[int, _Run] = {}
_noted_at: dict[str, float] = {}


@contextmanager
def noted(work: Work) -> Iterator[None]:
    """While the block lasts, this thread runs `work`."""
    thread = threading.get_ident()
    outer, _runs[thread] = _runs.get(thread), _Run(work)
    try:
        yield
    finally:
        forget_step()
        if outer is None:
            del _runs[thread]
        else:
            _runs[thread] = outer


@contextmanager
def handling(arguments: Sequence[Any]) -> Iterator[None]:
    """While the block lasts, this thread is in the handler, which was called with `arguments`."""
    run = _runs.get(threading.get_ident())
    if run is None:
        yield
        return
    rows = arguments[-1]
    run.ids = (rows.pk,) if isinstance(rows, Timeout) else tuple(row.pk for row in rows)
    try:
        yield
    finally:
        run.ids, run.result = (), None


def awaiting(result: Any) -> None:
    """The handler of this thread returned `result`, which is awaited now."""
    if (run := _runs.get(threading.get_ident())) is not None:
        run.result = result


def log_long_runs(lease_seconds: float, threads: int = 0) -> None:
    """Log each work of this process that takes long, and what its thread is doing or waiting for.

    After a second: once, at level INFO, or WARNING if all of `threads` are busy; at most once a minute for a policy.
    After `lease_seconds`: as a warning, and again each time that its duration has doubled.
    """
    now, runs = time.monotonic(), list(_runs.items())
    for thread, run in runs:
        lasted = now - run.began
        if lasted >= max(lease_seconds, 2 * run.logged_after):
            run.is_noted, run.logged_after = True, lasted
            logger.warning(_words(thread, run, lasted), extra={"event": "handler_runs_long", **_facts(run, lasted)})
        elif lasted >= SLOW_SECONDS and not run.is_noted:
            run.is_noted = True
            if now - _noted_at.get(run.work.policy, -POLICY_SECONDS) < POLICY_SECONDS:
                continue
            _noted_at[run.work.policy] = now
            level = logging.WARNING if 0 < threads <= len(runs) else logging.INFO
            words = _words(thread, run, lasted) + (f"; {len(runs)} of {threads} threads are busy" if threads else "")
            logger.log(level, words, extra={"event": "handler_slow", **_facts(run, lasted)})


def _facts(run: _Run, lasted: float) -> dict[str, Any]:
    ids = run.ids or run.work.ids
    return {"policy": run.work.policy, "timeout_id": ids[0], "timeout_ids": ids, "seconds": lasted}


def _words(thread: int, run: _Run, lasted: float) -> str:
    work, ids = run.work, run.ids or run.work.ids
    objects = dict(zip(work.ids, work.object_ids, strict=True))
    more = f" and {len(ids) - 1} more" if len(ids) > 1 else ""
    return (
        f"The handler of {work.policy} has been running for {lasted:.1f} s, with timeout {ids[0]} of object "
        f"{objects.get(ids[0], '?')}{more}: {_doing(thread, run)}"
    )


def _doing(thread: int, run: _Run) -> str:
    """In a few words, what the thread does or waits for, and where in the user's code."""
    frames = [*_stack(sys._current_frames().get(thread)), *_awaited(run.result)]
    parts = [_database_part(frames) or ("it is in the handler" if run.ids else f"after the step {step_of(thread)!r}")]
    places = [_place(frame) for frame in frames if run.ids and _is_the_users(frame.f_code.co_filename)]
    if places:
        parts.append("at " + " > ".join(places[-FRAMES:]))
    return ", ".join(parts)


def _stack(frame: FrameType | None) -> list[FrameType]:
    """`frame` and its callers, up to the call of the handler; the outermost first."""
    stack = []
    while frame is not None:
        stack.append(frame)
        if frame.f_code.co_filename.startswith(_OURS) and frame.f_code.co_name == "call":
            break
        frame = frame.f_back
    return stack[::-1]


def _awaited(result: Any) -> Iterator[FrameType]:
    """The frames of a coroutine that is suspended: no thread has them on its stack."""
    while (frame := getattr(result, "cr_frame", None)) is not None:
        yield frame
        result = result.cr_await


def _database_part(frames: Sequence[FrameType]) -> str | None:
    """What the thread wants of a database; None: nothing. Only the kind of the statement, which may hold secrets."""
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


def _is_the_users(file: str) -> bool:
    if file.startswith((*_NOT_THE_USERS, "<frozen")) or any(driver in file for driver in _DRIVERS):
        return False
    return not file.startswith(_STANDARD) or "site-packages" in file or "dist-packages" in file


def _place(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno} in {frame.f_code.co_name}"


def forget_long_runs() -> None:
    """As in a process that has just started: for tests."""
    _noted_at.clear()
