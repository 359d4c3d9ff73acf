"""Test support: move the clock, fire due timeouts inline, and assert what is scheduled.

Needs no Redis, no worker and no sleeping. pytest's fixture `timeouts` offers the same functions.
"""

from __future__ import annotations

import sys
import traceback
import unittest
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Unpack

from django.db.models import Model, QuerySet
from django.dispatch import Signal

from django_delayq.arming.holding import end_holds_by_hand
from django_delayq.conf import get_settings
from django_delayq.firing import Report, Work, run, settle_expired
from django_delayq.firing.planning import rows_of, works_of
from django_delayq.firing.state import firing_state
from django_delayq.ledger.controls import policy_states, stop_cache
from django_delayq.ledger.subjects import Subject, subject_of
from django_delayq.models import WAITING, Timeout, TimeoutQuerySet
from django_delayq.operations.timeouts import fire_now
from django_delayq.policy.outcomes import Outcome
from django_delayq.policy.policies import M, TimeoutPolicy, registry
from django_delayq.rounds.after_attempt import TransientFailure, WorkerDied
from django_delayq.scheduling.queries import pending_timeouts
from django_delayq.scheduling.single import parse_span, schedule_timeout
from django_delayq.scheduling.story import story_of
from django_delayq.signals import timeout_dead, timeout_failed, timeout_fired, timeout_skipped
from django_delayq.sql.statements import compiled, padded, params
from django_delayq.times import clock
from django_delayq.times.lengths import Duration, added
from django_delayq.worker.lines import Lines

__all__ = [
    "Fired",
    "Timeouts",
    "assert_cancelled",
    "assert_fired",
    "assert_not_scheduled",
    "assert_scheduled",
    "fire_due",
    "perform",
    "travel",
    "travel_to",
]

State = Timeout.State
__tracebackhide__ = True
"""pytest shows the line of the test that calls a function of this module, and not the lines of this module."""


class Journey(AbstractContextManager[datetime]):
    """Sets the clock of the library: until the `with` block ends, or else until the test ends."""

    def __init__(self, moment: datetime) -> None:
        self._moment, self._setting, self._has_begun = moment, ExitStack(), False
        if (call_at_the_end := _end_of_test()) is not None:
            self.__enter__()
            call_at_the_end(self._setting.close)

    def __enter__(self) -> datetime:
        if not self._has_begun:
            self._has_begun = True
            self._setting.enter_context(clock.set_to(self._moment))
        return self._moment

    def __exit__(self, *error: object) -> None:
        self._setting.close()

    def __del__(self) -> None:
        if not self._has_begun:
            warnings.warn(
                "The clock was not moved: outside of a test that unittest or the pytest plugin delayq runs, use "
                "travel() and travel_to() in a with statement.",
                RuntimeWarning,
                stacklevel=2,
            )


def travel(**span: Unpack[Duration]) -> Journey:
    """Move the clock of the library by `minutes=31`, or other units or `after=timedelta`, and stop it there.

    In a `with` statement until the block ends, else until the test ends. It applies to scheduling and firing in all
    threads of this process, on every database. It does not change `timezone.now()`; `django_delayq.clock.now()` is the
    time to which it moves.

    Raises:
        InvalidDelay: no duration, or a negative one: to go back, use `travel_to`.
    """
    return Journey(added(parse_span(dict(span)), clock.now()))


def travel_to(moment: datetime) -> Journey:
    """Move the clock of the library to `moment` and stop it there, as `travel` does.

    Raises:
        TypeError: `moment` is not a datetime.
        ValueError: its awareness does not fit `USE_TZ`.
    """
    return Journey(moment)


