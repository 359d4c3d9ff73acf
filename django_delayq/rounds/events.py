"""What happens to a waiting or settled round: each event changes the columns of a row, in memory.

No event asks a database or a clock: what it depends on is given, or comes from `Facts`. The caller has locked the row,
and `ledger.paging.update_each` writes what was changed. What an attempt makes of a row is in `outcomes`.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from django_delayq.models import Timeout, new_idempotency_key
from django_delayq.policy.options import MAX_STORED
from django_delayq.policy.steps import HANDLER, Planned
from django_delayq.rounds import memory
from django_delayq.rounds.columns import ATTEMPTS, LEASE, NEW_ROUND, REPLACED, RUNNING_CLOCK, far, settled, waiting
from django_delayq.rounds.memory import clipped, record, record_death, stops_of, with_stop
from django_delayq.times.clock import shifted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from django_delayq.times.lengths import OwnTime

State, Cause = Timeout.State, Timeout.Cause


KEPT_COLUMNS: tuple[str, ...] = ("due_at", "first_due_at", "extensions", "created_at", "hold_ended_at", "own_key")
KEPT_COLUMNS += ("restarted_at", "terms", "computed_due_at", "is_guarded", "steps_over", "stops")
KEPT_COLUMNS += ("remaining", "keeps_deadline", "held_at", "held_until", "held_when", "settled_at")
KEPT_COLUMNS += ("step", *ATTEMPTS, "run_at", "ready_at", "payload", "asked_due_at", "is_due_by_request")
"""The columns of a cancelled row that `RoundMemory.of` takes; the idempotency key is None in another installation."""


class RoundMemory(NamedTuple):
    """What a round keeps when it is armed again. `due_at` is None if its policy decides the deadline."""

    due_at: datetime | None
    first_due_at: datetime
    extensions: int
    holds_counted_until: datetime
    """Holds that ended later have not moved its deadline: it was not pending when they moved the others."""
    key: str | None
    """Its idempotency key, by which a provider knows that it has seen an attempt; None: of another installation."""
    attempts: Mapping[str, Any]
    """The columns `ATTEMPTS` of its step, or of its handler."""
    waits_until: datetime | None
    """The end of a snooze, or the next retry; None: it did not wait for either."""
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
            "waits_until": cls._waits_until(row) if row["attempts"] or row["snoozes"] else None,
        }
        kept["holds_counted_until"] = row["hold_ended_at"] or row["created_at"]
        stopped_at = None if row["keeps_deadline"] or row["remaining"] is None else row["held_at"]
        ended_at = row["held_until"] if stopped_at and not row["held_when"] else None
        resumed_at = ended_at if ended_at is not None and ended_at <= row["settled_at"] else None
        return cls(**kept, key=row["own_key"], stopped_at=stopped_at, resumed_at=resumed_at)

    @staticmethod
    def _waits_until(row: Mapping[str, Any]) -> datetime | None:
        """Return until when a snooze or a retry was to wait; None: of a step that was paused it is not known."""
        if row["remaining"] is None:
            return row["run_at"]  # type: ignore[no-any-return]
        if row["keeps_deadline"]:
            return None if row["step"] else row["due_at"] + row["remaining"]
        return row["ready_at"]  # type: ignore[no-any-return]


class Facts(Protocol):
    """What an event needs to know of the policy of a row, and of its object."""

    using: str

    @property
    def now(self) -> datetime:
        """Return the time of the database."""

    def next_at(self, row: Timeout, due_at: datetime | None = None, **given: Any) -> Planned:
        """Return what is next of `row` if its deadline is `due_at`, by default its own, and when."""

    def opening(self, row: Timeout, at: datetime) -> datetime:
        """Return when its policy may act: at `at`, or at its next opening."""

    def final_at(self, row: Timeout) -> datetime:
        """Return when its handler acts on its deadline."""

    def time_of(self, row: Timeout) -> OwnTime:
        """Return the time in which its deadline counts."""

    def policy_hold(self, row: Timeout, until: datetime) -> tuple[datetime, datetime]:
        """Return begin and end of a hold of its policy which has not moved its deadline yet. Equal: there is none."""


def replace(row: Timeout, new: Timeout) -> None:
    """Begin in the waiting `row` the new round that `new` is."""
    vars(row).update({name: vars(new)[name] for name in REPLACED})


def restart(row: Timeout, since_at: datetime, due_at: datetime, terms: str, trace: str) -> None:
    """Begin a new round in the waiting `row`. `move` gives it its deadline, and `hold` stops its clock."""
    vars(row).update(NEW_ROUND, trace=trace)
    row.since_at, row.first_due_at, row.idempotency_key = since_at, due_at, new_idempotency_key()
    row.terms, row.computed_due_at = terms, due_at


def continue_round(row: Timeout, kept: RoundMemory, *, is_held: bool) -> None:
    """Continue in the new `row` a round that its condition has ended."""
    if kept.due_at is not None:
        row.terms, row.computed_due_at = kept.terms, kept.computed_due_at
    row.first_due_at, row.extensions = kept.first_due_at, kept.extensions
    row.idempotency_key = kept.key or row.idempotency_key
    row.restarted_at, row.payload = kept.restarted_at, kept.payload
    row.asked_due_at = None if kept.asked_due_at == row.due_at else kept.asked_due_at
    until, is_same = kept.waits_until or row.created_at, row.step == kept.step or is_held
    if is_same or until > row.created_at:  # else the step was passed
        run_at = max(row.run_at, until) if is_same else min(row.run_at, until)  # what follows a step does not wait
        values = {"step": kept.step, "steps_over": kept.steps_over, "ready_at": kept.waits_until, "run_at": run_at}
        vars(row).update(kept.attempts, **values)


def move(row: Timeout, due_at: datetime, attempt_at: datetime | None, facts: Facts, *, what: str, **event: Any) -> None:
    """Give the waiting `row` another deadline. A held one keeps waiting; the caller has set its clock.

    Args:
        row: with its former deadline.
        due_at: the new one.
        attempt_at: when to run it; None: when what is next of it is planned. `within=` may let it run later.
        facts: see `Facts`.
        what, **event: see `ledger.writing.move_rows`.
    """
    record(row, what, **{"from": row.due_at, "to": due_at, **event})
    if what == "recomputed":  # of the same round: `follow` has set what else changes
        row.asked_due_at = None if due_at == row.computed_due_at else row.computed_due_at
    else:
        _note_move(row, what, **event)
    if row.is_requested:
        change_step(row, HANDLER)
        run_at = attempt_at or due_at
    else:
        following = facts.next_at(row, due_at)
        is_other = change_step(row, following.name)
        run_at = following.at if is_other else max(attempt_at or following.at, following.at)
        run_at = facts.opening(row, run_at)
    is_held = row.state == State.HELD
    row.due_at, row.run_at = due_at, far() if is_held else run_at
    row.extensions = min(row.extensions + (what == "extended"), MAX_STORED)
    vars(row).update(LEASE)
    if not is_held or attempt_at is None:  # else a retry or a snooze waits until `ready_at`
        row.ready_at = event["at"]


def _note_move(row: Timeout, what: str, at: datetime, by: str = "", *, fixed: bool = False, **_: object) -> None:
    """Set what decisions depend on after a move of `row` by a decision; it still has its former deadline."""
    row.asked_due_at = None if by in memory.BY_APPLICATION else row.asked_due_at or row.due_at
    if what == "hold_ended":
        row.hold_ended_at = at
    elif what != "replanned":  # a move of all rows of a policy does not take a request back
        if by != "save":
            row.terms = row.computed_due_at = None
        row.is_requested = row.is_due_by_request = what == "fire_requested"
        # A duration counts from the former deadline, unless that had passed.
        counts_anew = fixed or (what in {"postponed", "deadline_changed"} and row.due_at < at)
        if counts_anew or what == "rescheduled":
            row.restarted_at = at


def change_step(row: Timeout, name: str) -> bool:
    """Let the step `name` be the next one of `row`, with attempts of its own; return whether it was another one."""
    if row.step == name:
        return False
    vars(row).update(ATTEMPTS, step=name)
    return True


def waits_longer(row: Timeout, facts: Facts) -> bool:
    """Return whether `row`, which is pending, waits for a retry or a snooze beyond when its next step is planned."""
    return bool(row.attempts or row.snoozes) and row.run_at > facts.next_at(row).at


def hold(row: Timeout, rest: timedelta, at: datetime, *, since: datetime | None = None, **event: Any) -> None:
    """Stop the clock of the waiting `row`, with the rest of its time; one that keeps its deadline is paused.

    Of a paused one the rest is how much later than its deadline its next attempt is. `rest`: see `stop`. `since`: by
    default what `stop` has set, or now.
    """
    details = {"what": "paused"} if row.keeps_deadline else {"what": "held", "rest": rest.total_seconds()}
    record(row, at=at, until=row.held_until, **details, **event)
    row.state, row.run_at, row.remaining, row.held_at = State.HELD.value, far(), rest, since or row.held_at or at
    vars(row).update(LEASE)


def stop(row: Timeout, at: datetime, facts: Facts) -> timedelta:
    """Set since when the clock of the pending `row` is stopped; return the rest of its time.

    That is since `at`, or since a hold of its policy began, which lasts. A hold that has ended, but has not moved its
    deadline yet, moves it now.
    """
    time, (stopped, ended) = facts.time_of(row), facts.policy_hold(row, at)
    row.ready_at = row.run_at if waits_longer(row, facts) else None
    if ended < at:
        row.asked_due_at = row.asked_due_at or row.due_at
        row.due_at = time.after_stop(row.due_at, stopped, ended)
        row.ready_at = row.ready_at and time.after_stop(row.ready_at, stopped, ended)
        row.stops, stopped = with_stop(row.stops, stopped, ended), at
    row.held_at = stopped
    return rest_of(row, time, row.due_at, facts)


def stop_new(row: Timeout, facts: Facts, *, is_computed: bool) -> timedelta:
    """Set since when the clock of `row`, which was scheduled just now, is stopped; return the rest of its time.

    `is_computed`: by `since` and `after` of its policy, so that the whole span is left. Otherwise it is the delay of
    the caller, from now on.
    """
    row.held_at = min(row.since_at, facts.now) if is_computed and row.since_at is not None else facts.now
    row.ready_at = None
    row.steps_over = ""  # those that it passed when it was scheduled are ahead when its clock runs
    return rest_of(row, facts.time_of(row), row.due_at, facts)


def stop_by_hand(row: Timeout, until: datetime | None, facts: Facts, *, keep_deadline: bool) -> timedelta:
    """Note in the pending or held `row` that an operator holds it; return the rest of its time.

    `keep_deadline`: it is paused, instead of its clock being stopped. A clock that is stopped already stays stopped,
    and what is paused already stays paused since then.
    """
    rest = row.remaining or timedelta(0)
    if not (row.has_stopped_clock or (row.is_paused and keep_deadline)):
        _end_pause(row, facts)
        longer = row.run_at - facts.next_at(row).at if waits_longer(row, facts) else timedelta(0)
        rest = longer if keep_deadline else stop(row, facts.now, facts)
        row.keeps_deadline = keep_deadline
    elif not row.held_by_hand:
        row.held_when = True
    row.held_by_hand, row.held_until = True, until
    return rest


def release_by_hand(row: Timeout, ended_at: datetime, facts: Facts, **event: Any) -> None:
    """Note in the held `row` that no operator holds it any more, but its condition; one that was paused is stopped."""
    record(row, "resumed", facts.now, **event)
    if row.is_paused:  # from then on its condition has stopped its clock
        _end_pause(row, facts)
        row.remaining, row.run_at, row.keeps_deadline = stop(row, ended_at, facts), far(), False
    row.held_by_hand, row.held_until, row.held_when = False, None, False


def note_hold_when(row: Timeout, *, holds: bool) -> None:
    """Note in `row`, which an operator holds, whether the condition of its policy holds beside that."""
    row.held_when = holds


def _end_pause(row: Timeout, facts: Facts) -> None:
    """Make of a paused row, in memory, one that waits for its next attempt."""
    if row.is_paused:
        row.run_at, row.held_at = facts.next_at(row).at + (row.remaining or timedelta(0)), None


def rest_of(row: Timeout, time: OwnTime, due_at: datetime, facts: Facts) -> timedelta:
    """Return the rest of the time of `row`, whose clock is stopped and whose deadline is `due_at`; at least nothing.

    An attempt that waits for a retry or a snooze counts to it. Negative, in real time, if the deadline had passed, but
    not the grace of its policy.
    """
    begin, waits = row.held_at or due_at, waits_until(row)
    end = due_at if waits is None or row.step else shifted(waits, row.due_at - facts.final_at(row))
    if end >= begin:
        return time.elapsed(begin, end)
    return end - begin if time.has_grace else timedelta(0)


def waits_until(row: Timeout) -> datetime | None:
    """Return until when a retry or a snooze of `row`, whose clock is stopped, was to wait; None: it was not."""
    return row.ready_at if row.ready_at and row.held_at and row.ready_at > row.held_at else None


def resume(row: Timeout, counts_from: datetime, facts: Facts, **event: Any) -> None:
    """Let the clock of the held `row` run, from `counts_from` on.

    One that has kept its deadline keeps the time of its next attempt, too, unless it has passed. Others wait until
    `ready_at` for a retry or a snooze.
    """
    due_at, waits = row.due_at, None
    if not row.keeps_deadline:
        time, stopped_at, waits = facts.time_of(row), row.held_at or counts_from, waits_until(row)
        due_at = time.after_stop(row.due_at, stopped_at, counts_from)
        waits = waits and time.after_stop(waits, stopped_at, counts_from)
        row.stops = with_stop(row.stops, stopped_at, counts_from)
        row.asked_due_at, row.restarted_at = row.asked_due_at or row.due_at, counts_from
    record(row, "resumed", **{"from": row.due_at, "to": due_at, **event})
    following = facts.next_at(row, due_at)
    is_other, run_at = change_step(row, following.name), following.at
    if row.keeps_deadline:
        run_at = max(run_at + (row.remaining or timedelta(0)), counts_from)
    elif not is_other:
        run_at = max(run_at, waits or run_at)
    vars(row).update(RUNNING_CLOCK | LEASE, due_at=due_at, ready_at=counts_from, run_at=facts.opening(row, run_at))


def pass_hold(row: Timeout, begin: datetime, end: datetime, facts: Facts, *, at: datetime) -> datetime:
    """Note, `at` now, that a hold of its policy stopped the clock of the pending or paused `row`; return its deadline.

    `move` sets that. If it stays, it is noted nevertheless: in another calendar it might move. An attempt that waits,
    or that was asked for, waits as much longer. Raises what `OwnTime.after_stop` raises.
    """
    time = facts.time_of(row)
    due_at = time.after_stop(row.due_at, begin, end)
    if not row.is_paused and (waits_longer(row, facts) or row.is_requested):
        row.run_at = time.after_stop(row.run_at, begin, end)
    row.stops = with_stop(row.stops, begin, end)
    if due_at == row.due_at and row.stops:
        row.hold_ended_at = at
    return due_at


def shift(row: Timeout, by: timedelta, facts: Facts) -> datetime:
    """Prepare `row` for a move `by` a duration, as that of its policy has changed; return its deadline after that."""
    due_at, computed = shifted(row.due_at, by), row.computed_due_at and shifted(row.computed_due_at, by)
    retarget(row, due_at, facts, is_given=False)
    row.computed_due_at = computed
    return due_at


def retarget(row: Timeout, due_at: datetime, facts: Facts, *, is_given: bool) -> None:
    """Set the clock of `row`, if it is stopped, before its deadline is moved to `due_at`.

    `is_given`: only a stop from now on moves that. Else it is the former deadline and a duration, and the time for
    which the clock was stopped moves it, too.
    """
    if not row.has_stopped_clock:
        return
    if is_given:
        row.stops, row.held_at = with_stop(row.stops, row.held_at or facts.now, facts.now), facts.now
    row.remaining = rest_of(row, facts.time_of(row), due_at, facts)


class Plan(NamedTuple):
    """A waiting round as its policy computes it again."""

    due_at: datetime
    rest: timedelta | None
    """The rest of its time; None: it is pending."""
    computed: datetime
    """The deadline before holds moved it."""
    terms: str

    def is_of(self, row: Timeout) -> bool:
        """Return whether `row` is so already."""
        return self == (row.due_at, row.remaining, row.computed_due_at, row.terms)


def plan_of(row: Timeout, computed: datetime, terms: str, time: OwnTime, facts: Facts) -> Plan:
    """Return `row`, pending or held, with the deadline that its policy computes for it now.

    What has stopped its clock in this round moves it, measured in its present time: the same facts in another order
    lead to the same deadline. `computed`, `terms`: the deadline, and with what values it is computed, which counts in
    `time`.
    """
    due_at = time.after_stops(computed, stops_of(row.stops))
    rest = rest_of(row, time, due_at, facts) if row.has_stopped_clock else row.remaining
    return Plan(due_at, rest, computed, terms)


def follow(row: Timeout, plan: Plan) -> None:
    """Set what `row` has of `plan` beside the deadline, before it is moved to that."""
    if not row.is_computed:  # the deadline counts from `since` again, and no caller has asked for another one
        row.restarted_at, row.is_requested, row.is_due_by_request = None, False, False
    row.remaining, row.terms = plan.rest, plan.terms
    row.computed_due_at = plan.computed
    # Never earlier: a row is pruned after its first deadline. Else it would be armed again if the value changed back.
    row.first_due_at = max(row.first_due_at, plan.computed)


def cancel(row: Timeout, at: datetime, cause: Timeout.Cause, reason: str) -> None:
    """End the waiting or dead `row`."""
    vars(row).update(settled(State.CANCELLED, cause, at), reason=clipped(reason))


def forbid_attempts(row: Timeout, at: datetime, by: str, reason: str) -> None:
    """Give the firing `row` no further attempt if this one fails."""
    record(row, "cancel_requested", at, by=by, reason=reason)
    row.final_attempt = True


def retry(row: Timeout, at: datetime, **event: Any) -> None:
    """Make the dead `row` pending and due now, with all its attempts."""
    record_death(row, at)
    record(row, "retried", at, to=at, **event)
    values = {**waiting(at), "cause": "", "settled_at": None, "reason": "", "final_attempt": False, **ATTEMPTS}
    vars(row).update(values, restarted_at=at, is_requested=True)


def erase(row: Timeout, at: datetime, **event: Any) -> None:
    """Empty what the settled `row` has of a person. Its slot stays as it is."""
    row.history = memory.without_data(row)
    record(row, "erased", at, **event)
    vars(row).update(payload=None, reason="", share="", erased_at=at, key=row.key and memory.ERASED_KEY)
