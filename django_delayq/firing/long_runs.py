"""Handlers that run for longer than a lease. They keep it, as their process lives; but somebody should know."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django_delayq.models import Timeout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from django_delayq.policies import TimeoutPolicy

logger = logging.getLogger("django_delayq.firing")


@dataclass(slots=True)
class _Run:
    policy: str
    ids: tuple[int, ...]
    began: float
    said: float = 0.0
    """After how many seconds it was last told."""


_runs: dict[int, _Run] = {}


@contextmanager
def noted(policy: TimeoutPolicy[Any], arguments: Sequence[Any]) -> Iterator[None]:
    """While the block lasts, this thread runs the handler of `policy` with `arguments`."""
    rows = arguments[-1]
    ids = (rows.pk,) if isinstance(rows, Timeout) else tuple(row.pk for row in rows)
    thread = threading.get_ident()
    outer, _runs[thread] = _runs.get(thread), _Run(policy.label, ids, time.monotonic())
    try:
        yield
    finally:
        if outer is None:
            del _runs[thread]
        else:
            _runs[thread] = outer


def warn_of_long_runs(seconds: float) -> None:
    """Of each handler of this process that has run for `seconds` the log tells, and again each time that doubles.

    Nothing ends it: a thread cannot be killed, and what it does may be right. It holds its object's lock (unless
    `atomic=False`) and one of the worker's threads for as long as it lasts.
    """
    for run in list(_runs.values()):
        lasted = time.monotonic() - run.began
        if lasted < max(seconds, 2 * run.said):
            continue
        run.said = lasted
        logger.warning(
            "The handler of %s has been running for %.0f s, with timeout %s%s",
            run.policy,
            lasted,
            run.ids[0],
            f" and {len(run.ids) - 1} more" if len(run.ids) > 1 else "",
            extra={
                "event": "handler_runs_long",
                "policy": run.policy,
                "timeout_id": run.ids[0],
                "timeout_ids": run.ids,
                "seconds": lasted,
            },
        )
