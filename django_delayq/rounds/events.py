"""What happens to a waiting or settled round: each event changes the columns of a row, in memory.

No event asks a database or a clock: what it depends on is given, or comes from `Facts`. The caller has locked the row,
and `ledger.paging.update_each` writes what was changed. What an attempt makes of a row is in `outcomes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from django_delayq.models import Timeout, new_idempotency_key
from django_delayq.policy.options import MAX_STORED
from django_delayq.policy.steps import HANDLER
from django_delayq.rounds.columns import ATTEMPTS, LEASE, RUNNING_CLOCK, far, settled, waiting
from django_delayq.rounds.memory import (
    BY_APPLICATION,
    ERASED_KEY,
    clipped,
    record,
    record_death,
    with_stop,
    without_data,
)

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from django_delayq.policy.steps import Planned

State, Cause = Timeout.State, Timeout.Cause


class Facts(Protocol):
    """What an event needs to know of the policy of a row."""

    def next_at(self, row: Timeout, due_at: datetime, /) -> Planned:
        """Return what is next of `row` if its deadline is `due_at`, and when."""

    def opening(self, row: Timeout, at: datetime, /) -> datetime:
        """Return when its policy may act: at `at`, or at its next opening."""


def restart(row: Timeout, since_at: datetime, due_at: datetime, trace: str) -> None:
    """Begin a new round in the waiting `row`, whose `terms` are set. `move` gives it its deadline then."""
    vars(row).update(RUNNING_CLOCK | ATTEMPTS, stops=None, hold_ended_at=None, extensions=0, steps_over="", trace=trace)
    row.since_at, row.first_due_at, row.idempotency_key = since_at, due_at, new_idempotency_key()
    row.computed_due_at = None if row.terms is None else due_at


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
    """Set what decisions depend on after a move of `row`, whose `due_at` is still the former one."""
    if what == "recomputed":  # of the same round: the caller has set what else changes
        return
    row.asked_due_at = None if by in BY_APPLICATION else row.asked_due_at or row.due_at
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


def hold(row: Timeout, rest: timedelta, at: datetime, **event: Any) -> None:
    """Stop the clock of the waiting `row`, with the rest of its time; one that keeps its deadline is paused.

    Of a paused one the rest is how much later than its deadline its next attempt is.
    """
    details = {"what": "paused"} if row.keeps_deadline else {"what": "held", "rest": rest.total_seconds()}
    record(row, at=at, until=row.held_until, **details, **event)
    row.state, row.run_at, row.remaining, row.held_at = State.HELD.value, far(), rest, row.held_at or at
    vars(row).update(LEASE)


def resume(row: Timeout, counts_from: datetime, due_at: datetime, facts: Facts, **event: Any) -> None:
    """Let the clock of the held `row` run, with the deadline `due_at`, from `counts_from` on.

    One that has kept its deadline keeps the time of its next attempt, too, unless it has passed. Others wait until
    `ready_at` for a retry or a snooze.
    """
    record(row, "resumed", **{"from": row.due_at, "to": due_at, **event})
    if not row.keeps_deadline:
        row.stops = with_stop(row.stops, row.held_at or counts_from, counts_from)
    following = facts.next_at(row, due_at)
    is_other, run_at = change_step(row, following.name), following.at
    if row.keeps_deadline:
        run_at = max(run_at + row.remaining if row.remaining else run_at, counts_from)
    else:
        row.asked_due_at, row.restarted_at = row.asked_due_at or row.due_at, counts_from
        run_at = run_at if is_other else max(run_at, row.ready_at or run_at)
    vars(row).update(RUNNING_CLOCK | LEASE, due_at=due_at, ready_at=counts_from, run_at=facts.opening(row, run_at))


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
    vars(row).update(values, retried_at=at, restarted_at=at, is_requested=True)


def erase(row: Timeout, at: datetime, **event: Any) -> None:
    """Empty what the settled `row` has of a person. Its slot stays as it is."""
    row.history = without_data(row)
    record(row, "erased", at, **event)
    vars(row).update(payload=None, reason="", share="", erased_at=at, key=row.key and ERASED_KEY)
