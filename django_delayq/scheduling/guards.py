"""`before_deadline`: the guard for the view in which it happens, such as the payment."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from django.db import transaction

from django_delayq.arming.row_state import condition_holds
from django_delayq.exceptions import DeadlinePassed
from django_delayq.ledger import writing
from django_delayq.ledger.locking import begin_write, lock_object, locking_rows
from django_delayq.ledger.subjects import subject_of
from django_delayq.models import Timeout
from django_delayq.scheduling.single import cancel_newest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django_delayq.policies import M, TimeoutPolicy


@contextmanager
def before_deadline(
    obj: M, policy: str | TimeoutPolicy[M] | None = None, *, key: str = "", reason: str = ""
) -> Iterator[Timeout | None]:
    """The block runs only if the timeout has not fired, and then the timeout will not: one of the two wins.

    Opens `atomic()`, locks the row of `obj`, refreshes `obj` from it (what was changed in memory and not
    saved is gone), and cancels the pending round. The block gets the newest round's row, or None. When it
    raises, everything is undone, the cancelling too.

    A round that was skipped, is dead, cancelled or was never armed lets the block run: a payment must not
    fail because arming was missed. If the block makes the policy's `when` false, the round counts as
    cancelled by its condition; it is armed again should the object fall back.

    `obj` may be a `Timeout`: then its object is locked, the row itself is cancelled and refreshed.

    Raises:
        DeadlinePassed: the current round has fired or is firing; it is in `.timeout`.
        UnknownPolicy: no such policy.
        ValueError: `obj` is not saved.
        obj.DoesNotExist: its row is gone.
    """
    subject = subject_of(obj, policy, key)
    with transaction.atomic(using=subject.using):
        begin_write(subject.using)
        if isinstance(obj, Timeout):
            if subject.model is not None:
                lock_object(subject.model, subject.pk, subject.using)
        else:
            obj.refresh_from_db(using=subject.using, from_queryset=locking_rows(type(obj), [obj.pk], subject.using))
        cancelling = cancel_newest(subject, reason=reason)
        if isinstance(obj, Timeout):
            obj.refresh_from_db(using=subject.using)
        row = cancelling.row
        if not cancelling.in_time and row is not None:
            raise DeadlinePassed(f"{subject}: the deadline at {row.due_at} has passed.", row)
        yield row
        if cancelling.won and row is not None and subject.policy is not None:
            _note_what_the_block_did(row, subject.policy, subject.pk, subject.using)


def _note_what_the_block_did(row: Timeout, policy: TimeoutPolicy[Any], pk: Any, using: str) -> None:
    """Only a round that was cancelled although its condition still holds is closed for good."""
    if policy.is_automatic and not condition_holds(policy, pk, using):
        writing.note_condition(row)
