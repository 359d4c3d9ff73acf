"""Lock the object of a subject, its newest row, or its pending row."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from django.db import connections

from django_delayq.dialects import dialect_of
from django_delayq.ledger.locking import for_update, lock_object, read_committed
from django_delayq.ledger.statements import compiled, param
from django_delayq.models import Timeout

if TYPE_CHECKING:
    from django.db.models import Model, QuerySet

    from django_delayq.ledger.subjects import Subject


def lock_subject(subject: Subject) -> Model | None:
    """Lock the object of `subject` and return it; None: its model is gone, or the object does not exist any more."""
    return None if subject.model is None else lock_object(subject.model, subject.pk, subject.using)


def lock_newest(subject: Subject, *, pending: bool = False) -> Timeout | None:
    """Wait for the newest row of `subject`, or for the pending one, and lock it; return None if there is none.

    Rows that were superseded do not count if there is another: `since` came back to the value of an older round.

    A database that locks what it reads may read a small table backwards by the primary key, and deadlock. Asked for
    the ids alone, it reads them from the index of slots.
    """
    using, slot, row_id = subject.using, subject.slot, subject.row_id
    if row_id is None and dialect_of(connections[using]).locks_what_it_reads:
        ids = _rounds.rows(using, False, pending, True, slot=slot)
        if not ids:
            return None
        row_id = max(row[0] for row in ids)
    found = _rounds.objects(using, row_id is not None, pending, False, slot=slot, id=row_id)
    if found and found[0].cause == Timeout.Cause.SUPERSEDED:
        for other in read_committed(subject.rounds().exclude(cause=found[0].cause), using)[:1]:
            return lock_newest(replace(subject, row_id=other.pk))
    return found[0] if found else None


@compiled
def _rounds(using: str, by_id: bool, pending: bool, only_ids: bool) -> QuerySet[Any, Any]:
    rows: QuerySet[Any, Any] = Timeout.objects.using(using)
    rows = rows.filter(pk=param("id")) if by_id else rows.filter(slot=param("slot"))
    rows = for_update(rows.filter(slot_taken=1) if pending else rows, using)
    return rows.values_list("pk") if only_ids else rows.order_by("-id")[:1]
