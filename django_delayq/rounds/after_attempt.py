"""What the outcome of an attempt makes of its row: which columns it gets, and which events its history.

Pure: nothing here reads or writes. `firing/settling.py` reads the facts before, and writes the values.
"""

from __future__ import annotations

import copy
import hashlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from django_delayq.conf import get_settings
from django_delayq.models import Timeout
from django_delayq.policy.outcomes import Fired, GiveUp, Skip, Snooze
from django_delayq.policy.steps import DEAD, RAN, SKIPPED, Ended, Planned
from django_delayq.rounds.columns import ATTEMPTS, RUNNING_CLOCK, settled, waiting
from django_delayq.rounds.memory import DIED, clipped, with_events
from django_delayq.times.clock import plural

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime, timedelta

    from django_delayq.policy.policies import TimeoutPolicy

State, Cause = Timeout.State, Timeout.Cause
Values: TypeAlias = dict[str, Any]

MAX_DEATHS: Final = 3
"""One process, or two, may have been killed by a deployment, or by the system for lack of memory."""


class WorkerDied(Exception):
    """The process that ran this attempt died, or was cut off for longer than its lease."""


class TransientFailure(Exception):
    """A transient database error while an `atomic=False` handler ran: retry soon, count no attempt."""

    def __init__(self, why: str, wait: timedelta) -> None:
        super().__init__(why)
        self.wait = wait


class AttemptFacts(NamedTuple):
    """What was read before about a row and about the outcome of its attempt."""

    until: datetime | None = None
    """The end of a snooze."""
    failure: Mapping[str, str] = {}
    """What the history keeps of an exception that is not an outcome."""
    then: Planned | None = None
    """What follows the step of the row, when it may run; None: no step has been tried."""
    over: str = ""
    """The steps that are over then."""
    planned_at: datetime | None = None
    """When the attempt was to run, if its row is firing: that has the end of the lease."""


class Change(NamedTuple):
    """What an outcome makes of a row."""

    values: Values
    """Its columns."""
    error: BaseException | None = None
    """To be logged, and sent as a failure."""
    said: tuple[Values, ...] = ()
    """The new events of its history."""
    ended: Ended | None = None
    """How a step of the row has ended, so that what follows it is next; None: none has."""


def values_of(
    policy: TimeoutPolicy[Any] | None, row: Timeout, outcome: Fired | BaseException, now: datetime, facts: AttemptFacts
) -> Change:
    """Return what the outcome of an attempt makes of its row.

    Args:
        policy: None: it is not declared here any more, and the default retries apply.
        row: pending, or held since the attempt; firing, outside a transaction; or as its transaction has marked it.
        outcome: what the handler, or the step, has returned or raised. `WorkerDied`: its process has died.
        now: the time by the database clock.
        facts: see `AttemptFacts`.
    """
    change = _of_attempt(policy, row, outcome, now, facts)
    if facts.then is not None:
        change = _of_step(row, change, facts)
    if row.state == State.FIRING:
        change = _of_firing(row, change, now)
    if change.said:
        change.values["history"] = with_events(row, change.said, now)
    return change


def _of_attempt(
    policy: TimeoutPolicy[Any] | None, row: Timeout, outcome: Fired | BaseException, now: datetime, facts: AttemptFacts
) -> Change:
    attempt = row.attempts + row.is_waiting
    if isinstance(outcome, Fired):
        given = {"reason": clipped(outcome.reason)} if outcome.reason else {}
        if row.state == State.FIRED:  # its transaction has marked it
            return Change(given)
        running = RUNNING_CLOCK if row.state == State.HELD else {}  # its clock was stopped meanwhile
        values = {**running, **settled(State.FIRED, Cause.DUE, now), **given}
        return Change({**values, "run_at": facts.planned_at, "attempts": attempt})
    if isinstance(outcome, WorkerDied):
        return _died(row, now)
    if isinstance(outcome, TransientFailure):
        return Change({**waiting(now + outcome.wait), "attempts": attempt - 1})
    if isinstance(outcome, Skip | GiveUp):
        is_dead = isinstance(outcome, GiveUp)
        values = settled(State.DEAD if is_dead else State.SKIPPED, Cause.HANDLER, now)
        return Change({**values, "reason": clipped(outcome.reason), "attempts": attempt}, outcome if is_dead else None)
    if isinstance(outcome, Snooze) and facts.until is not None:
        most = policy.limits.snoozes if policy and policy.limits else None
        return _snoozed(row, outcome, now, facts.until, most)
    delay = ((policy.retry if policy else None) or get_settings().retry).delay_after(attempt)
    run_at = None if delay is None else now + delay
    failed = {"first_failed_at": row.first_failed_at or now, "last_failed_at": now, "attempts": attempt}
    said = {"what": "failed", "attempt": attempt, "to": run_at, "step": row.step, **facts.failure}
    if run_at is not None:
        return Change({**waiting(run_at), **failed}, outcome, (said,))
    reason = clipped(f"{facts.failure.get('error')}: {facts.failure.get('message')}")
    return Change({**settled(State.DEAD, Cause.RETRIES, now), "reason": reason, **failed}, outcome, (said,))


