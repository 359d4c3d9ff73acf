"""`before_deadline`: the guard for the code that must not run after the timeout has fired, such as a payment."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from django.db import transaction
from django.db.models import Model

from django_delayq.arming.row_state import condition_holds
from django_delayq.ledger import writing
from django_delayq.ledger.locking import begin_write, lock_keys, lock_object, locking_rows
from django_delayq.ledger.subjects import lock_subject, subject_of
from django_delayq.models import Timeout
from django_delayq.scheduling.errors import DeadlinePassed, DeadlineUndecided, NotWaiting
from django_delayq.scheduling.single import cancel_locked

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django_delayq.policy.policies import M, TimeoutPolicy


@contextmanager
def before_deadline(
    obj: M,
    policy: str | TimeoutPolicy[M] | None = None,
    *,
    key: str = "",
    reason: str = "",
    strict: bool = False,
    waiting: bool = False,
) -> Iterator[Timeout | None]:
    """Run the block only if the timeout has not fired, and cancel the timeout: exactly one of the two happens.

    Opens `atomic()`, locks the row of `obj`, refreshes `obj` from it (unsaved changes in memory are lost), and cancels
    the pending round. The block gets the newest round's row, or None. If it raises, everything is rolled back,
    including the cancellation.

    A round that was skipped, is dead, cancelled or was never armed lets the block run: a payment must not fail
    because arming was missed. If the block makes the policy's `when` false, the round counts as cancelled by its
    condition; it is armed again if the condition holds again.

    `obj` may be a `Timeout`: then its object is locked, the row itself is cancelled and refreshed.

    `strict`: the deadline decides, and not whether a worker was in time. As for a worker, a computed one is that of the
    present data. A pending or dead round whose deadline has passed by the clock of the database when the block would
    begin is too late, too. It stays as it is: a worker fires the pending one. Deadlines of a paused policy pass; those
    of a policy on hold that were ahead when the hold began do not.

    `waiting`: the block runs only if `when` of the policy holds on the locked row. So it does not run for a second
    payment, nor for an order that a person has cancelled. A policy without `when` lets it run.

    Raises:
        DeadlinePassed: the current round has fired, or `strict` finds it too late; it is in `.timeout`.
        DeadlineUndecided: it is firing, with `atomic=False`. This is a `DeadlinePassed`, too. The handler is retried as
            usual, unlike after `cancel_timeout`.
        NotWaiting: `waiting`, and `when` does not hold.
        UnknownPolicy: no such policy.
        ValueError: `obj` is not saved.
        TypeError: `strict` or `waiting` is not True or False.
        obj.DoesNotExist: its row does not exist any more.
    """
    for name, given in (("strict", strict), ("waiting", waiting)):
        if not isinstance(given, bool):
            raise TypeError(f"{name} is True or False, not of type {type(given).__name__}.")
    subject = subject_of(obj, policy, key)
    declared, using = subject.policy, subject.using
    with transaction.atomic(using=using):
        begin_write(using)
        if isinstance(obj, Timeout):
            lock_subject(subject)
        else:
            _refresh(obj, using)
        is_in_time, row, cancelled = cancel_locked(subject, reason, strict=strict)
        if isinstance(obj, Timeout):
            obj.refresh_from_db(using=using)
        if not is_in_time and row is not None:
            if row.state == Timeout.State.FIRING:
                raise DeadlineUndecided(f"{subject}: its handler is running, and nothing is decided yet.", row)
            raise DeadlinePassed(f"{subject}: the deadline at {row.due_at} has passed.", row)
        if waiting and declared and not condition_holds(declared, subject.pk, using):
            raise NotWaiting(f"{subject}: the condition of its policy does not hold.")
        yield row
        # Only a round that was cancelled although its condition still holds must never be armed again.
        if cancelled and declared and declared.is_automatic and not condition_holds(declared, subject.pk, using):
            writing.count_as_condition(cancelled, using)


def _refresh(obj: Model, using: str) -> None:
    """Lock the row of `obj` and read it into `obj`, mostly by a statement that was compiled once."""
    model: Any = obj.__class__
    is_plain = model.refresh_from_db is Model.refresh_from_db and not obj.get_deferred_fields()
    # Locked first: a method of the model may ignore the query that it is given.
    found: list[Any] = [lock_object(model, obj.pk, using)] if is_plain else lock_keys(model, [obj.pk], using)
    if not found or found[0] is None:
        raise model.DoesNotExist(f"{model.__name__} matching query does not exist.")
    rows: Any = _Read(found) if is_plain else locking_rows(model, [obj.pk], using)
    try:
        obj.refresh_from_db(using=using, from_queryset=rows)
    except AttributeError as error:
        error.add_note(
            f"before_deadline() reads {model.__name__} again with refresh_from_db(), which sets each field. For "
            "FSMField(protected=True) of django-fsm-2, add FSMModelMixin to the bases of the model."
        )
        raise


class _Read(list[Any]):
    """A queryset that has been executed: what `Model.refresh_from_db` narrows further, and gets its row from."""

    def filter(self, *_: Any, **__: Any) -> Self:
        return self

    using = filter

    def get(self) -> Any:
        return self[0]
