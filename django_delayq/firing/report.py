"""The input and output of a firing: `Work` and `Report`, plain data that can be sent as JSON."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from math import inf
from typing import Any, Final, NamedTuple

from django.conf import settings
from django.dispatch import Signal
from django.utils import timezone

from django_delayq import signals
from django_delayq.clock import check_moment
from django_delayq.engine.records import MAX_ID
from django_delayq.firing.handler import Call, caught
from django_delayq.firing.log_lines import log_settled, log_waiting
from django_delayq.firing.state import LOCKED_MAX_SECONDS, MISFIT_MAX_SECONDS, TRANSIENT_MAX_SECONDS, firing_state
from django_delayq.ledger import settling
from django_delayq.ledger.db_connections import DISK_FULL, error_code, is_missing, transient_reason
from django_delayq.ledger.history import message_of, shown
from django_delayq.ledger.outbox import announce
from django_delayq.models import Timeout

logger = logging.getLogger("django_delayq.firing")

VERSION: Final = 1
"""The version of all messages. Unknown keys of a newer one are ignored; missing ones of an older one have defaults."""
MAX_IDS: Final = 1_000
_ID_FIELDS: Final = ("done", "fired", "untried", "lost", "refused")
_SIGNALS: Final[dict[str, Signal]] = {
    Timeout.State.PENDING: signals.timeout_failed,
    Timeout.State.FIRED: signals.timeout_fired,
    Timeout.State.SKIPPED: signals.timeout_skipped,
    Timeout.State.CANCELLED: signals.timeout_cancelled,
    Timeout.State.DEAD: signals.timeout_dead,
}
"""What is sent for a row that an attempt has left in this state."""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a work. Ids that it does not name count as `lost`."""

    done: tuple[int, ...] = ()
    """To be acknowledged: settled now or before, or without a row."""
    again: Mapping[int, datetime] = field(default_factory=dict)
    """To be checked again at this datetime: retried, snoozed, moved, not yet due, locked, parked."""
    fired: tuple[int, ...] = ()
    """Those of `done` whose handler ran now and succeeded."""
    now: datetime | None = None
    """The time by the database clock that `again` counts from; None: unknown."""
    early: Mapping[int, datetime] = field(default_factory=dict)
    """Of a plan with `ahead`: the deadlines of the timeouts in its works that are not due yet."""
    lost: tuple[int, ...] = ()
    """From an executor: their outcome is not known. They are delivered again after a lease."""
    refused: tuple[int, ...] = ()
    """From an executor: these were not run. They are delivered again soon, and no attempt is counted."""
    untried: tuple[int, ...] = ()
    """Those of `again` whose attempt does not count: locked, of a stopped policy, or released for lack of time."""
    before: tuple[int, ...] = ()
    """Those of `done` that were settled before this work, such as by a commit whose answer was lost. Not part of a
    message."""
    missed: bool = False
    """The work is of a policy with a rate, and its slot was over before it could begin. Not part of a message."""
    signals: Sequence[tuple[Signal, Timeout]] = field(default=(), compare=False, repr=False)
    """What happened to which rows, as the signals that were sent. Not part of a message."""
    errors: Mapping[int, BaseException] = field(default_factory=dict, compare=False, repr=False)
    """What was raised in attempts of these timeouts that did not succeed, also outcomes. Not part of a message."""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain types for JSON; datetimes are strings in ISO format."""
        again = [[id, at.isoformat()] for id, at in self.again.items()]
        ids = {name: list(getattr(self, name)) for name in _ID_FIELDS}
        return {"version": VERSION, "again": again, "now": self.now and self.now.isoformat(), **ids}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """Return the report of `as_dict`; unknown keys are ignored. Raises ValueError if `data` is not a report."""
        try:
            again = {_id(id): _datetime(at) for id, at in data.get("again", ())}
            now = None if data.get("now") is None else _datetime(data["now"])
            ids: dict[str, Any] = {name: _ids(data.get(name, ())) for name in _ID_FIELDS}
            return cls(again=again, now=now, **ids)
        except (AttributeError, TypeError, ValueError) as error:
            problem = str(error).removesuffix(".")
            raise ValueError(f"This is not a report: {problem}. Pass what Report.as_dict() returned.") from error


class Candidate(NamedTuple):
    """A timeout to be fired: its id and that of its object, because no transaction may read before it locks."""

    id: int
    object_id: str


@dataclass(frozen=True, slots=True)
class Work:
    """Timeouts of one policy that are fired by one call of `run`, in due order.

    A work is not trusted: `run` fires only rows that are due, of this policy and of these objects.
    """

    policy: str
    ids: tuple[int, ...]
    object_ids: tuple[str, ...]
    queue: str = "default"
    suspect: bool = False
    """A process may have died while it ran: it is fired alone, after its attempt has been counted. If it is still
    `firing`, the attempt that died is recorded first."""
    begin_at: float = 0.0
    """`run` waits until this `time.monotonic()` of the worker's process. It is not part of a message."""
    begin_by: float = inf
    """Later its first handler is not called: the slot of a policy with a rate is over. Not part of a message."""

    def as_dict(self) -> dict[str, Any]:
        """Return the work as plain types for JSON: ids and labels only."""
        data = {**asdict(self), "ids": list(self.ids), "object_ids": list(self.object_ids)}
        del data["begin_at"], data["begin_by"]
        return {"version": VERSION, **data}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Work:
        """Return the work of `as_dict`; unknown keys are ignored. Raises ValueError if `data` is not a work."""
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
        return [Candidate(*pair) for pair in zip(self.ids, self.object_ids, strict=True)]


