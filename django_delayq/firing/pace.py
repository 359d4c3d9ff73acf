"""How many timeouts of a policy share a transaction: as many as its handlers are quick and its failures are rare.

All members of a group stay locked until it commits, and one that raises makes all the others run again.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

MOST = 50
LOCKED_SECONDS = 0.02
"""A group should hold its locks no longer than this."""
WORK_SECONDS = 0.2
"""What one piece of work should last, so that several threads share a crowd, and stopping takes no time."""
ALONE_AFTER_OVERLAP = 600.0
ALONE_AFTER_BATCH = 30.0
_WEIGHT = 0.1
_BEARABLE = 0.3
"""The share of groups that may be undone for a member that raises."""


@dataclass(slots=True)
class Pace:
    """What one policy's handlers were like lately, in this process."""

    seconds: float | None = None
    failing: float = 0.0
    proven: int = 1
    alone_until: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def group_size(self) -> int:
        """How many to fire in one transaction; 1 until something is known, then at most four times what went well."""
        if self.is_alone or self.seconds is None:
            return 1
        by_time = LOCKED_SECONDS / max(self.seconds, 1e-6)
        by_failures = _BEARABLE / max(self.failing, 1e-6)
        return max(1, min(MOST, int(by_time), int(by_failures), self.proven))

    def work_size(self) -> int:
        """How many to give to one thread at once."""
        if self.seconds is None:
            return MOST
        return max(1, min(MOST, int(WORK_SECONDS / max(self.seconds, 1e-6))))

    @property
    def is_alone(self) -> bool:
        return time.monotonic() < self.alone_until

    def went_well(self, count: int, seconds: float) -> None:
        """`count` handlers in one transaction took `seconds` and were committed."""
        with self._lock:
            each = seconds / count
            before = each if self.seconds is None else self.seconds
            self.seconds = max(each, before + _WEIGHT * (each - before))  # slow counts at once, quick proves itself
            self.failing *= (1 - _WEIGHT) ** min(count, MOST)
            self.proven = max(self.proven, min(MOST, 4 * count))

    def was_undone(self, seconds: float) -> None:
        """A member raised, and took `seconds` for it."""
        with self._lock:
            self.failing += _WEIGHT * (1 - self.failing)
            self.seconds = max(self.seconds or 0.0, seconds)

    def go_alone(self, seconds: float) -> None:
        """One by one from here on, for `seconds`."""
        with self._lock:
            self.alone_until = max(self.alone_until, time.monotonic() + seconds)


_paces: dict[str, Pace] = {}


def pace_of(label: str) -> Pace:
    """The pace of the policy `label`; every thread of this process shares it."""
    return _paces.get(label) or _paces.setdefault(label, Pace())


def forget_paces() -> None:
    """As in a process that has just started: for tests."""
    _paces.clear()
