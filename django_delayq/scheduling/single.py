"""The verbs for one timeout: the row at once, in the caller's transaction; Redis on commit.

Each function locks the business row first and the timeout row second, as firing does, so that exactly one of "it
happened in time" and "it fired" wins: in one statement where that is possible, otherwise in a transaction, which it
opens if there is none. Errors are raised before anything is written, and the caller's transaction stays usable.
"""

from __future__ import annotations

import logging
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast, get_args

from asgiref.sync import sync_to_async
from django.db.models import Model, Q
from django.utils.translation import gettext as _

from django_delayq.arming import holding
from django_delayq.arming.changes import Failures
from django_delayq.arming.holding import Facts
from django_delayq.arming.reconcile import arm_outdated
from django_delayq.arming.row_state import CLOSING, condition_holds, objects_of_policy, terms_of
from django_delayq.exceptions import InvalidDelay
from django_delayq.ledger import writing
from django_delayq.ledger.controls import read_delay
from django_delayq.ledger.error_texts import shown
from django_delayq.ledger.locking import read_committed, transaction_of
from django_delayq.ledger.outbox import announce
from django_delayq.ledger.subjects import Subject, lock_newest, lock_subject, place_of, subject_at, subject_of
from django_delayq.models import WAITING, Timeout
from django_delayq.policy.terms import CONSTANT, reads_again
from django_delayq.rounds import events
from django_delayq.rounds.memory import record_death
from django_delayq.scheduling.errors import ExtensionLimit, TimeoutConflict
from django_delayq.scheduling.payloads import check_payload
from django_delayq.signals import timeout_cancelled, timeout_rescheduled, timeout_scheduled
from django_delayq.sql.statements import chunks
from django_delayq.times import clock
from django_delayq.times.lengths import Delay, DelayArgs, Duration, added, end_of, length_text, parse_delay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from django_delayq.policy.policies import M, TimeoutPolicy
    from django_delayq.times.spans import Length

logger = logging.getLogger("django_delayq")

OnConflict = Literal["replace", "keep", "error", "once"]
Moved = Literal["rescheduled", "extended"]
State = Timeout.State


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
    """Schedule `policy` for `obj` (and `key`); return its row, the only pending one after the commit.

    Args:
        obj: a saved object of the policy's model, a proxy or a child of it.
        policy: a name, a label or the policy itself.
        key: distinguishes several pending timeouts of one policy and object; at most 200 characters.
        payload: JSON for the handler, as `timeout.payload`.
        on_conflict: what happens to a timeout that is pending already. `"replace"` begins its round again with this
            deadline and payload, but keeps `first_due_at` and `extensions`; `"keep"` returns it unchanged; `"error"`
            raises `TimeoutConflict`; `"once"` is `"replace"`, unless the timeout has fired for this deadline already,
            or is firing for it: then that row is returned, and one that is pending for another deadline is cancelled.
            It needs `at=`, or a policy with `since` and no delay: then a round of the same `since` counts.
        reason: kept with the row, for operators.
        **delay: units, summed, from now (`minutes=30`), or `after=`, a timedelta or span, or `at=datetime` (in the
            past: due now). By default the policy's own `since` and `after` decide.

    Raises:
        UnknownPolicy, InvalidDelay, InvalidPayload, TimeoutConflict, ExtensionLimit: nothing is written.
        ValueError: `obj` is not saved or does not exist any more, or the key is too long.
        TypeError: `obj` is a `Timeout`, which exists already, or no policy is given.
    """
    resolved, using, pk = place_of(obj, policy)
    subject = subject_at(resolved, pk, key, using)
    given = parse_delay(dict(delay))
    values: dict[str, Any] = {"payload": None if payload is None else check_payload(payload), "reason": reason}
    check_conflict(on_conflict, given, resolved)
    # A deadline that depends neither on the object nor on a pending timeout needs one statement, or two.
    in_steps = on_conflict == "once" or resolved.hold_when is not None or not writing.writes_at_once(subject)
    due_at = None if in_steps else _due_at(subject, given)
    if due_at is None:
        return _put_in_steps(subject, given, on_conflict, **values)
    new = writing.new_row(subject, due_at, None, terms=CONSTANT if given is None else None, **values)
    if writing.insert_if_free(new, using, resolved, subject.pk):
        return _announced(new, new, using)
    if on_conflict == "replace" and resolved.total is None and resolved.since is None:
        row = writing.replace_at_once(new, subject)
        if row is not None:
            return _announced(row, new, using)
    return _put_in_steps(subject, given, on_conflict, **values)