def longest_wait(error: BaseException) -> float:
    """Return for how long at most a timeout waits that `error` has prevented from firing here.

    If the code of this process does not fit the tables, that of another worker may: it must get the timeout soon, and
    before this one.
    """
    if error_code(error) in DISK_FULL and firing_state.is_time_to_log(("disk_full",)):
        logger.error("The database has no room left: %s", message_of(error), extra={"event": "database_full"})
    if not is_missing(error):
        return TRANSIENT_MAX_SECONDS
    firing_state.unknown.note_misfit()
    return MISFIT_MAX_SECONDS


@dataclass(slots=True)
class ReportBuilder:
    """Collect the outcomes of timeouts; `report` returns them."""

    done: list[int] = field(default_factory=list)
    again: dict[int, datetime] = field(default_factory=dict)
    fired: list[int] = field(default_factory=list)
    uncounted: set[int] = field(default_factory=set)
    """Those of `again` that could not be fired for a reason outside the handler: no attempt is counted."""
    signals: list[tuple[Signal, Timeout]] = field(default_factory=list)
    """To be sent after commit."""
    errors: dict[int, BaseException] = field(default_factory=dict)
    now: datetime | None = None
    before: list[int] = field(default_factory=list)
    """Those of `done` that were settled before."""
    missed: bool = False
    """The slot of the work was over before it could begin."""
    calls: list[Call] = field(default_factory=list)
    """For the log: the calls of handlers that returned or raised."""

    def current_time(self) -> datetime:
        """Return the time of the database clock, or an estimate if the database has not answered."""
        return self.now or firing_state.database_now()

    def add_row(self, row: Timeout) -> None:
        """Report `row` as done if it is settled, else have it checked again when it is due."""
        if row.is_settled:
            self.done.append(row.pk)
        else:
            self.again[row.pk] = row.run_at

    def add_outcomes(self, rows: Iterable[Timeout]) -> None:
        """Report `rows`, which attempts have just written, and the signals for that."""
        for row in rows:
            if row.state == Timeout.State.FIRED:
                self.done.append(row.pk)
                self.fired.append(row.pk)
            else:
                self.add_row(row)
            self.signals.append((_SIGNALS[row.state], row))

    def lock_row(self, timeout_id: int, using: str) -> tuple[Timeout | None, datetime]:
        """Lock the row, and return it with its history, and the database's time.

        None: another transaction has locked the row, and the timeout is released.
        """
        rows, self.now = settling.lock_rows([timeout_id], using, history=True)
        if timeout_id not in rows:
            self.release([timeout_id], using, "another transaction has locked its row")
        return rows.get(timeout_id), self.now

    def note_call(self, call: Call) -> None:
        """Note for the log that the handler has returned."""
        call.at = self.current_time()
        self.calls.append(call)

    def release(self, ids: Collection[int], using: str, why: str, max_seconds: float = LOCKED_MAX_SECONDS) -> None:
        """Have `ids` checked again after a short backoff, which grows up to `max_seconds`."""
        log_waiting(ids, why)
        for timeout_id in ids:
            wait = firing_state.backoff.next_wait(using, timeout_id, why, max_seconds)
            self.again[timeout_id] = self.current_time() + wait
            self.uncounted.add(timeout_id)

    def release_rest(self, ids: Collection[int], again: datetime, why: str = "its turn is later") -> None:
        """Have `ids`, which were not tried, checked at the datetime `again`. `why` is logged."""
        log_waiting(ids, why)
        for timeout_id in ids:
            self.again[timeout_id] = again
            self.uncounted.add(timeout_id)

    def release_unknown(self, policy: str, ids: Iterable[int], error: BaseException, using: str) -> None:
        """Log that `error` prevented the outcome of `ids` from being known or written, and release them."""
        rest = [timeout_id for timeout_id in ids if timeout_id not in self.again and timeout_id not in self.done]
        transient = transient_reason(error, using)
        logger.warning(
            "Timeouts %s of %s are released, because their outcome could not be determined or written: %s",
            rest,
            policy,
            transient or message_of(error),
            exc_info=None if transient else shown(error),
            extra={"event": "timeouts_put_back", "policy": policy},
        )
        self.release(rest, using, transient or f"{type(error).__name__}: {message_of(error)}", longest_wait(error))

    def add(self, other: ReportBuilder) -> None:
        self.done += other.done
        self.again.update(other.again)
        self.fired += other.fired
        self.uncounted |= other.uncounted
        self.signals += other.signals
        self.calls += other.calls
        self.before += other.before
        self.errors.update(other.errors)
        self.now = other.now or self.now
        self.missed = self.missed or other.missed

    def publish(self, using: str) -> None:
        """Log what has fired, and send the collected signals. What fails here is logged and undoes nothing."""
        log_settled((row for _, row in self.signals), self.calls)
        for signal, row in self.signals:
            error = caught(partial(announce, signal, row, using))
            if error is not None:
                logger.error(
                    "The signal for timeout %s (%s) was not sent", row.pk, row.state, exc_info=shown(error, row)
                )

    def report(self, early: Mapping[int, datetime] | None = None) -> Report:
        """Return the report. `early`: of a plan, see `Report`."""
        untried = tuple(self.uncounted & self.again.keys())
        return Report(
            tuple(self.done),
            dict(self.again),
            tuple(self.fired),
            self.now,
            early or {},
            untried=untried,
            before=tuple(self.before),
            missed=self.missed,
            signals=self.signals,
            errors=self.errors,
        )


def _id(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_ID:
        raise ValueError(f"{value!r} is not the id of a timeout")
    return value


def _ids(values: Any) -> tuple[int, ...]:
    return tuple(_id(value) for value in values)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def _datetime(value: Any) -> datetime:
    return check_moment(datetime.fromisoformat(value), repr(value))


def suits_use_tz(value: Any) -> bool:
    """Return whether `value` is a datetime that suits `USE_TZ`: aware if it is True, else naive."""
    return isinstance(value, datetime) and timezone.is_aware(value) == settings.USE_TZ
