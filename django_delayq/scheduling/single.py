"""Schedule, cancel, reschedule and extend by hand: the row now, in the caller's transaction; Redis on commit.

Each verb locks the business row first and the timeout row second, as firing does, so that exactly one of
"it happened in time" and "it fired" wins. Outside a transaction a verb opens its own. Whatever is raised is
raised before anything is written, and the caller's transaction stays usable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from asgiref.sync import sync_to_async

from django_delayq import clock
from django_delayq.delays import check_length, parse_delay, shifted
from django_delayq.exceptions import ExtensionLimit, InvalidDelay, TimeoutConflict
from django_delayq.ledger import writing
from django_delayq.ledger.announcing import announce, push, withdraw
from django_delayq.ledger.controls import read_delay
from django_delayq.ledger.locking import lock_object, transaction_of
from django_delayq.ledger.subjects import subject_of
from django_delayq.models import Timeout
from django_delayq.scheduling.payloads import check_payload
from django_delayq.signals import timeout_cancelled, timeout_rescheduled, timeout_scheduled

if TYPE_CHECKING:
    from datetime import datetime, timedelta
    from typing import Unpack

    from django.db.models import Model

    from django_delayq.delays import Delay, DelayArgs, Span
    from django_delayq.ledger.subjects import Subject
    from django_delayq.policies import M, TimeoutPolicy

OnConflict = Literal["replace", "keep", "error"]
State, Cause = Timeout.State, Timeout.Cause


def schedule_timeout(
    obj: M,
    policy: str | TimeoutPolicy[M],
    *,
    key: str = "",
    payload: Any = None,
    on_conflict: OnConflict = "replace",
    reason: str = "",
    **delay: Unpack[DelayArgs],
) -> Timeout:
    """`policy` has one pending timeout for `obj` (and `key`) once the transaction commits; returns its row.

    Args:
        obj: a saved object of the policy's model, a proxy or a child of it.
        policy: a name, a label or the policy itself.
        key: tells several pending timeouts of one policy and object apart; at most 200 characters.
        payload: JSON for the handler, as `timeout.payload`.
        on_conflict: what happens to one that is pending already. `"replace"` begins its round anew with this
            deadline and payload, but keeps `first_due_at` and `extensions`; `"keep"` returns it unchanged; `"error"`
            raises `TimeoutConflict`.
        reason: kept with the row, for people.
        **delay: units, summed, from now (`minutes=30`), or `after=timedelta`, or `at=datetime` (in the past:
            due now). Without one the policy's own `since` and `after` decide.

    Raises:
        UnknownPolicy, InvalidDelay, InvalidPayload, TimeoutConflict: as they say; nothing is written.
        ValueError: `obj` is not saved or gone, or the key is too long.
        TypeError: `obj` is a `Timeout`, which exists already, or no policy is given.
    """
    if isinstance(obj, Timeout):
        raise TypeError(
            "schedule_timeout() takes an object and a policy, not a Timeout: that one is scheduled already. To move "
            "it, use reschedule_timeout() or extend_timeout()."
        )
    subject = subject_of(obj, policy, key)
    given = parse_delay(dict(delay))
    body = check_payload(payload)
    if on_conflict not in ("replace", "keep", "error"):
        raise ValueError(f'on_conflict is "replace", "keep" or "error", not {on_conflict!r}.')
    with transaction_of(subject.using):
        fresh = _locked_object(subject)
        present = writing.lock_newest(subject.pending(), subject.using)
        if present is not None and on_conflict == "error":
            raise TimeoutConflict(f"{subject} is pending already, due at {present.due_at}.", present)
        if present is not None and on_conflict == "keep":
            return present
        since_at, due_at = round_of(subject, fresh, given, delay_for(subject, given))
        new = writing.new_row(subject, due_at, since_at, payload=body, reason=reason)
        if present is not None and present.slot != subject.slot:
            present = writing.adopt(subject)
        if present is None:
            writing.insert([new], subject.using, replace=True)
            push([new], subject.using, earlier_only=True)
            announce(timeout_scheduled, new, subject.using)
            return new
        writing.replace(present, new)
        push([present], subject.using)
        announce(timeout_rescheduled, present, subject.using)
        return present


def cancel_timeout(obj: M, policy: str | TimeoutPolicy[M] | None = None, *, key: str = "", reason: str = "") -> bool:
    """True: it will not happen. False: too late, the newest round has fired or is firing.

    May be called again, and when nothing is pending. Cancels a dead timeout too, so that nobody revives it.
    While one is firing it answers False and forbids further attempts. `obj` may be a `Timeout` itself.

    Raises:
        UnknownPolicy: no such policy.
        ValueError: `obj` is not saved.
    """
    subject = subject_of(obj, policy, key)
    with transaction_of(subject.using):
        if subject.model is not None:
            lock_object(subject.model, subject.pk, subject.using)
        return cancel_newest(subject, reason=reason).in_time


class Cancelling(NamedTuple):
    """What came of an attempt to cancel: in time or not, the newest round, and whether this call cancelled it."""

    in_time: bool
    row: Timeout | None = None
    won: bool = False


def cancel_newest(subject: Subject, *, reason: str = "") -> Cancelling:
    """The newest round of `subject`, unless it has fired or is firing, is cancelled by hand.

    Inside a transaction that has locked the business row.
    """
    row = writing.lock_newest(subject.rounds(), subject.using)
    if row is None:
        return Cancelling(in_time=True)
    if row.state in (State.FIRED, State.FIRING):
        if row.state == State.FIRING:
            writing.forbid_attempts(row, reason)
        return Cancelling(in_time=False, row=row)
    if row.state == State.DEAD:
        writing.bury(row, reason)
    elif row.state != State.PENDING or not writing.cancel([row.pk], subject.using, Cause.HAND, reason):
        return Cancelling(in_time=True, row=row)
    row.refresh_from_db(using=subject.using)
    withdraw([(row.queue, row.pk)], subject.using)
    announce(timeout_cancelled, row, subject.using)
    return Cancelling(in_time=True, row=row, won=True)


def reschedule_timeout(
    obj: M,
    policy: str | TimeoutPolicy[M] | None = None,
    *,
    key: str = "",
    reason: str = "",
    **delay: Unpack[DelayArgs],
) -> Timeout | None:
    """The pending timeout is due when `delay` says, counted from now; returns its row. None: nothing is pending.

    Raises:
        InvalidDelay: no delay, or a wrong one.
        UnknownPolicy, ValueError: as for `schedule_timeout`.
    """
    given = parse_delay(dict(delay))
    if given is None:
        raise InvalidDelay("To when? Give units, after= or at=.")
    subject = subject_of(obj, policy, key)
    with transaction_of(subject.using):
        row = _locked_pending(subject)
        if row is None:
            return None
        writing.move(row, given.due_from(clock.now()), what="rescheduled", by="hand", reason=reason)
        return _moved(row, subject)


def extend_timeout(
    obj: M,
    policy: str | TimeoutPolicy[M] | None = None,
    *,
    key: str = "",
    reason: str = "",
    **span: Unpack[Span],
) -> Timeout | None:
    """The deadline of the pending timeout lies later by `span`; returns its row. None: nothing is pending.

    Raises:
        ExtensionLimit: the policy's `max_extensions` is used up.
        InvalidDelay, UnknownPolicy, ValueError: as for `schedule_timeout`.
    """
    by = parse_span(dict(span))
    subject = subject_of(obj, policy, key)
    with transaction_of(subject.using):
        row = _locked_pending(subject)
        if row is None:
            return None
        if not may_extend(row, subject.policy):
            raise ExtensionLimit(f"{subject} has been extended {row.extensions} times, which is the limit.", row)
        due_at = shifted(row.due_at, check_length(by.after, "after"))
        writing.move(row, due_at, what="extended", by="hand", reason=reason, extended=True)
        return _moved(row, subject)


def parse_span(span: dict[str, Any]) -> Delay:
    """A length of time; InvalidDelay for none, or for a moment."""
    by = parse_delay(span)
    if by is None or by.after is None:
        raise InvalidDelay("By how much? Give units or after=.")
    return by


def may_extend(row: Timeout, policy: TimeoutPolicy[Any] | None) -> bool:
    """Whether `max_extensions` leaves one for `row`."""
    limit = policy.max_extensions if policy else None
    return limit is None or row.extensions < limit


def _locked_object(subject: Subject) -> Model:
    fresh = lock_object(cast("type[Model]", subject.model), subject.pk, subject.using)
    if fresh is None:
        raise ValueError(f"{subject}: the object is not in the database (any more).")
    return fresh


def _locked_pending(subject: Subject) -> Timeout | None:
    if subject.model is not None:
        lock_object(subject.model, subject.pk, subject.using)
    return writing.lock_newest(subject.pending(), subject.using)


def _moved(row: Timeout, subject: Subject) -> Timeout:
    push([row], subject.using)
    announce(timeout_rescheduled, row, subject.using)
    return row


def delay_for(subject: Subject, given: Delay | None) -> timedelta | None:
    """The delay that an operator has put in the place of the policy's, where it matters."""
    policy = cast("TimeoutPolicy[Any]", subject.policy)
    return None if given is not None or policy.after is None else read_delay(policy, subject.using)