def _announced(row: Timeout, new: Timeout, using: str) -> Timeout:
    """Send the signal of a row that was inserted as `new`, or got its values; return the row."""
    announce(timeout_scheduled if row is new else timeout_rescheduled, row, using)
    return row


def _put_in_steps(subject: Subject, given: Delay | None, on_conflict: OnConflict, **values: Any) -> Timeout:
    """Lock the object, then the pending row, if there is one; then decide and write. It serves each case."""
    with transaction_of(subject.using):
        fresh = lock_subject(subject)
        if fresh is None:
            raise ValueError(f"{subject}: the object is not in the database (any more).")
        present = lock_newest(subject, pending=True) if on_conflict in ("keep", "error") else None
        if present and on_conflict == "error":
            raise TimeoutConflict(f"{subject} is pending already, due at {present.due_at}.", present)
        if present:
            return present
        policy = cast("TimeoutPolicy[Any]", subject.policy)
        since_at = policy.since_of(fresh)
        due_at = _due_at(subject, given, fresh, since_at, as_given=on_conflict == "once")
        if due_at is None:
            raise no_deadline(subject)
        times = {subject.slot: due_at if given else since_at}
        if on_conflict == "once" and (fired := fired_rows(times, subject.using, is_by_since=given is None)):
            if obsolete := lock_newest(subject, pending=True):
                cause = Timeout.Cause.SUPERSEDED
                writing.cancel_rows([obsolete], subject.using, values["reason"], clock.now(), cause=cause)
                announce(timeout_cancelled, obsolete, subject.using)
            return fired[-1]
        if policy.total is not None:
            check_total(lock_newest(subject, pending=True), due_at, subject, fresh)
        terms = None if given else terms_of(policy, {subject.pk: (since_at, fresh)}, subject.using)[subject.pk]
        new = writing.new_row(subject, due_at, since_at, terms=terms, obj=fresh, **values)
        row = writing.upsert(new, subject)
        facts = Facts([row], subject.using, {subject.model: {subject.pk: fresh}})
        if facts.is_on_hold(row):
            holding.hold_new(facts, is_computed=given is None, by="hand")
        return _announced(row, new, subject.using)


def fired_rows(times: Mapping[str, datetime | None], using: str, *, is_by_since: bool) -> list[Timeout]:
    """Return the rows that have fired or are firing for the `since`, or the deadline, that `times` has for their slot.

    The oldest first. By deadline, also those that an operator moved to another one. The transaction has locked the
    objects.
    """
    found, columns = [], ("since_at",) if is_by_since else ("due_at", "asked_due_at")
    for slots in chunks(sorted(times)):
        rows = Timeout.objects.using(using).filter(slot__in=slots, state__in=(State.FIRED, State.FIRING))
        asked = [(f"{column}__in", {times[slot] for slot in slots}) for column in columns]
        rows = rows.filter(Q(*asked, _connector=Q.OR)).order_by("id")
        found += [row for row in read_committed(rows, using) if times[row.slot] in [getattr(row, c) for c in columns]]
    return found


def _due_at(
    subject: Subject,
    given: Delay | None,
    obj: Model | None = None,
    since_at: datetime | None = None,
    *,
    as_given: bool = False,
) -> datetime | None:
    """Return the deadline, by the caller's delay or else by the policy; None: there is none, or it depends on `obj`.

    `as_given`: also a datetime that has passed, which otherwise means now.
    """
    if given is not None:
        is_known = obj is not None or not given.needs_object
        return given.due_from(clock.now(), obj, as_given=as_given) if is_known else None
    policy = cast("TimeoutPolicy[Any]", subject.policy)
    if policy.after is None or (obj is None and (policy.since is not None or policy.needs_object)):
        return None
    return policy.due_of(obj, clock.now() if policy.since is None else since_at, read_delay(policy, subject.using))


