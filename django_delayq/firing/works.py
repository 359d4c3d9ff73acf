"""What the steps of a firing pass to each other: plain data.

`Work` and `Report`, its input and output, can be sent as JSON.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from math import inf
from typing import Any, Final, NamedTuple, Protocol

from django.conf import settings
from django.dispatch import Signal
from django.utils import timezone

from django_delayq.engine.records import MAX_ID
from django_delayq.exceptions import Abandoned
from django_delayq.models import Timeout
from django_delayq.times.clock import check_moment

AHEAD_SECONDS: Final = 0.004
"""So long before its deadline a work is passed to a thread, and its transaction begins: so they are ready then, even if
the worker's main thread is busy for some milliseconds."""
VERSION: Final = 1
"""The version of all messages. Unknown keys of a newer one are ignored; missing ones of an older one have defaults."""
MAX_IDS: Final = 1_000
"""A message that names more is forged, and would make one statement of any length."""
_ID_FIELDS: Final = ("done", "fired", "untried", "lost", "refused")


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
    """A process may have died while it ran: it is fired alone in its process. If it is still `firing`, that death is
    recorded first."""
    begin_at: float = 0.0
    """`run` waits until this `time.monotonic()` of the worker's process. It is not part of a message."""
    begin_by: float = inf
    """Later its first handler is not called: the slot of a policy with a rate is over. Not part of a message."""
    share: str = ""
    """The value whose slot it is, if that rate counts by one; or of `batch_by`. Not part of a message."""
    only: bool = False
    """With `batch_by`: fire no other timeouts of the value than `ids`. Not part of a message."""
    alone: bool = False
    """A call with several of its timeouts took too long: fire each by itself. Not part of a message."""

    def as_dict(self) -> dict[str, Any]:
        """Return the work as plain types for JSON: ids and labels only."""
        data = {**asdict(self), "ids": list(self.ids), "object_ids": list(self.object_ids)}
        for name in ("begin_at", "begin_by", "share", "only", "alone"):
            del data[name]
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
    stepped: tuple[int, ...] = ()
    """Those of `again` of which a step has ended. Not part of a message."""
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


class Observer(Protocol):
    """What is to know that another thread has abandoned a call."""

    def abandoned(self, error: BaseException) -> None:
        """Note it; `error` is the cause."""


@dataclass(slots=True)
class Call:
    """A call of a handler, or of an `on_commit` callback."""

    timeout_ids: tuple[int, ...] = ()
    """Its timeouts; empty for a callback, whose transaction is committed."""
    seen: dict[str, Any] | None = None
    """Columns of the row if the transaction of the handler rolls back. None: it was not read, and must still be due."""
    began: float = field(default_factory=time.monotonic)
    at: datetime | None = None
    """When it began, by the database clock; None: it has not returned."""
    planned_at: datetime | None = None
    """When it was to run, if its row is firing: see `after_attempt.AttemptFacts`."""
    took: float | None = None
    """Seconds; None: it has not ended, or it ran in a process that died."""
    could_begin_at: datetime | None = None
    """Since when its first timeout could fire: after a failure the row has the time of the next attempt."""
    limit: float | None = None
    """How many seconds it may take, if that is not the limit of the handler."""
    obj: Any = None
    """The locked object of its first timeout, by which the log names it."""
    context: contextvars.Context | None = None
    """The context variables of the call, among them what `AROUND` has set; None: that setting is empty."""
    observers: Sequence[Observer] = ()
    """The context managers of `AROUND`."""

    def log(self, log: Callable[..., None], *args: Any, **options: Any) -> None:
        """Call a function of a logger in the context of the call, so that tracing adds what it knows of the call."""
        run = log if self.context is None else partial(self.context.run, log)
        run(*args, stacklevel=2, **options)

    def within(self, limit_seconds: float) -> float:
        """Return how many seconds it may take: its own limit, or else that of the handler."""
        return limit_seconds if self.limit is None else self.limit


@dataclass(slots=True)
class RunningWork:
    """A piece of work that a thread of this process runs now. What fires it passes this on."""

    work: Work
    using: str
    report: Any
    """A `ReportBuilder`: what is known of the timeouts of the work so far."""
    policy: Any = None
    """A `TimeoutPolicy`; None: it is not declared here."""
    began: float = field(default_factory=time.monotonic)
    checkpoint: str = "planned"
    call: Call | None = None
    """What may take only as long as the time limit; None: nothing that does is running."""
    committed: Any = None
    """The `ReportBuilder` of the transaction whose `on_commit` callbacks are running."""
    callbacks: deque[Callable[[], object]] = field(default_factory=deque)
    """Those of them that have not begun."""
    contexts: list[contextvars.Context] = field(default_factory=list)
    """The contexts of the calls in the present transaction, if `AROUND` names something."""
    awaited: Any = None
    """The awaitable that an async handler returned."""
    cancel: Callable[[], object] | None = None
    """Cancel it, from any thread."""
    thread_ids: set[int] = field(default_factory=set)
    """The threads that run the work: its own, and the one of the event loop."""
    gathered: Sequence[Candidate] = ()
    """With `batch_by`, the timeouts of the transaction that runs."""
    is_abandoned: bool = False
    logged_after: float = 0.0
    """After how many seconds it was last logged as slow or longer than a lease; 0: never."""
    has_begun: bool = False
    """Whether a handler was called."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def is_early(self) -> bool:
        """Whether the work may not begin yet."""
        return time.monotonic() < self.work.begin_at

    def wait(self, ahead: float = 0.0) -> None:
        """Sleep until the work may begin, or so many seconds before."""
        if (seconds := self.work.begin_at - ahead - time.monotonic()) > 0:
            time.sleep(seconds)

    def begin(self) -> bool:
        """Note that a handler is about to be called. Return False if it must not be: the work's slot is over."""
        self.has_begun = self.has_begun or time.monotonic() <= self.work.begin_by
        return self.has_begun

    @property
    def timeout_ids(self) -> tuple[int, ...]:
        """The timeouts of the handler call that is running; empty: none is."""
        return () if (call := self.call) is None else call.timeout_ids

    def enter(self, call: Call) -> Call | None:
        """Note that `call` runs; return the one around it, for `leave`."""
        outer, self.call = self.call, call
        return outer

    def leave(self, call: Call, outer: Call | None) -> None:
        """Note that `call` has ended. Raise Abandoned if it was abandoned."""
        call.took = time.monotonic() - call.began
        with self._lock:
            self.call = outer
            is_abandoned = self.is_abandoned
        if is_abandoned:
            raise Abandoned

    def abandon(self, limit_seconds: float, *, at_once: bool = False) -> Call | None:
        """Abandon the call if it has been running for too long, and return it. From then on it cannot end.

        Longer than `limit_seconds`, if it has no limit of its own.
        """
        with self._lock:
            call = self.call
            if call is None or not (at_once or time.monotonic() - call.began >= call.within(limit_seconds)):
                return None
            self.is_abandoned = True
            return call

    @contextmanager
    def run_by_this_thread(self) -> Iterator[None]:
        """Let `interrupt` reach this thread until the block ends. Its number may belong to another one afterwards."""
        thread = threading.get_ident()
        self.thread_ids.add(thread)
        try:
            yield
        finally:
            with self._lock:
                self.thread_ids.discard(thread)

    def interrupt(self, interrupt: Callable[[int], None]) -> None:
        """Call `interrupt` with the number of each thread that runs the work."""
        with self._lock:
            for thread in self.thread_ids:
                interrupt(thread)