def round_of(
    subject: Subject, fresh: Model, given: Delay | None, in_force: timedelta | None = None
) -> tuple[datetime | None, datetime]:
    """From when the round counts and when it is due; a delay given by hand wins over the policy's."""
    policy = cast("TimeoutPolicy[Any]", subject.policy)
    since_at = policy.since_of(fresh)
    if given is not None:
        return since_at, given.due_from(clock.now())
    counts_from = since_at if policy.since is not None else clock.now()
    due_at = policy.due_of(fresh, counts_from, in_force)
    if due_at is None:
        raise InvalidDelay(
            f"{subject} has no deadline of its own: its policy names no after, exempts this object, or its since is "
            "empty. Give a delay, such as minutes=30."
        )
    return since_at, due_at


async def aschedule_timeout(
    obj: M,
    policy: str | TimeoutPolicy[M],
    *,
    key: str = "",
    payload: Any = None,
    on_conflict: OnConflict = "replace",
    reason: str = "",
    **delay: Unpack[DelayArgs],
) -> Timeout:
    """`schedule_timeout` for async code."""
    return await sync_to_async(schedule_timeout)(
        obj, policy, key=key, payload=payload, on_conflict=on_conflict, reason=reason, **delay
    )


async def acancel_timeout(
    obj: M, policy: str | TimeoutPolicy[M] | None = None, *, key: str = "", reason: str = ""
) -> bool:
    """`cancel_timeout` for async code."""
    return await sync_to_async(cancel_timeout)(obj, policy, key=key, reason=reason)


async def areschedule_timeout(
    obj: M,
    policy: str | TimeoutPolicy[M] | None = None,
    *,
    key: str = "",
    reason: str = "",
    **delay: Unpack[DelayArgs],
) -> Timeout | None:
    """`reschedule_timeout` for async code."""
    return await sync_to_async(reschedule_timeout)(obj, policy, key=key, reason=reason, **delay)


async def aextend_timeout(
    obj: M,
    policy: str | TimeoutPolicy[M] | None = None,
    *,
    key: str = "",
    reason: str = "",
    **span: Unpack[Span],
) -> Timeout | None:
    """`extend_timeout` for async code."""
    return await sync_to_async(extend_timeout)(obj, policy, key=key, reason=reason, **span)
