"""What goes into a firing and what comes out of it: `Work` and `Report`, both plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from django_delayq import clock
from django_delayq.firing.patience import LOCKED_CEILING, patience

if TYPE_CHECKING:
    from collections.abc import Iterable

    from django.dispatch import Signal

    from django_delayq.models import Timeout


@dataclass(frozen=True, slots=True)
class Report:
    """What became of some timeouts, for whoever holds their entries in Redis."""

    done: tuple[int, ...] = ()
    """To be acknowledged: settled now or before, or there is no such row."""
    again: Mapping[int, datetime] = field(default_factory=dict)
    """To be looked at again at this moment: retried, snoozed, moved, not yet due, locked by others, parked."""
    fired: tuple[int, ...] = ()
    """Those of `done` whose handler ran now and succeeded."""
    now: datetime | None = None
    """The database's moment that `again` counts from; None: the database did not say."""
    due_by: datetime | None = None
    """Of a plan that looked ahead: when the last of its works may be run; None: all may be run now."""


class Candidate(NamedTuple):
    """A timeout to be fired: its id and, as no transaction may read before it locks, its object's."""

    id: int
    object_id: str


@dataclass(frozen=True, slots=True)
class Work:
    """Timeouts of one policy that are fired by one call of `run`, in due order. Survives pickling and JSON."""

    policy: str
    ids: tuple[int, ...]
    object_ids: tuple[str, ...]
    queue: str = "default"
    suspect: bool = False
    """A process may have died of it: fired alone, after its attempt has been counted."""

    def candidates(self) -> list[Candidate]:
        """The timeouts with their object ids."""
        return [Candidate(*pair) for pair in zip(self.ids, self.object_ids, strict=True)]


@dataclass(slots=True)
class Findings:
    """A report in the making."""

    done: list[int] = field(default_factory=list)
    again: dict[int, datetime] = field(default_factory=dict)
    fired: list[int] = field(default_factory=list)
    blameless: set[int] = field(default_factory=set)
    """Those of `again` that could not be fired through no fault of theirs: no attempt is counted."""
    news: list[tuple[Signal, Timeout]] = field(default_factory=list)
    """Signals to send, now that what they tell is committed."""
    now: datetime | None = None

    def moment(self) -> datetime:
        """The database's moment, or this process's if the database has not said."""
        return self.now or clock.now()

    def put_back(self, ids: Iterable[int], using: str, why: str, ceiling: float = LOCKED_CEILING) -> None:
        """Have `ids` looked at again after a short wait, which grows up to `ceiling` seconds from time to time."""
        for timeout_id in ids:
            self.again[timeout_id] = self.moment() + patience.wait(using, timeout_id, why, ceiling)
            self.blameless.add(timeout_id)

    def add(self, other: Findings) -> None:
        """Take in what `other` found."""
        self.done += other.done
        self.again.update(other.again)
        self.fired += other.fired
        self.blameless |= other.blameless
        self.news += other.news
        self.now = other.now or self.now

    def report(self) -> Report:
        return Report(tuple(self.done), dict(self.again), tuple(self.fired), self.now)