def _snoozed(row: Timeout, outcome: Snooze, now: datetime, until: datetime, most: int | None) -> Change:
    number, attempt = row.snoozes + 1, row.attempts + row.is_waiting
    if most is not None and number > most:
        why = f": {outcome.reason}" if outcome.reason else "."
        words = f"It snoozed {plural(number, 'time')}, and its policy allows {most}{why}"
        values = {**settled(State.DEAD, Cause.LIMIT, now), "reason": clipped(words), "attempts": attempt}
        return Change(values, GiveUp(words))
    values = {**waiting(until), "ready_at": until, "attempts": attempt - 1, "snoozes": number, "is_requested": False}
    said = {"what": "snoozed", "reason": outcome.reason, "to": until, "number": number, "step": row.step}
    return Change(values, said=(said,))


def _died(row: Timeout, now: datetime) -> Change:
    """Return what it means for a row that its process has died: pending again as a suspect, or dead.

    Beside others it is suspected only: any of them may be the cause. No attempt is counted, as the handler has not
    failed.
    """
    deaths = row.deaths + (row.suspected_at is not None)
    values = {"attempts": row.attempts - (row.state == State.FIRING), "deaths": deaths, "suspected_at": now}
    said = ({"what": "suspected", "number": deaths},)
    if deaths < MAX_DEATHS:  # the claim is that of this worker, which tries it now
        claim = {"claims": row.claims, "claimed_until": row.claimed_until}
        return Change({**waiting(now), **values, **claim}, said=said)
    return Change({**values, **settled(State.DEAD, Cause.RETRIES, now), "reason": DIED}, WorkerDied(DIED), said)


def _of_step(row: Timeout, change: Change, facts: AttemptFacts) -> Change:
    """Return what a change means for a row whose step was tried: what would settle it ends the step only.

    A retry and a snooze do not delay what follows: when that is due, the step that still waits is passed.
    """
    values, then = change.values, facts.then
    assert then is not None
    if values["state"] == State.PENDING:
        return change._replace(values={**values, "run_at": min(values["run_at"], then.at)})
    what = {State.FIRED: RAN, State.DEAD: DEAD}.get(values["state"], SKIPPED)
    after = after_step(row, Ended(what, row.step, values.get("reason", "")), facts)
    return after._replace(error=change.error, said=(*change.said, *after.said))


def after_step(row: Timeout, ended: Ended, facts: AttemptFacts) -> Change:
    """Return what it makes of a row that its step has `ended`: what follows is next, with attempts of its own."""
    then = facts.then
    assert then is not None
    again = {} if row.state == State.HELD else waiting(then.at)  # its clock was stopped meanwhile
    said = {"what": ended.what, "step": ended.name, "reason": ended.reason}
    return Change({**again, **ATTEMPTS, "step": then.name, "steps_over": facts.over}, said=(said,), ended=ended)


def _of_firing(row: Timeout, change: Change, now: datetime) -> Change:
    """Adapt a change to a row whose handler ran outside a transaction, while others could change it.

    A cancel meanwhile was promised that there is no further attempt.
    """
    if row.final_attempt and change.values["state"] not in (State.FIRED, State.SKIPPED):
        return _overtaken(row, change, now, State.CANCELLED, Cause.HAND)
    if change.values["state"] == State.PENDING:
        return change
    return change._replace(values={"run_at": _ended_at(row, now), **change.values})


def as_given(row: Timeout, attempts: int) -> Timeout:
    """Return `row` as its step gets it: as it is now, with the number of the attempt and a key of the step.

    The key follows from those of the round and of the step: all attempts of a step have the same one, also after its
    condition has ended the round for a while.
    """
    given, text = copy.copy(row), f"{row.idempotency_key}\0{row.step}"
    given.attempts, given.idempotency_key = attempts, hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return given


def before_attempt(given: Timeout) -> Timeout:
    """Return the row of a step, which got it as `given`, as it was before the attempt was counted."""
    before = copy.copy(given)
    before.attempts -= 1
    return before


def superseded(row: Timeout, change: Change, now: datetime) -> Change:
    """Adapt a change by which a row would take its slot again: a newer round replaces it, even if that has ended."""
    return _overtaken(row, change, now, State.SKIPPED, Cause.SUPERSEDED)


def _overtaken(row: Timeout, change: Change, now: datetime, state: Timeout.State, cause: Timeout.Cause) -> Change:
    kept = {name: value for name, value in change.values.items() if name in ("attempts", "history")}
    ended = {**settled(state, cause, now), **kept, "reason": "", "run_at": _ended_at(row, now)}
    return change._replace(values=ended)  # its reason is its cause


def _ended_at(row: Timeout, now: datetime) -> datetime:
    """Return the `run_at` of a row that no attempt follows: not the end of the lease."""
    return min(row.run_at, now)