def _end_of_test() -> Callable[[Callable[[], None]], object] | None:
    """Return a function that registers a callback for the end of the running test; None: no test is running.

    A unittest is found as `self` of a function that is running, as `cls` in `setUpTestData`: it has no hook that could
    be used without a base class.
    """
    for name, add in (("self", "addCleanup"), ("cls", "addClassCleanup")):
        for frame, _line in traceback.walk_stack(sys._getframe(1)):
            found = frame.f_locals.get(name)
            if issubclass(found if isinstance(found, type) else type(found), unittest.TestCase):
                return getattr(found, add)  # type: ignore[no-any-return]
    plugin = sys.modules.get("django_delayq.pytest_plugin")
    return None if plugin is None or plugin.end_of_test is None else plugin.end_of_test.callback


class Fired(int):
    """How many timeouts fired: those whose handler returned. The lists contain the rows as the firing left them."""

    fired: list[Timeout]
    skipped: list[Timeout]
    """Their condition did not hold, their object was gone, or the handler or a guard rail skipped them."""
    failed: list[Timeout]
    """Of these an attempt failed and a retry followed, which may have been due immediately."""
    dead: list[Timeout]
    """They have no retry left, or their handler gave up."""
    stopped: list[str]
    """The labels of policies that are paused, also by their brake, or on hold: due timeouts of them stay pending."""

    def __new__(cls, signals: Sequence[tuple[Signal, Timeout]] = (), stopped: Sequence[str] = ()) -> Fired:
        """Return how many of `signals` are `timeout_fired`."""
        kinds = (timeout_fired, timeout_skipped, timeout_failed, timeout_dead)
        rows = [list({row.pk: row for sent, row in signals if sent is kind}.values()) for kind in kinds]
        self = super().__new__(cls, len(rows[0]))
        self.fired, self.skipped, self.failed, self.dead = rows
        self.stopped = list(stopped)
        return self

    def __repr__(self) -> str:
        names = ("fired", "skipped", "failed", "dead")
        stopped = f"; stopped: {', '.join(self.stopped)}" if self.stopped else ""
        return f"<{', '.join(f'{len(getattr(self, name))} {name}' for name in names)}{stopped}>"


def fire_due(
    policy: str | TimeoutPolicy[M] | None = None,
    obj: M | type[M] | QuerySet[M] | Timeout | None = None,
    *,
    raises: bool = True,
    limit: int | None = None,
    using: str = "default",
) -> Fired:
    """Fire everything due in this thread, in due order; return how many handlers returned, and the rows.

    This includes what a firing makes due, also a retry that follows at once. What cannot be fired now (its object is
    locked, its policy is stopped or not declared) is tried once. Rates do not apply.

    Args:
        policy: only this policy: itself, its label, or with `obj` its name.
        obj: only timeouts of this object, or of the objects of this model or queryset; or this timeout.
        raises: raise what a handler raises, unless it is an outcome such as `Skip`. The failed attempt is recorded
            first, as in production; later timeouts do not fire. False: only record.
        limit: fire no more than this many.
        using: the database, if neither `policy` nor `obj` is given.

    Raises:
        UnknownPolicy: no such policy.
        Exception: what a handler raised.
    """
    target: Any = obj
    chosen = None if policy is None and obj is None else pending_timeouts(target, policy)
    using = using if chosen is None else chosen.db
    stop_cache.forget()  # it may have the guard rails of the test before, which were rolled back
    firing_state.forget_policies()  # a brake would count the firings of that test
    settle_expired(using)
    end_holds_by_hand(using)
    fired, signals = 0, list[tuple[Any, Timeout]]()
    stuck: dict[int, str] = {}
    while limit is None or fired < limit:
        work = _next_work(chosen, using, stuck, None if limit is None else limit - fired)
        if work is None:
            break
        if obj is not None or limit is not None:
            work = replace(work, only=True)
        report = run(work, using)
        signals += report.signals
        fired += len(report.fired)
        if raises:
            _raise_failure(report)
        # A row that is still pending without another attempt would be tried again and again. Not those of a failed
        # batch for which `run` had no time: they can be fired now.
        again = {row.pk for sent, row in report.signals if sent is timeout_failed}
        # Nor those that have passed a step that was missed.
        again |= {*report.untried, *report.stepped} & {
            timeout_id for timeout_id, at in report.again.items() if report.now and at <= report.now
        }
        stuck |= dict.fromkeys({*work.ids}.difference(report.done, again), work.policy)
    left_by = {policy.label for label in stuck.values() if (policy := registry.get(label))}
    stopped = policy_states(using) if left_by else []
    return Fired(signals, [state.label for state in stopped if state.is_stopped and state.label in left_by])


