"""What must be written so that the ledger fits some rows, and which objects of a policy cannot be compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from django.db import DataError
from django.db import Error as DatabaseError

from django_delayq.ledger.errors import message_of
from django_delayq.models import Timeout
from django_delayq.policy.terms import CONSTANT, follows_data, has_column, terms_of_code
from django_delayq.rounds.columns import ATTEMPTS
from django_delayq.sql.key_types import object_id_of
from django_delayq.times import clock
from django_delayq.times.clock import plural

if TYPE_CHECKING:
    from django_delayq.arming.row_state import RowState
    from django_delayq.policy.policies import TimeoutPolicy

RoundKey: TypeAlias = "tuple[str, Any, datetime | None]"
"""A round, by the label of its policy, the key of its object, and its `since_at`."""


KEPT_COLUMNS: tuple[str, ...] = ("due_at", "first_due_at", "extensions", "created_at", "hold_ended_at", "own_key")
KEPT_COLUMNS += ("restarted_at", "terms", "computed_due_at", "is_guarded", "steps_over", "stops")
KEPT_COLUMNS += ("remaining", "keeps_deadline", "held_at", "held_until", "held_when", "settled_at")
KEPT_COLUMNS += ("step", *ATTEMPTS, "payload", "asked_due_at", "is_due_by_request")
"""The columns of a cancelled row that `RoundMemory.of` takes; the idempotency key is None in another installation."""


class RoundMemory(NamedTuple):
    """What a round keeps when it is armed again. `due_at` is None if its policy decides the deadline."""

    due_at: datetime | None
    first_due_at: datetime
    extensions: int
    held_until: datetime
    """Holds that ended later have not moved its deadline: it was not pending when they moved the others."""
    key: str | None
    """Its idempotency key, by which a provider knows that it has seen an attempt; None: of another installation."""
    attempts: Mapping[str, Any]
    """The columns `ATTEMPTS` of its step, or of its handler."""
    asked_due_at: datetime
    """The deadline before an operator or a hold moved it."""
    stopped_at: datetime | None = None
    """Since when its clock was stopped, and has been since; None: it was running."""
    resumed_at: datetime | None = None
    """When it began to run again although it was held: its hold by hand had an end, which no worker has noticed."""
    restarted_at: datetime | None = None
    """When its deadline was last set independently of the former one. If it was held: when its clock runs again."""
    terms: str | None = None
    """With which values its deadline was computed; None: it was set by hand."""
    computed_due_at: datetime | None = None
    is_guarded: bool = False
    """A guard has ended it."""
    steps_over: str = ""
    """Its steps that ran, or were passed: they do not run again."""
    step: str = ""
    stops: Any = None
    """When its clock was stopped before."""
    payload: Any = None

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> RoundMemory:
        """Return what a round keeps of its row that its condition has ended, by `KEPT_COLUMNS`."""
        kept = {name: row[name] for name in cls._fields if name in row}
        kept["due_at"] = None if row["is_due_by_request"] else row["due_at"]
        kept |= {
            "attempts": {name: row[name] for name in ATTEMPTS},
            "asked_due_at": row["asked_due_at"] or row["due_at"],
        }
        kept["held_until"] = row["hold_ended_at"] or row["created_at"]
        stopped_at = None if row["keeps_deadline"] or row["remaining"] is None else row["held_at"]
        ended_at = row["held_until"] if stopped_at and not row["held_when"] else None
        resumed_at = ended_at if ended_at is not None and ended_at <= row["settled_at"] else None
        return cls(**kept, key=row["own_key"], stopped_at=stopped_at, resumed_at=resumed_at)


class Round(NamedTuple):
    """A round that must be armed, or to which the pending one must be moved."""

    state: RowState
    since_at: datetime
    due_at: datetime
    kept: RoundMemory | None
    rest: timedelta | None
    """The rest of its time, if its clock is stopped; None: it runs, or it has been running until now."""
    data: Any
    """What its deadline was computed of: values or the object; None: of `since_at` and constants."""

    @property
    def terms(self) -> str:
        """Return with what values its deadline was computed."""
        return terms_now(self.state, self.since_at, self.data)

    @property
    def held_at(self) -> datetime:
        """Return since when its clock is stopped, if it is: since the beginning, if it is a new round."""
        return (self.kept and self.kept.stopped_at) or min(self.since_at, clock.now())


def terms_now(state: RowState, since_at: datetime, data: Any) -> str:
    """Return with what values the deadline of `state` is computed now. `data`: see `Round`."""
    if not follows_data(state.policy):
        return CONSTANT
    if has_column(state.policy):
        return state.terms or CONSTANT
    return terms_of_code(state.policy, data, since_at)


@dataclass(slots=True)
class Changes:
    """What must be written so that the ledger fits some rows of one model."""

    insert: list[Round] = field(default_factory=list)
    move: dict[int, Round] = field(default_factory=dict)
    """By the id of the pending row."""
    cancel: dict[int, tuple[RowState, Timeout.Cause]] = field(default_factory=dict)
    """By the id of the pending row."""
    recompute: dict[int, Round] = field(default_factory=dict)
    """By the id of the pending row, whose `since` is the same, but not its data."""
    hold: dict[int, RowState] = field(default_factory=dict)
    resume: dict[int, RowState] = field(default_factory=dict)
    """By the ids of the rows whose clock must be stopped, and of those whose clock must run."""
    too_old: int = 0

    def add(self, other: Changes) -> None:
        self.insert += other.insert
        self.move |= other.move
        self.cancel |= other.cancel
        self.recompute |= other.recompute
        self.hold |= other.hold
        self.resume |= other.resume
        self.too_old += other.too_old

    @property
    def pks(self) -> list[Any]:
        """Return the sorted keys of the objects of these changes, one for each change."""
        states = [each.state for each in (*self.insert, *self.move.values(), *self.recompute.values())]
        states += [*self.hold.values(), *self.resume.values()]
        return sorted(state.pk for state in (*states, *(state for state, _ in self.cancel.values())))

    def set_clock(self, state: RowState, row_id: int, held: int) -> None:
        """Stop the clock of a waiting round, or let it run, if it must be otherwise. `held`: see `held_how`."""
        if state.on_hold is not None and state.on_hold != bool(held & 1):
            (self.hold if state.on_hold else self.resume)[row_id] = state


@dataclass(slots=True)
class Failures:
    """The objects of a policy for which `since` or `after` raises or results in a deadline that is refused.

    Also objects that cannot be read, such as one with the datetime `infinity` of PostgreSQL.
    """

    policy: TimeoutPolicy[Any]
    count: int = 0
    locked: int = 0
    """How many objects were left alone because other transactions have locked them."""
    first: Any = None
    """The key of the first one, and its exception; None: there is none."""

    @contextmanager
    def counting(self, pk: Any) -> Iterator[None]:
        """Count the object if the block raises, and continue after it: the object stays as it is.

        Raises other errors of the database. Counts SystemExit, which would end the sync.
        """
        try:
            yield
        except (Exception, SystemExit) as error:  # code of the application
            if not is_of_one_object(error):
                raise
            self.count += 1
            self.first = self.first or (pk, error)

    def __str__(self) -> str:
        """Describe the first failure, and count the others, for the log and the command."""
        pk, error = self.first
        key = object_id_of(self.policy.concrete_model, pk)
        words = f"the deadline of object {key} cannot be computed: {type(error).__name__}: {message_of(error)}"
        others = plural(self.count - 1, "other object fails", "other objects fail")
        return f"{self.policy.label}: {words}{f' ({others} too)' if self.count > 1 else ''}"


def is_of_one_object(error: BaseException) -> bool:
    """Return whether `error` may be one of a single object: its code, or a value that the driver cannot read."""
    return isinstance(error, DataError) or not isinstance(error, DatabaseError)
