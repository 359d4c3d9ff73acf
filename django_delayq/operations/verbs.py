"""Cancel, fire now, postpone, retry: on one timeout or on many, whatever became of their objects and policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.utils.translation import gettext as _

from django_delayq import clock, signals
from django_delayq.delays import check_length, parse_delay, shifted
from django_delayq.exceptions import InvalidDelay
from django_delayq.ledger import writing
from django_delayq.ledger.history import record, record_death
from django_delayq.ledger.settling import slot_is_taken
from django_delayq.models import Timeout, slot_of
from django_delayq.operations.actors import checked_actor
from django_delayq.operations.pages import Around, steer
from django_delayq.operations.results import Refusal, Steered
from django_delayq.policies import registry

if TYPE_CHECKING:
    from datetime import datetime
    from typing import Unpack

    from django_delayq.delays import Delay, DelayArgs
    from django_delayq.operations.pages import Progress, Target

State = Timeout.State


def cancel(
    target: Target, *, by: str, reason: str = "", dry_run: bool = False, progress: Progress | None = None
) -> Steered:
    """What was pending or dead is cancelled by hand; what is firing gets no further attempt.

    Args:
        target: a `Timeout`, a queryset or an iterable of them; each page of 500 is one transaction, or part of the
            caller's.
        by: who does it, such as `admin:alice`; kept in the history of each row, with `reason`.
        reason: for people.
        dry_run: nothing is written, only counted.
        progress: called with the result of each page, after its commit.

    Raises:
        ValueError: `by` is empty.
        TypeError: `target` is something else.
    """
    return steer(target, _Cancel(), by=checked_actor(by), reason=reason, dry_run=dry_run, progress=progress)


def fire_now(
    target: Target, *, by: str, reason: str = "", dry_run: bool = False, progress: Progress | None = None
) -> Steered:
    """What was pending is due now, and a worker fires it as always: under its locks, and only if `when` holds.

    A deadline that was yet to come is now; one that has passed stays what it was. Nothing fires in this process. The
    timeouts of a policy that is paused or held are refused: whoever stopped it meant these too.

    Takes and raises the same as `cancel`.
    """
    return steer(target, _FireNow(), by=checked_actor(by), reason=reason, dry_run=dry_run, progress=progress)


def postpone(
    target: Target,
    *,
    by: str,
    reason: str = "",
    dry_run: bool = False,
    progress: Progress | None = None,
    **delay: Unpack[DelayArgs],
) -> Steered:
    """What was pending has a later deadline: later by units or `after=`, or `at=` a moment.

    By a length: counted from the deadline, or from now if that has passed. An operator is not bound by
    `max_extensions`, and uses none of them up. A retry or a snooze that waits for longer goes on waiting. Never
    earlier: that would be another verb with another permission.

    Takes and raises the same as `cancel`, and

    Raises:
        InvalidDelay: none, a wrong one, or a moment that has passed.
    """
    given = parse_delay(dict(delay))
    if given is None:
        raise InvalidDelay(_("By how much, or to when? Give units, after= or at=."))
    if given.at is not None and given.at <= clock.now():
        words = _("{moment} has passed already. To have it fire now is another verb: fire_now.")
        raise InvalidDelay(words.format(moment=given.at))
    verb = _Postpone(given)
    return steer(target, verb, by=checked_actor(by), reason=reason, dry_run=dry_run, progress=progress)


def retry(
    target: Target, *, by: str, reason: str = "", dry_run: bool = False, progress: Progress | None = None
) -> Steered:
    """What was dead is pending again and due now, all its attempts before it; a worker fires it as always.

    It stays the same round: the same deadline and the same `idempotency_key`, so that an effect which an earlier
    attempt had outside the database is not doubled. Refused where the object is gone, where the policy is not
    declared any more, and where a newer round is pending.

    Takes and raises the same as `cancel`.
    """
    return steer(target, _Retry(), by=checked_actor(by), reason=reason, dry_run=dry_run, progress=progress)


def _not_pending(row: Timeout) -> Refusal | None:
    if row.state == State.PENDING:
        return None
    return {State.FIRING: Refusal.FIRING, State.DEAD: Refusal.DEAD}.get(State(row.state), Refusal.SETTLED)


class _Cancel:
    name = "cancel"
    signal = signals.timeout_cancelled

    def refusal(self, row: Timeout, around: Around) -> Refusal | None:
        why = _not_pending(row)
        return None if why is Refusal.DEAD else why

    def write(self, rows: list[Timeout], refused: list[Timeout], around: Around) -> None:
        for row in rows:
            record_death(row, around.now)
            record(row, "cancel_requested", **around.said)
        for row in refused:
            if row.state == State.FIRING:
                writing.forbid_attempts(row, around.reason, by=around.by)
        writing.cancel_rows(rows, around.using, around.reason, around.now)


class _FireNow:
    name = "fire_now"
    signal = signals.timeout_rescheduled

    def refusal(self, row: Timeout, around: Around) -> Refusal | None:
        policy = registry.get(row.policy)
        stopped = policy is not None and policy.label in around.stopped
        unable = Refusal.POLICY_STOPPED if stopped else None if policy else Refusal.POLICY_UNKNOWN
        return _not_pending(row) or unable

    def write(self, rows: list[Timeout], refused: list[Timeout], around: Around) -> None:
        moves = [(row, min(row.due_at, around.now), around.now) for row in rows]
        writing.move_rows(moves, around.using, what="fire_requested", to=around.now, **around.said)


@dataclass(frozen=True, slots=True)
class _Postpone:
    given: Delay
    name: str = "postpone"
    signal: Any = signals.timeout_rescheduled

    def refusal(self, row: Timeout, around: Around) -> Refusal | None:
        why = _not_pending(row)
        if why is not None:
            return why
        try:
            return None if self._due(row, around.now) > row.due_at else Refusal.NOT_LATER
        except InvalidDelay:
            return Refusal.TOO_FAR

    def write(self, rows: list[Timeout], refused: list[Timeout], around: Around) -> None:
        deadlines = [(row, self._due(row, around.now)) for row in rows]
        moves = [(row, due_at, writing.run_at_of(row, due_at)) for row, due_at in deadlines]
        writing.move_rows(moves, around.using, what="postponed", **around.said)

    def _due(self, row: Timeout, now: datetime) -> datetime:
        if self.given.at is not None:
            return self.given.at
        return shifted(max(row.due_at, now), check_length(self.given.after, "after"))


class _Retry:
    name = "retry"
    signal = signals.timeout_scheduled

    def refusal(self, row: Timeout, around: Around) -> Refusal | None:
        policy = registry.get(row.policy)
        if row.state != State.DEAD:
            return Refusal.NOT_DEAD
        if policy is None:
            return Refusal.POLICY_UNKNOWN
        if around.page.object_of(row) is None:
            return Refusal.OBJECT_GONE
        slots = {slot_of(label, row.content_type_id, row.object_id, row.key) for label in policy.labels}
        if slots & around.slots or slot_is_taken(row, policy.labels, around.using):
            return Refusal.SLOT_TAKEN
        around.slots |= slots
        return None

    def write(self, rows: list[Timeout], refused: list[Timeout], around: Around) -> None:
        for row in rows:
            record_death(row, around.now)
            record(row, "retried", to=around.now, **around.said)
        writing.revive(rows, around.using, around.now)