def _next_work(chosen: TimeoutQuerySet | None, using: str, stuck: Collection[int], limit: int | None) -> Work | None:
    """Return the first due timeout, of `chosen` if given, and those that a new worker would fire together with it."""
    excluded = padded(stuck)

    def due(size: int, labels: tuple[str, ...] | None) -> Sequence[Sequence[Any]]:
        if chosen is None:
            return _due.rows(using, len(excluded), size, labels, id=excluded)
        return list(_first_due(chosen, stuck, size, labels))

    first = due(1, None)
    if not first:
        return None
    label, queue, object_id, timeout_id = first[0]
    policy = registry.get(label)
    if policy is None or policy.transaction_size == 1:
        return Work(label, (timeout_id,), (object_id,), queue)
    size = Lines(using, get_settings().concurrency, 0.0).size(policy)
    ids = [row_id for *_, row_id in due(size if limit is None else min(size, limit), policy.labels)]
    rows = [row for row in rows_of(ids, using) if row.queue == queue]
    [work] = [each for each in works_of(policy.label, rows, dict.fromkeys(ids, 1)) if timeout_id in each.ids]
    return replace(work, suspect=False, alone=work.suspect)


@compiled
def _due(using: str, excluded: int, size: int, labels: tuple[str, ...] | None) -> QuerySet[Timeout, Any]:
    rows = Timeout.objects.using(using).order_by("run_at", "id")
    return _first_due(rows, params("id", excluded), size, labels)


def _first_due(rows: Any, excluded: Any, size: int, labels: tuple[str, ...] | None) -> QuerySet[Timeout, Any]:
    rows = rows.due().exclude(pk__in=excluded)
    rows = rows if labels is None else rows.of_labels(labels)
    return rows.values_list("policy", "queue", "object_id", "id")[:size]  # type: ignore[no-any-return]


def _raise_failure(report: Report) -> None:
    """Raise what the first failed handler raised, without the frames of this library, and note what was recorded."""
    about = {row.pk: f", {row.policy} of {row.object_id}," for _, row in report.signals}
    for timeout_id, error in report.errors.items():
        if isinstance(error, Outcome | WorkerDied | TransientFailure):
            continue
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith("django_delayq."):
            frames = frames.tb_next
        recorded = f"This attempt of timeout {timeout_id}{about.get(timeout_id, '')} is recorded as in production."
        error.add_note(f"{recorded} With fire_due(raises=False) the test can examine it.")
        raise error.with_traceback(frames)


def perform(
    policy: str | TimeoutPolicy[M], obj: M, payload: Any = None, at: datetime | None = None, *, key: str = ""
) -> Timeout:
    """Run the handler of `policy` for `obj` once as a worker would, and return the timeout as that left it.

    Schedules a timeout that is due, in place of a pending one, and fires it: the object is locked and read again, the
    condition is checked, and the handler runs in its transaction. Steps do not run, and no grace is waited for.

    Args:
        policy: the policy, its label or its name.
        obj: a saved object.
        payload: JSON for the handler, as `timeout.payload`.
        at: the time at which it is due and runs; None: now.
        key: the key of the timeout.

    Raises:
        UnknownPolicy, InvalidPayload, ValueError: as for `schedule_timeout`.
        Exception: what the handler raised.
    """
    with clock.set_to(clock.now() if at is None else at):
        row = schedule_timeout(obj, policy, key=key, payload=payload, at=clock.now())
        declared = registry.get(row.policy)
        if declared is not None and declared.has_plan:  # the handler, not a step, and without grace
            fire_now(row, by="perform")
        fire_due(obj=row)
    row.refresh_from_db()
    return row