def check_conflict(on_conflict: str, given: Delay | None, policy: TimeoutPolicy[Any]) -> None:
    """Raise ValueError unless `on_conflict` is one of the four; InvalidDelay for "once" with a delay from now.

    Each call would have another deadline, for which nothing has fired.
    """
    if on_conflict not in get_args(OnConflict):
        raise ValueError(f'on_conflict is "replace", "keep", "error" or "once", not {on_conflict!r}.')
    counts_from_now = policy.since is None if given is None else given.at is None
    if on_conflict == "once" and counts_from_now:
        words = _(
            'on_conflict="once" needs a deadline that does not count from now. Give at=, or no delay if it has since.'
        )
        raise InvalidDelay(words)


def no_deadline(subject: Subject) -> InvalidDelay:
    """Return the error for an object whose policy gives it no deadline."""
    return InvalidDelay(
        f"{subject} has no deadline of its own: its policy names no after, exempts this object, or its since is "
        "empty or too far away. Give a delay, such as minutes=30."
    )


def cancel_timeout(obj: M, policy: str | TimeoutPolicy[M] | None = None, *, key: str = "", reason: str = "") -> bool:
    """Cancel the timeout. Return True: it will not fire. False: too late, the newest round has fired or is firing.

    May be called again, and when nothing is pending. Cancels a dead timeout too, so that it cannot be retried. While
    one is firing, returns False and forbids further attempts. Of an automatic policy, closes the round of the present
    value of `since`, also if it is not pending, so that no save and no sync arms it later. If a function `since` or
    `after` raises for the object, which is logged, that round stays open. `obj` may be a `Timeout` itself: then only
    that row is cancelled.

    Raises:
        UnknownPolicy: no such policy.
        ValueError: `obj` is not saved.
    """
    subject = subject_of(obj, policy, key)
    if writing.cancel_pending(subject, reason, lock=True):
        return True  # with the only statement, as nearly always if one is pending
    with transaction_of(subject.using):
        fresh = lock_subject(subject)
        is_in_time, *_ = cancel_newest(subject, reason)
        if is_in_time and fresh is not None:
            _close_round(subject, fresh, reason)
        return is_in_time


def _close_round(subject: Subject, obj: Model, reason: str) -> None:
    """Close the round of the present `since` of the locked `obj`, unless a row has closed it. Nothing of it is pending.

    It was not armed yet, or its condition ended it, and the next save or sync would arm it. Where a function of the
    policy raises, as it may for an object that does not match `when`, nothing can arm the round. A row that is settled
    never changes its state, so another one closes the round, with the same deadlines.
    """
    policy, using = subject.automatic_policy, subject.using
    if policy is None:
        return
    failures = Failures(policy)
    with failures.counting(subject.pk):
        since_at = policy.since_of(obj)
        rounds = read_committed(subject.rounds().filter(since_at=since_at), using)
        if since_at is None or rounds.filter(CLOSING)[:1]:
            return
        ended = rounds.first()
        due_at = policy.due_of(obj, since_at, read_delay(policy, using)) if ended is None else ended.due_at
    if failures.first is not None:
        words = "%s: its present round cannot be closed, because its deadline cannot be computed"
        ids = {"policy": policy.label, "object_id": subject.object_id}
        logger.error(words, subject, exc_info=shown(failures.first[1]), extra={"event": "close_failed", **ids})
    elif due_at is not None:
        first_due_at = due_at if ended is None else ended.first_due_at
        row = writing.new_row(subject, due_at, since_at, first_due_at=first_due_at, obj=obj)
        writing.insert([row], using)
        writing.cancel_rows([row], using, reason, clock.now())


def cancel_locked(subject: Subject, reason: str, *, strict: bool = False) -> tuple[bool, Timeout | None, list[Timeout]]:
    """Do as `cancel_newest`, by one statement if a pending round decides, as nearly always."""
    policy = subject.policy if strict else None
    is_by_deadline = policy is not None and (policy.grace is not None or reads_again(policy))
    if not is_by_deadline and (found := writing.cancel_pending(subject, reason, lock=False, in_time=strict)):
        return True, found[0], found
    return cancel_newest(subject, reason, strict=strict)


