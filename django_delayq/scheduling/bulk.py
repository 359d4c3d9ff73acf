"""Schedule, cancel, reschedule and extend many timeouts: few statements, in lock order, and no signals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from django.db.models import Model, QuerySet

from django_delayq import clock
from django_delayq.delays import parse_delay, shifted
from django_delayq.exceptions import InvalidDelay, TimeoutConflict
from django_delayq.ledger import writing
from django_delayq.ledger.locking import database_of, lock_in_slot_order, lock_objects, transaction_of
from django_delayq.ledger.paging import Page, chunks, each_page
from django_delayq.ledger.subjects import Subject, instances, subject_at, subject_of
from django_delayq.models import Timeout
from django_delayq.policies import M, TimeoutPolicy, registry, resolve_policy
from django_delayq.scheduling.single import check_payload, may_extend, operator_delay, parse_span, round_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Unpack

    from django_delayq.delays import DelayArgs, Span
    from django_delayq.models import TimeoutQuerySet
    from django_delayq.scheduling.single import OnConflict

    Rows = Timeout | TimeoutQuerySet | Iterable[Timeout]


def schedule_timeouts(
    objects: Iterable[M],
    policy: str | TimeoutPolicy[M],
    *,
    key: str = "",
    payload: Any = None,
    on_conflict: OnConflict = "replace",
    reason: str = "",
    **delay: Unpack[DelayArgs],
) -> int:
    """Schedule `policy` for each of `objects`, all of one model; return how many were scheduled or moved.

    One transaction for all. With `"keep"`, those that were pending already are not counted; with `"error"`,
    one of them is enough to refuse the whole call before anything is written.

    Raises:
        The same as `schedule_timeout`; also TypeError for objects of several models.
    """
    given, body = parse_delay(dict(delay)), check_payload(payload)
    if on_conflict not in ("replace", "keep", "error"):
        raise ValueError(f'on_conflict is "replace", "keep" or "error", not {on_conflict!r}.')
    subjects = _subjects(objects, policy, key)
    if not subjects:
        return 0
    using, model, keep = subjects[0].using, cast("type[Model]", subjects[0].model), on_conflict == "keep"
    with transaction_of(using):
        rows: list[tuple[Subject, Timeout]] = []
        taken: list[Timeout] = []
        in_force = operator_delay(subjects[0], given)
        for chunk in chunks(subjects):
            fresh = lock_objects(model, [subject.pk for subject in chunk], using)
            for subject in chunk:
                if subject.pk not in fresh:
                    raise ValueError(f"{subject}: the object is not in the database (any more).")
                since_at, due_at = round_of(subject, fresh[subject.pk], given, in_force)
                rows.append((subject, writing.new_row(subject, due_at, since_at, payload=body, reason=reason)))
        for chunk in chunks(subjects):
            slots = [slot for subject in chunk for slot in subject.slots]
            taken += lock_in_slot_order(Timeout.objects.using(using).filter(slot__in=slots, slot_taken=1), using)
        if taken and on_conflict == "error":
            raise TimeoutConflict(f"{len(taken)} of {len(rows)} are pending already, such as {taken[0]}.", taken[0])
        present = {row.slot for row in taken}
        chosen = [row for subject, row in rows if not (keep and present & set(subject.slots))]
        for subject, _ in rows if not keep else ():
            if len(subject.labels) > 1 and present & set(subject.slots[1:]):
                writing.adopt(subject)
        writing.insert(chosen, using, replace=not keep, earlier_only=keep)
        return len(chosen)


def _subjects(objects: QuerySet[Any] | Iterable[Model], policy: str | TimeoutPolicy[Any], key: str) -> list[Subject]:
    """Return one subject per object, in the order of their keys, so that two calls lock them in the same order."""
    if isinstance(objects, QuerySet):
        resolved = resolve_policy(policy, objects.model)
        using = database_of(objects.model, objects)
        rows = (objects if objects.query.is_sliced else objects.order_by()).using(using)
        pks = rows.values_list(cast("Any", resolved.concrete_model._meta.pk).name, flat=True)
        found = [subject_at(resolved, pk, key, using) for pk in pks]
    else:
        listed = instances(objects)
        if any(isinstance(obj, Timeout) for obj in listed):
            raise TypeError(
                "schedule_timeouts() takes objects and a policy, not a Timeout: that one is scheduled already. To move "
                "it, use reschedule_timeouts() or extend_timeouts()."
            )
        found = [subject_of(obj, policy, key) for obj in listed]
    if len({(subject.model, subject.using) for subject in found}) > 1:
        raise TypeError("The objects must be of one model in one database.")
    return sorted({subject.pk: subject for subject in found}.values(), key=lambda subject: subject.pk)


def cancel_timeouts(rows: Rows, *, reason: str = "") -> int:
    """Cancel those of `rows` (such as `pending_timeouts(...)`) that are still pending; return how many.

    `rows` may be a single `Timeout`. The rows are read again on the writer. Each page of 500 is one transaction, or
    part of the caller's.
    """

    def change(page: Page) -> int:
        return writing.cancel({row.pk: row.queue for row in page.rows}, page.using, Timeout.Cause.HAND, reason)

    return sum(each_page(rows, change))


def reschedule_timeouts(rows: Rows, *, reason: str = "", **delay: Unpack[DelayArgs]) -> int:
    """Move those of `rows` that are pending to `delay`, counted from now; return how many.

    Raises InvalidDelay.
    """
    given = parse_delay(dict(delay))
    if given is None:
        raise InvalidDelay("To when? Give units, after= or at=.")
    due_at = given.due_from(clock.now())

    def change(page: Page) -> int:
        moves = [(row, due_at, due_at) for row in page.rows]
        at = clock.now()
        return len(writing.move_rows(moves, page.using, what="rescheduled", at=at, by="hand", reason=reason))

    return sum(each_page(rows, change))


def extend_timeouts(rows: Rows, *, reason: str = "", **span: Unpack[Span]) -> int:
    """Move the deadlines of those of `rows` that are pending later by `span`; return how many.

    Rows whose policy's `max_extensions` is used up stay as they are. Raises InvalidDelay.
    """
    by = parse_span(dict(span))

    def change(page: Page) -> int:
        rows = [row for row in page.rows if may_extend(row, registry.get(row.policy))]
        deadlines = [(row, shifted(row.due_at, by)) for row in rows]
        moves = [(row, due_at, writing.run_at_of(row, due_at)) for row, due_at in deadlines]
        at = clock.now()
        writing.move_rows(moves, page.using, what="extended", at=at, by="hand", reason=reason, extended=True)
        return len(moves)

    return sum(each_page(rows, change))