def assert_scheduled(
    obj: M, policy: str | TimeoutPolicy[M], *, due: datetime | timedelta | None = None, key: str = ""
) -> Timeout:
    """Check that a timeout is pending and return it; `due`: at this datetime, or so long from now, to the second.

    Raises:
        AssertionError: it is not. The message contains the pending timeouts of the object and the story of this one.
    """
    subject = subject_of(obj, policy, key)
    row = subject.pending().first()
    if row is None:
        raise AssertionError(_failure(subject, obj, "is not scheduled"))
    if due is not None:
        wanted, tolerance = (clock.now() + due, 1) if isinstance(due, timedelta) else (due, 0)
        if abs(row.due_at - wanted) > timedelta(seconds=tolerance):
            later = f"{abs(row.due_at - wanted)} {'later' if row.due_at > wanted else 'earlier'}"
            words = f"is due at {_local(row.due_at)}, {later} than {_local(wanted)}"
            raise AssertionError(_failure(subject, obj, words))
    return row


def assert_not_scheduled(obj: M, policy: str | TimeoutPolicy[M], *, key: str = "") -> None:
    """Check that no timeout is pending. Raises AssertionError with the story of the timeout."""
    subject = subject_of(obj, policy, key)
    if (row := subject.pending().first()) is not None:
        raise AssertionError(_failure(subject, obj, f"is scheduled, due at {_local(row.due_at)}"))


def assert_fired(obj: M, policy: str | TimeoutPolicy[M], *, key: str = "") -> Timeout:
    """Check that the newest timeout that is not pending fired; return it. Raises AssertionError with its story."""
    subject = subject_of(obj, policy, key)
    row = subject.rounds().exclude(state__in=WAITING).first() or subject.pending().first()
    return _in_state(State.FIRED, row, subject, obj, "fire")


def assert_cancelled(obj: M, policy: str | TimeoutPolicy[M], *, key: str = "") -> Timeout:
    """Check that the newest timeout was cancelled; return it. Raises AssertionError with its story."""
    subject = subject_of(obj, policy, key)
    return _in_state(State.CANCELLED, subject.rounds().first(), subject, obj, "get cancelled")


def _in_state(state: State, row: Timeout | None, subject: Subject, obj: Model, expected: str) -> Timeout:
    """Return `row` if it is in `state`; otherwise raise AssertionError."""
    if row is None or row.state != state:
        instead = "was never scheduled" if row is None else f"is {row.state}"
        raise AssertionError(_failure(subject, obj, f"did not {expected}: it {instead}"))
    return row


def _failure(subject: Subject, obj: Model, words: str) -> str:
    """Return the message of a failed assertion: `words`, the pending timeouts of `obj`, and the story."""
    rows = pending_timeouts(obj)
    pending = [f"  {row.policy}{f' ({row.key})' if row.key else ''} due at {_local(row.due_at)}" for row in rows]
    lines = [f"{subject} {words}.", f"Pending for {obj!r}:", *(pending or ["  nothing"]), str(story_of(subject))]
    return "\n".join(lines)


def _local(moment: datetime) -> str:
    return f"{clock.local(moment):%Y-%m-%d %H:%M:%S}"


class Timeouts:
    """All functions of this module, as the fixture `timeouts` of pytest."""

    travel = staticmethod(travel)
    travel_to = staticmethod(travel_to)
    fire_due = staticmethod(fire_due)
    perform = staticmethod(perform)
    assert_scheduled = staticmethod(assert_scheduled)
    assert_not_scheduled = staticmethod(assert_not_scheduled)
    assert_fired = staticmethod(assert_fired)
    assert_cancelled = staticmethod(assert_cancelled)
