"""What goes into a firing and what comes out of it: `Work` and `Report`, both plain data that survive JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from django.conf import settings
from django.utils import timezone

from django_delayq import clock
from django_delayq.firing.patience import LOCKED_CEILING, patience

if TYPE_CHECKING:
    from collections.abc import Iterable

    from django.dispatch import Signal

    from django_delayq.models import Timeout

VERSION: Final = 1
"""Of both messages. A reader takes what it knows of a newer one, and what an older one leaves out has its default."""
MAX_IDS: Final = 1_000
_BIGGEST_ID: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Report:
    """What became of the timeouts of a work. Ids that it does not name count as `lost`."""

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
    lost: tuple[int, ...] = ()
    """From an executor: it does not know what became of these. They are handed over again after a lease."""
    refused: tuple[int, ...] = ()
    """From an executor: these were not run. They are handed over again soon, and no attempt is counted."""
    untried: tuple[int, ...] = ()
    """Those of `again` that no handler was called for: locked by others, stopped, or out of time."""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain types for JSON; datetimes are strings in ISO format."""
        return {
            "version": VERSION,
            "done": list(self.done),
            "again": [[id, moment.isoformat()] for id, moment in self.again.items()],
            "fired": list(self.fired),
            "now": None if self.now is None else self.now.isoformat(),
            "untried": list(self.untried),
            "lost": list(self.lost),
            "refused": list(self.refused),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """Return the report that `as_dict` made a dict of; unknown keys are ignored.

        Raises:
            ValueError: the dict is not the one of a report.
        """
        try:
            return cls(
                done=_ids(data.get("done", ())),
                again={_id(id): _moment(moment) for id, moment in data.get("again", ())},
                fired=_ids(data.get("fired", ())),
                now=None if data.get("now") is None else _moment(data["now"]),
                untried=_ids(data.get("untried", ())),
                lost=_ids(data.get("lost", ())),
                refused=_ids(data.get("refused", ())),
            )
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"This is not a report: {error}. Pass what Report.as_dict() returned.") from error


class Candidate(NamedTuple):
    """A timeout to be fired: its id and, as no transaction may read before it locks, its object's."""

    id: int
    object_id: str


@dataclass(frozen=True, slots=True)
class Work:
    """Timeouts of one policy that are fired by one call of `run`, in due order.

    A work decides nothing: `run` fires only rows that are due, of this policy and of these objects.
    """

    policy: str
    ids: tuple[int, ...]
    object_ids: tuple[str, ...]
    queue: str = "default"
    suspect: bool = False
    """A process may have died of it: fired alone, after its attempt has been counted."""

    def as_dict(self) -> dict[str, Any]:
        """Return the work as plain types for JSON: ids and labels only."""
        return {
            "version": VERSION,
            "policy": self.policy,
            "ids": list(self.ids),
            "object_ids": list(self.object_ids),
            "queue": self.queue,
            "suspect": self.suspect,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Work:
        """Return the work that `as_dict` made a dict of; unknown keys are ignored.

        Raises:
            ValueError: the dict is not the one of a work.
        """
        try:
            work = cls(
                policy=_text(data["policy"]),
                ids=_ids(data["ids"]),
                object_ids=tuple(_text(id) for id in data["object_ids"]),
                queue=_text(data.get("queue", "default")),
                suspect=bool(data.get("suspect", False)),
            )
            if not 0 < len(work.ids) == len(work.object_ids) <= MAX_IDS or len(set(work.ids)) < len(work.ids):
                raise ValueError(f"it has {len(work.ids)} ids and {len(work.object_ids)} object ids")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"This is not a work: {error!r}. Pass what Work.as_dict() returned.") from error
        return work

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
        untried = tuple(self.blameless & self.again.keys())
        return Report(tuple(self.done), dict(self.again), tuple(self.fired), self.now, untried=untried)


def _id(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _BIGGEST_ID:
        raise ValueError(f"{value!r} is not the id of a timeout")
    return value


def _ids(values: Any) -> tuple[int, ...]:
    return tuple(_id(value) for value in values)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def is_moment(value: Any) -> bool:
    """Return whether `value` is a datetime as this project has them: aware with `USE_TZ`, else naive."""
    return isinstance(value, datetime) and timezone.is_aware(value) == settings.USE_TZ


def _moment(value: Any) -> datetime:
    moment = datetime.fromisoformat(value)
    if not is_moment(moment):
        raise ValueError(
            f"{value!r} {'has no' if settings.USE_TZ else 'has a'} time zone, with USE_TZ={settings.USE_TZ}"
        )
    return moment
