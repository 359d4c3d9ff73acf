"""What must be written so that the ledger fits some rows, and which objects of a policy cannot be compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from django.db import DataError
from django.db import Error as DatabaseError

from django_delayq.ledger.error_texts import message_of
from django_delayq.models import Timeout
from django_delayq.policy.terms import CONSTANT, follows_data, has_column, terms_of_code
from django_delayq.sql.key_types import object_id_of
from django_delayq.times import clock
from django_delayq.times.clock import plural

if TYPE_CHECKING:
    from django_delayq.arming.row_state import RowState
    from django_delayq.policy.policies import TimeoutPolicy
    from django_delayq.rounds.events import RoundMemory

RoundKey: TypeAlias = "tuple[str, Any, datetime | None]"
"""A round, by the label of its policy, the key of its object, and its `since_at`."""


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
    obj: Any = None
    """Its object, if its plan needs it and it is to be inserted."""

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
        for name in (each.name for each in fields(self)):
            mine, others = getattr(self, name), getattr(other, name)
            setattr(self, name, mine | others if isinstance(mine, dict) else mine + others)

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


class Arming(NamedTuple):
    """How rows are compared with the ledger."""

    using: str
    """The database."""
    oldest: timedelta | None
    """A round overdue by this or more is not armed, unless it has a row or `by_handler_of` applies; None: any is."""
    failures: Failures | None = None
    """Counts the objects for which a callable raises. None: what it raises is raised."""
    is_new: bool = False
    """The rows were inserted just now, so that their rounds keep nothing."""
    wait: bool = True
    """Wait for rows that other transactions have locked, and do not leave them out."""
    dry_run: bool = False
    """Lock and write nothing."""


def is_of_one_object(error: BaseException) -> bool:
    """Return whether `error` may be one of a single object: its code, or a value that the driver cannot read."""
    return isinstance(error, DataError) or not isinstance(error, DatabaseError)