def cancel_newest(subject: Subject, reason: str, *, strict: bool = False) -> tuple[bool, Timeout | None, list[Timeout]]:
    """Cancel the newest round of `subject` by hand, unless it has fired or is firing.

    Inside a transaction that has locked the business row. Return whether that was in time, the round that decided it,
    and what was cancelled. `strict`: a pending or dead round whose deadline has passed makes it too late, too.
    """
    newest = lock_newest(subject)
    if strict and newest and subject.policy and arm_outdated(subject.policy, [(subject.pk, newest)], subject.using):
        newest = lock_newest(subject)
    if newest is None:
        return True, None, []
    now = clock.now()
    writing.forbid_attempts([newest], subject.using, reason, now)
    if newest.state == State.FIRED and _has_unarmed_round(subject, newest):
        return True, None, []
    # A step that is firing is not the handler, which nothing calls after `forbid_attempts`.
    if newest.state == State.FIRED or (newest.state == State.FIRING and not newest.step):
        return False, newest, []
    if newest.state not in (*WAITING, State.DEAD):
        return True, newest, []
    if strict and _is_late(subject, newest):
        return False, newest, []
    record_death(newest, now)
    writing.cancel_rows([newest], subject.using, reason, now)
    announce(timeout_cancelled, newest, subject.using)
    return True, newest, [newest]


def _has_unarmed_round(subject: Subject, fired: Timeout) -> bool:
    """Return whether the object has a later round than `fired`, not armed yet, as after `QuerySet.update`."""
    policy, using = subject.automatic_policy, subject.using
    if policy is None:
        return False
    found = objects_of_policy(policy, [subject.pk], using) if condition_holds(policy, subject.pk, using) else {}
    since_at = None
    with Failures(policy).counting(subject.pk):  # if `since` raises, no round can be armed
        since_at = next(map(policy.since_of, found.values()), None)
    others = subject.rounds().filter(Q(since_at=since_at, state=State.FIRED) | Q(settled_at=None))
    return since_at not in {None, fired.since_at} and not read_committed(others, using)[:1]


def _is_late(subject: Subject, row: Timeout) -> bool:
    """Return whether the deadline of `row` has passed, and its grace.

    Not if its clock is stopped, also by a hold of its policy.
    """
    facts = Facts([row], subject.using)
    acts_at = facts.final_at(row)
    if row.has_stopped_clock or acts_at > facts.now:
        return False
    if row.state == State.PENDING and facts.is_on_hold(row):
        return False  # not noticed yet
    return acts_at <= facts.policy_hold(row, facts.now)[0]


def reschedule_timeout(
    obj: M,
    policy: str | TimeoutPolicy[M] | None = None,
    *,
    key: str = "",
    reason: str = "",
    **delay: Unpack[DelayArgs],
) -> Timeout | None:
    """Move the pending timeout to `delay`, counted from now; return its row. None: nothing is pending.

    If its clock is stopped, it stays stopped, and only what is stopped from now on moves the new deadline.

    Raises:
        InvalidDelay: no delay, or a wrong one.
        ExtensionLimit: later than `Limits(total=...)` of the policy allows.
        UnknownPolicy, ValueError: as for `schedule_timeout`.
    """
    given = parse_target(dict(delay))
    subject = subject_of(obj, policy, key)
    return _move(subject, "rescheduled", reason, lambda _, of: given.due_from(clock.now(), of))


def extend_timeout(
    obj: M,
    policy: str | TimeoutPolicy[M] | None = None,
    *,
    key: str = "",
    reason: str = "",
    **span: Unpack[Duration],
) -> Timeout | None:
    """Move the deadline of the pending timeout later by `span`; return its row. None: nothing is pending.

    Units and a timedelta are real time, also while its clock is stopped; `after=Working(...)` adds open time.

    Raises:
        ExtensionLimit: the policy's `max_extensions` or `Limits(total=...)` is used up.
        InvalidDelay, UnknownPolicy, ValueError: as for `schedule_timeout`.
    """
    by = parse_span(dict(span))
    subject = subject_of(obj, policy, key)

    def later(row: Timeout, of: Any) -> datetime:
        if not may_extend(row, subject.policy):
            allowed = subject.policy and subject.policy.max_extensions
            raise ExtensionLimit(f"{subject} cannot be extended again: max_extensions={allowed} is used up.", row)
        return added(by, holding.extended_from(row), of)

    return _move(subject, "extended", reason, later, by)


