"""Leave timeouts of policies that are not declared in this process to other workers.

During a deployment workers of several releases run side by side. A worker that finds such a row releases it for 1, 2,
4 ... 60 seconds, reads only other labels from the ledger, and for a minute reads Redis a little later than a worker
that knows the label.
"""

from __future__ import annotations

import logging
import threading
import time
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from django_delayq.policies import registry

logger = logging.getLogger("django_delayq.firing")

FIRST_PAUSE: Final = timedelta(seconds=1)
MAX_PAUSE: Final = timedelta(minutes=1)
EXPECTED_SECONDS: Final = 60.0
"""How long more unknown rows are expected after one was found for the first time."""
MAX_ROWS: Final = 10_000
MAX_LABELS: Final = 1_000


class _Row(NamedTuple):
    label: str
    pause: timedelta
    again_at: datetime


class UnknownPolicies:
    """The unknown labels that this process has found, until they are declared, and when to check their rows again."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._labels: set[str] = set()
        self._found_at = -EXPECTED_SECONDS
        self._lock = threading.Lock()

    def again_at(self, label: str, timeout_id: int, now: datetime) -> datetime:
        """Return when to check a row again that was found `now`, by the database clock."""
        with self._lock:
            self._note(label)
            row = self._rows.pop(timeout_id, None)
            if row is None:
                self._found_at = time.monotonic()
                if len(self._rows) >= MAX_ROWS:
                    self._rows = {id: old for id, old in self._rows.items() if old.again_at + MAX_PAUSE > now}
                if len(self._rows) >= MAX_ROWS:
                    return now + MAX_PAUSE
            pause = FIRST_PAUSE if row is None else min(2 * row.pause, MAX_PAUSE)
            self._rows[timeout_id] = _Row(label, pause, now + pause)
            return now + pause

    def parked_until(self, timeout_id: int) -> datetime | None:
        """Return what `again_at` returned for the row last; None: this process has not found it."""
        row = self._rows.get(timeout_id)
        return None if row is None else row.again_at

    def labels(self) -> list[str]:
        """Return the labels that were found and are still not declared."""
        known = [label for label in list(self._labels) if registry.get(label) is not None]
        if known:
            with self._lock:
                self._labels.difference_update(known)
                self._rows = {id: row for id, row in self._rows.items() if row.label not in known}
        return list(self._labels)

    @property
    def are_about(self) -> bool:
        """Return whether a row was found for the first time within the last minute."""
        return time.monotonic() - self._found_at < EXPECTED_SECONDS

    def forget_all(self) -> None:
        """Return to the state of a new process. For tests."""
        self.__init__()  # type: ignore[misc]

    def _note(self, label: str) -> None:
        if label in self._labels or len(self._labels) >= MAX_LABELS:
            return
        self._labels.add(label)
        logger.warning(
            "No timeout policy %r is declared here: its timeouts are left to workers that know it, and checked again "
            "after 1, 2, 4 ... 60 seconds",
            label,
            extra={"event": "policy_unknown", "policy": label},
        )


unknown = UnknownPolicies()
