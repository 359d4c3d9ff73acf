"""Steps: what a policy does before its handler acts, and when. Only times: nothing here reads the ledger.

The *plan* of a round has these times for its deadline, in order. It is computed again when the deadline moves, and only
as far as it is read: a step may repeat each second for years. The names of steps that are *over* (they ran, are dead,
or were passed) are one string, such as "friendly firm:2": of a step that repeats, the highest number. So a step runs at
most once in a round, whatever order another deadline has.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from heapq import merge
from itertools import takewhile
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from django_delayq.exceptions import PolicyError
from django_delayq.policy.options import misfit
from django_delayq.times import lengths
from django_delayq.times.lengths import OwnTime, delay_text, length_text
from django_delayq.times.paths import column_at
from django_delayq.times.spans import Length

Handler = TypeVar("Handler", bound=Callable[..., object])
HANDLER: Final = ""
"""The name of the last entry of each plan: the handler of the policy."""
RAN, SKIPPED, DEAD, PASSED, LATE, SHADOWED = (
    "step", "step_skipped", "step_dead", "steps_passed", "step_late", "step_shadowed",
)  # fmt: skip
"""The events in the history of a row by which its steps end."""
MAX_STEPS: Final = 20
"""The names of the steps that are over must fit into a column of the ledger."""
MAX_NAME: Final = 50
"""See `MAX_STEPS`."""
LEAST_EVERY: Final = timedelta(seconds=1)
"""More often would be a loop, whose repetitions a worker passes because the next one is due already."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of a policy: `handler(obj, timeout)` runs at `offset` from the deadline, perhaps repeatedly.

    `TimeoutPolicy.step` documents the attributes.
    """

    name: str
    handler: Callable[..., Any]
    offset: Length | float
    every: Length | None = None
    times: int | None = None
    atomic: bool = True

    def __str__(self) -> str:
        """Return when it runs, such as `3 d before the deadline`."""
        at = self.offset
        when = f"at {at:.0%} of the time" if isinstance(at, float) else delay_text(at, "the deadline")
        if self.every is None:
            return when
        return f"{when}, every {length_text(self.every)}, {f'{self.times} times' if self.times else 'until it acts'}"


class Planned(NamedTuple):
    """An entry of a plan."""

    at: datetime
    name: str
    """The name of the step, with its number if it repeats: "firm:2"; `HANDLER`: the handler of the policy."""


class Course(NamedTuple):
    """What the plan of a round depends on, beside its policy."""

    due_at: datetime
    start: datetime
    """What fractions count from; if it is not before the deadline, they end at the deadline."""
    obj: Any = None
    """An object, or None unless one of the spans needs it."""
    over: str = ""
    """The steps that are over. They are left out."""
    now: datetime | None = None
    """Of a step that repeats, only the newest `MAX_STEPS` times until then are needed."""
    stops: Sequence[tuple[datetime, datetime]] = ()
    """When its clock was stopped, the oldest first, which fractions do not count."""
    time: OwnTime = OwnTime(None)
    """In which fractions count."""

    def used(self, time: OwnTime, until: datetime) -> timedelta:
        """Return how much of `time` the round has had `until` then, without what its clock was stopped for."""
        stops = (time.elapsed(begin, min(end, until)) for begin, end in self.stops if begin < until)
        return time.elapsed(self.start, until) - sum(stops, timedelta(0))

    @property
    def total(self) -> tuple[OwnTime, timedelta]:
        """Return the time in which the round counts, and how much of it the round has until its deadline.

        Real time if its own time has no open hour until then. Nothing if it begins at its deadline or later.
        """
        for time in (self.time, OwnTime(None)):
            if (total := self.used(time, self.due_at)) > timedelta(0):
                return time, total
        return time, timedelta(0)


def declared(label: str, handler: Any, given: dict[str, Any], others: Sequence[Step], grace: Length | None) -> Step:
    """Return the step of `given`, the arguments of `TimeoutPolicy.step`. Raises PolicyError."""
    name = given["name"] or getattr(handler, "__name__", "")
    spans = {option: lengths.as_span(given[option]) for option in ("offset", "every")}
    step = Step(**{**given, **spans, "name": name, "handler": handler})
    for wrong, message in (*_faults(step, others), *_faults_of_times(step, grace)):
        if wrong:
            raise PolicyError(f"Step {name!r} of {label}: {message}")
    return step


def _faults(step: Step, others: Sequence[Step]) -> Iterator[tuple[bool, str]]:
    yield not callable(step.handler), f"@policy.step(...) decorates a function, not {step.handler!r}."
    wrong = misfit(step.handler, ("obj", "timeout"))
    yield bool(wrong), f"the function {wrong}"
    is_name = isinstance(step.name, str) and _NAME.match(step.name) is not None and len(step.name) <= MAX_NAME
    words = f"a name has letters, digits, _ and - only, no digit first, and at most {MAX_NAME} characters; give name=."
    yield not is_name, words
    yield step.name in {each.name for each in others}, "another step has this name; give name=."
    yield len(others) >= MAX_STEPS, f"a policy has at most {MAX_STEPS} steps."
    yield not isinstance(step.atomic, bool), f"atomic must be True or False, not {step.atomic!r}."


def _faults_of_times(step: Step, grace: Length | None) -> Iterator[tuple[bool, str]]:
    offset, every, times = step.offset, step.every, step.times
    is_fraction = isinstance(offset, float) and 0 < offset < 1
    is_length = isinstance(offset, timedelta) or lengths.is_span(offset)
    words = "a timedelta or span from the deadline (negative: before it), or a fraction of the time such as 0.75"
    yield not is_fraction and not is_length, f"its offset must be {words}, not {offset!r}."
    is_length = every is None or (isinstance(every, timedelta) and every >= LEAST_EVERY) or lengths.is_span(every)
    yield not is_length, f"every must be a timedelta of a second or more, or a span, not {every!r}."
    yield times is not None and every is None, "times needs every=, the time between two of them."
    is_count = isinstance(times, int) and not isinstance(times, bool) and times >= 1
    yield times is not None and not is_count, f"times must be an int from 1 on, not {times!r}."
    if isinstance(offset, timedelta) and (grace is None or isinstance(grace, timedelta)):
        end = "its deadline, as it has no grace=" if grace is None else f"{length_text(grace)} after its deadline"
        words = f"it would never run: the handler of its policy acts at {end}."
        yield offset >= (grace or timedelta(0)), words


def plan_of(steps: Iterable[Step], acts_at: datetime, course: Course) -> Iterator[Planned]:
    """Yield when those steps of a round that are not over, and at last its handler, run.

    Steps that would run when the handler acts, or later, are left out. Of those of one time, the one that is declared
    first is first. Raises InvalidDelay, and what spans raise.

    Args:
        steps: in order of declaration.
        acts_at: when the handler acts.
        course: of the round.
    """
    yield from merge(*(_times(step, acts_at, course) for step in steps), key=attrgetter("at"))
    yield Planned(acts_at, HANDLER)


def _times(step: Step, acts_at: datetime, course: Course) -> Iterator[Planned]:
    at, over, number = _first(step, course), _numbers(course.over).get(step.name, 0), 1
    if step.every and at and (over or course.now) and (every := lengths.steady(step.every, at, course.obj)):
        newest = OwnTime(step.every, course.obj).elapsed(at, min(course.now or at, acts_at)) // every
        number = max(min(newest, step.times or newest) - MAX_STEPS, over + 1)
        at = at if number == 1 else lengths.end_of(lengths.resized(step.every, every * (number - 1)), at, course.obj)
    while at is not None and at < acts_at and number <= (step.times or number):
        if number > over:
            yield Planned(at, f"{step.name}:{number}" if step.every else step.name)
        following = lengths.end_of(step.every, at, course.obj) if step.every else None
        at, number = None if following is None or following <= at else following, number + 1


def _first(step: Step, course: Course) -> datetime | None:
    """Return when `step` runs first: at a fraction, when the round has used so much of its time."""
    if not isinstance(step.offset, float):
        return lengths.end_of(step.offset, course.due_at, course.obj)
    time, total = course.total
    at = time.forward(course.start, total * step.offset)
    for begin, end in course.stops:
        at = time.after_stop(at, begin, end) if at > begin else at
    return at if total else course.due_at


def newest_due(plan: Iterator[Planned], now: datetime) -> tuple[list[str], Planned]:
    """Return the newest entry that is due, and before it the names of those that were missed for it.

    If none is due, it is the next one.
    """
    due = [next(plan), *takewhile(lambda each: each.at <= now, plan)]
    return [each.name for each in due[:-1]], due[-1]


def passed_before(now: datetime, plan: Iterable[Planned], over: str) -> str:
    """Return what is over in a round that is armed at `now`: steps before that are passed."""
    return with_over(over, [each.name for each in takewhile(lambda each: each.at < now and each.name, plan)])


def with_over(over: str, names: Iterable[str]) -> str:
    """Return the text `over` with the steps `names` added."""
    numbers = _numbers(over)
    for name in names:
        base, number = _split(name)
        numbers[base] = max(numbers.get(base, 0), number)
    return " ".join(base if number == 1 else f"{base}:{number}" for base, number in numbers.items())


def step_of(steps: Iterable[Step], name: str) -> Step | None:
    """Return the declared step of the entry `name`; None: the handler, or a step that is not declared any more."""
    return next((step for step in steps if step.name == _split(name)[0]), None)


def _numbers(over: str) -> dict[str, int]:
    return dict(map(_split, over.split()))


def _split(name: str) -> tuple[str, int]:
    base, _, number = name.partition(":")
    return base, int(number or 1)


class Ended(NamedTuple):
    """How a step of a row has ended, for the log."""

    what: str
    """The event, such as `RAN`."""
    name: str
    reason: str = ""


class HasPlan:
    """What a policy does besides acting at its deadline. The part of `TimeoutPolicy` about its steps and its grace."""

    if TYPE_CHECKING:
        label: Any
        batch: int | None
        together: int | None
        atomic: bool
        grace: Length | None
        after: Any
        model: Any
        needs_object: Any
        own_time: Any
        steps: tuple[Step, ...]

    def step(
        self,
        offset: Length | float,
        *,
        every: Length | None = None,
        times: int | None = None,
        atomic: bool = True,
        name: str | None = None,
    ) -> Callable[[Handler], Handler]:
        """Declare a step: a function of `(obj, timeout)` that runs before the handler, in the same round.

        Use it as a decorator right below the policy. A step has the guarantees of a firing: the condition is checked
        on the locked object, and its work and the move to the next step commit together.

        Args:
            offset: when it runs: a timedelta or span from the deadline, negative before it; or a fraction, such as
                0.75, of the time from `since` to the deadline, or without `since` from when it was scheduled. It is of
                open time if `after` counts that of a calendar.
            every: repeat it: the time from one to the next, a timedelta or span.
            times: how often it runs; with `every` and without `times`, until the handler acts.
            atomic: False: it runs outside a transaction, at least once, for slow external effects.
            name: unique in the policy; the function's name by default.

        Returns:
            A decorator, which returns the function as it is.

        Raises:
            PolicyError: the declaration is wrong, or the policy was used before.
        """
        given = {"offset": offset, "every": every, "times": times, "atomic": atomic, "name": name}

        def declare(handler: Handler) -> Handler:
            if self.batch or self.together:
                raise PolicyError(f"{self.label} has batch or together, and steps are called for one object alone.")
            if "has_plan" in vars(self):
                raise PolicyError(f"{self.label} was used before its step {name or handler!r}: declare it right below.")
            step = declared(self.label, handler, given, self.steps, self.grace)
            object.__setattr__(self, "steps", (*self.steps, step))
            return handler

        return declare

    @functools.cached_property
    def has_fractions(self) -> bool:
        """Return whether one of its steps runs at a fraction of the time."""
        return any(isinstance(step.offset, float) for step in self.steps)

    @functools.cached_property
    def plan_needs_object(self) -> bool:
        """Return whether the plan of a round depends on its object."""
        given = [self.grace, *(length for step in self.steps for length in (step.offset, step.every))]
        # A column has durations, which count in real time.
        is_real = isinstance(self.after, str) and column_at(self.model, self.after) is not None
        of_time = self.has_fractions and self.needs_object and not is_real
        of_spans = any(lengths.needs_object(each) for each in given if each and not isinstance(each, float))
        return of_time or of_spans

    def plan_is_unknown(self, obj: Any) -> bool:
        """Return whether the plan depends on an object, and there is none."""
        return obj is None and self.plan_needs_object

    @property
    def runs_outside(self) -> bool:
        """Return whether its handler, or one of its steps, runs outside a transaction."""
        return not self.atomic or not all(step.atomic for step in self.steps)

    def acts_at(self, due_at: datetime, obj: Any) -> datetime:
        """Return when the handler acts on a deadline: at the end of the grace.

        Without `obj`, if it matters, at the deadline: the object does not exist any more.
        """
        grace = None if self.grace is None or self.plan_is_unknown(obj) else lengths.end_of(self.grace, due_at, obj)
        return due_at if grace is None else max(grace, due_at)

    def plan(self, course: Course) -> Iterator[Planned]:
        """Yield when the steps of a round that are not over, and at last its handler, run: see `steps.plan_of`."""
        steps = () if self.plan_is_unknown(course.obj) else self.steps
        if self.has_fractions:
            course = course._replace(time=self.own_time(course.obj))
        return plan_of(steps, self.acts_at(course.due_at, course.obj), course)
