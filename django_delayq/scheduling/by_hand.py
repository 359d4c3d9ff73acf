"""Stop the clock of one timeout by hand, and let it run again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asgiref.sync import sync_to_async
from django.utils.translation import gettext

from django_delayq.arming import holding
from django_delayq.exceptions import InvalidDelay
from django_delayq.ledger.locking import transaction_of
from django_delayq.ledger.outbox import announce
from django_delayq.ledger.subjects import subject_of
from django_delayq.models import Timeout
from django_delayq.signals import timeout_held, timeout_resumed
from django_delayq.times import clock
from django_delayq.times.clock import check_moment

if TYPE_CHECKING:
    from datetime import datetime

    from django_delayq.policy.policies import M, TimeoutPolicy


def hold_timeout(
    obj: M,
    policy: str | TimeoutPolicy[M] | None = None,
    *,
    key: str = "",
    reason: str = "",
    until: datetime | None = None,
    keep_deadline: bool = False,
) -> Timeout | None:
    """Stop the clock of the pending timeout by hand; return its row. None: nothing is pending or held.

    Nothing fires until `resume_timeout`, or until a worker notices that `until` has passed: then its clock has been
    running since `until`. The deadline moves by the time of its policy that was stopped. Holding a held timeout again
    replaces its end. The hold by hand ends with the round: when `since` gets another value, when `when` stops holding,
    or when it is scheduled again.

    Args:
        obj, policy, key: as for `cancel_timeout`; `obj` may be a `Timeout`.
        reason: kept in its history.
        until: a datetime in the future; None: until `resume_timeout`.
        keep_deadline: only pause it: nothing fires either, but its clock runs, and its deadline stays where it is. If
            that has passed when it is resumed, it is due at once. A clock that is stopped already stays stopped.

    Raises:
        InvalidDelay: `until` is not a datetime in the future that fits `USE_TZ`.
        UnknownPolicy, ValueError: as for `cancel_timeout`.
    """
    end = checked_end(until)
    subject = subject_of(obj, policy, key)
    with transaction_of(subject.using):
        facts = holding.lock_waiting(subject)
        if (row := facts.row) is None:
            return None
        holding.end_passed([row], facts)
        holding.hold_by_hand([row], facts, end, keep_deadline=keep_deadline, by="hand", reason=reason)
        announce(timeout_held, row, subject.using)
        return row


def resume_timeout(
    obj: M, policy: str | TimeoutPolicy[M] | None = None, *, key: str = "", reason: str = ""
) -> Timeout | None:
    """End the hold by hand of a timeout; return its row. None: nothing is held by hand.

    The deadline moves by the time of its policy that was stopped, such as open hours, counted from the deadline itself:
    not at all over a night. If it was only paused, the deadline has stayed where it was. While `hold_when` of its
    policy holds, its clock stays stopped.

    Raises:
        UnknownPolicy, ValueError: as for `cancel_timeout`.
    """
    subject = subject_of(obj, policy, key)
    with transaction_of(subject.using):
        facts = holding.lock_waiting(subject)
        if facts.row is None or not facts.row.held_by_hand:
            return None
        for resumed in holding.end_hold_by_hand(facts.rows, facts, by="hand", reason=reason):
            announce(timeout_resumed, resumed, subject.using)
        return facts.row


def checked_end(until: datetime | None) -> datetime | None:
    """Return the end of a hold. Raises InvalidDelay unless it is None, or a datetime in the future."""
    end = None if until is None else check_moment(until, "until")
    if end is not None and end <= clock.now():
        raise InvalidDelay(gettext("{moment} is in the past.").format(moment=clock.local(end)))
    return end


ahold_timeout = sync_to_async(hold_timeout)
aresume_timeout = sync_to_async(resume_timeout)