def _move(
    subject: Subject,
    what: Moved,
    reason: str,
    deadline_of: Callable[[Timeout, Model | None], datetime],
    by: Length | None = None,
) -> Timeout | None:
    """Move the waiting row to its `deadline_of`, by the row and its object; return it. None: nothing is pending.

    `by`: see `move_by_hand`.
    """
    with transaction_of(subject.using):
        facts = holding.lock_waiting(subject)
        if (row := facts.row) is None:
            return None
        obj = facts.of(row)
        holding.end_passed(facts.rows, facts)
        due_at = deadline_of(row, obj)
        check_total(row, due_at, subject, obj)
        move_by_hand([(row, due_at)], facts, what, reason, by)
        announce(timeout_rescheduled, row, subject.using)
        return row


def move_by_hand(
    deadlines: Iterable[tuple[Timeout, datetime]], facts: Facts, what: Moved, reason: str, by: Length | None = None
) -> list[Timeout]:
    """Move waiting, locked rows to these deadlines; return the rows. A row that is extended waits for its retry.

    `by`: the duration by which they are moved, or None if the deadlines are given: for rows whose clock is stopped.
    """
    moves = []
    for row, due_at in deadlines:
        events.retarget(row, due_at, facts, is_given=by is None)
        moves.append((row, due_at, writing.run_at_of(row, due_at, facts) if what == "extended" else None))
    return writing.move_rows(moves, facts, what=what, at=clock.now(), by="hand", reason=reason)


def parse_target(delay: dict[str, Any]) -> Delay:
    """Return a delay. Raises InvalidDelay if there is none, or a wrong one."""
    given = parse_delay(delay)
    if given is None:
        raise InvalidDelay("To when? Give units, after= or at=.")
    return given


def parse_span(span: dict[str, Any]) -> Length:
    """Return a duration or a span. Raises InvalidDelay if there is none, or a datetime."""
    by = parse_delay(span)
    if by is None or by.after is None:
        raise InvalidDelay("By how much? Give units or after=.")
    return by.after


def may_extend(row: Timeout, policy: TimeoutPolicy[Any] | None) -> bool:
    """Return whether `max_extensions` allows one more for `row`."""
    limit = policy.max_extensions if policy else None
    return limit is None or row.extensions < limit


def is_beyond_total(row: Any, due_at: datetime, policy: TimeoutPolicy[Any] | None, obj: Any) -> bool:
    """Return whether `Limits(total=...)` forbids the application to move `row` to `due_at`. `obj`: its object.

    It never forbids an earlier deadline, nor one that is due now: an overdue one may be fired.
    """
    total = policy.total if policy else None
    if total is None or due_at <= max(row.due_at, clock.now()):
        return False
    latest = end_of(total, row.first_due_at, obj)
    return latest is not None and due_at > latest


def check_total(row: Timeout | None, due_at: datetime, subject: Subject, obj: Any) -> None:
    """Raise ExtensionLimit if `Limits(total=...)` forbids to move the pending `row`, if there is one, to `due_at`."""
    if row is not None and is_beyond_total(row, due_at, subject.policy, obj):
        total = length_text(cast("TimeoutPolicy[Any]", subject.policy).total or timedelta(0))
        limit = f"Limits(total={total}), from its first deadline at {row.first_due_at}"
        raise ExtensionLimit(f"{subject} cannot be moved to {due_at}: that is beyond {limit}.", row)


aschedule_timeout = sync_to_async(schedule_timeout)
acancel_timeout = sync_to_async(cancel_timeout)
areschedule_timeout = sync_to_async(reschedule_timeout)
aextend_timeout = sync_to_async(extend_timeout)
