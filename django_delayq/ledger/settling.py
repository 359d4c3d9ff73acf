"""The statements with which workers write rows: fired, firing, skipped, retried, deleted. Each compares before it sets.

All of it runs inside a transaction. Rows come from `lock_rows`, which does not wait, so that they are unchanged when
they are written. The comparison in the UPDATE decides nevertheless, because SQLite locks no rows and the clock of a
worker proves nothing.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from django.db.models import F

from django_delayq import clock
from django_delayq.clock import DatabaseNow
from django_delayq.ledger.controls import IsStopped
from django_delayq.ledger.locking import for_update, in_state, raising_instead_of_waiting, transaction_of
from django_delayq.ledger.statements import compiled, padded, param, params, update
from django_delayq.models import Timeout, slot_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from django.db.models import QuerySet
    from django.db.models.sql import UpdateQuery

    from django_delayq.models import TimeoutQuerySet
    from django_delayq.policies import TimeoutPolicy

State, Cause = Timeout.State, Timeout.Cause
PRUNED_PAGE: Final = 500


def lock_rows(
    ids: Collection[int], using: str, *, history: bool = False, policy: TimeoutPolicy[Any] | None = None
) -> tuple[dict[int, Timeout], datetime]:
    """Lock the rows `ids`, except those that are locked already; return them fresh, by id, and the database's time.

    The history, which may be large, is loaded only on demand, or here with `history`. With `policy` each row has an
    attribute `is_stopped`: whether that policy is stopped. The statement reads it after its time, so nothing that was
    committed before that time is missed.
    """
    wanted = padded(ids)
    found = _locked.objects(using, len(wanted), history, policy, id=wanted) if wanted else []
    now: datetime = vars(found[0])["database_now"] if found else clock.now()
    return {row.pk: row for row in found}, now


@compiled
def _locked(using: str, count: int, history: bool, policy: TimeoutPolicy[Any] | None) -> QuerySet[Any]:
    rows: Any = Timeout.objects.using(using).filter(pk__in=params("id", count)).order_by("pk")
    rows = rows.annotate(database_now=DatabaseNow())
    if policy is not None:
        rows = rows.annotate(is_stopped=IsStopped(policy))
    return for_update(rows if history else rows.defer("history"), using, wait=False)


def mark_fired(rows: Sequence[Timeout], now: datetime, using: str, *, counted: bool = False) -> bool:
    """Mark the pending `rows` as fired. Return False if one of them is not due: then the caller must roll back.

    `counted`: the attempt has been counted already.
    """
    ids, attempts = padded([row.pk for row in rows]), 0 if counted else 1
    with raising_instead_of_waiting(using):
        count = _mark_fired.execute(using, len(ids), attempts, id=ids, settled_at=now)
    if count != len(rows):
        return False
    values = {"state": State.FIRED, "cause": Cause.DUE, "settled_at": now, "slot_taken": None}
    for row in rows:
        _assign(row, {**values, "attempts": row.attempts + attempts})
    return True


@compiled
def _mark_fired(using: str, count: int, attempts: int) -> UpdateQuery:
    values = {"state": State.FIRED, "cause": Cause.DUE, "settled_at": param("settled_at"), "slot_taken": None}
    return update(_due(params("id", count), using), **values, attempts=F("attempts") + attempts)


def mark_firing(row: Timeout, until: datetime, using: str) -> bool:
    """Mark the pending `row` as firing until `until`, count its attempt, free its slot. Return False: it is not due."""
    values = {"state": State.FIRING, "slot_taken": None, "run_at": until, "attempts": row.attempts + 1}
    with raising_instead_of_waiting(using):
        if not _due([row.pk], using).filter(attempts=row.attempts).update(**values):
            return False
    _assign(row, values)
    return True


def is_marked(row_id: int, using: str) -> bool:
    """Return whether the current transaction still works and still sees the row as fired."""
    return bool(Timeout.objects.using(using).filter(pk=row_id, state=State.FIRED).exists())


def mark_skipped(rows: Sequence[Timeout], cause: Timeout.Cause, now: datetime, using: str) -> None:
    """Mark the pending, locked `rows` as skipped: there is nothing to do."""
    values = {"state": State.SKIPPED, "cause": cause, "settled_at": now, "slot_taken": None}
    with raising_instead_of_waiting(using):
        Timeout.objects.using(using).filter(pk__in=[row.pk for row in rows], slot_taken=1).update(**values)
    for row in rows:
        _assign(row, values)


def compare_and_set(row: Timeout, using: str, **values: Any) -> bool:
    """Write `values` if `row` was not moved, settled, restarted or tried since it was read; else return False."""
    unchanged = {name: getattr(row, name) for name in ("state", "attempts", "run_at", "idempotency_key")}
    if not Timeout.objects.using(using).filter(pk=row.pk, **unchanged).update(**values):
        return False
    _assign(row, values)
    return True


def settled(state: Timeout.State, cause: Timeout.Cause, now: datetime) -> dict[str, Any]:
    """Return the columns of a row that settles as `state`, for `compare_and_set`."""
    return {"state": state, "cause": cause, "settled_at": now, "slot_taken": None}


def waiting(run_at: datetime) -> dict[str, Any]:
    """Return the columns of a row whose next attempt is at `run_at`, for `compare_and_set`."""
    return {"state": State.PENDING, "slot_taken": 1, "run_at": run_at}


def slot_is_taken(row: Timeout, labels: Iterable[str], using: str) -> bool:
    """Return whether a newer round is pending in the slot of `row`, under any of its policy's `labels`."""
    slots = {slot_of(label, row.content_type_id, row.object_id, row.key) for label in labels}
    taken: bool = Timeout.objects.using(using).filter(slot__in={row.slot, *slots}, slot_taken=1).exists()
    return taken


def expired(using: str, limit: int, ids: Collection[int] | None = None) -> list[Timeout]:
    """Return at most `limit` rows, only `ids` if given, whose attempt has expired, the longest expired first."""
    rows = Timeout.objects.using(using).filter(state=State.FIRING, settled_at__isnull=True, run_at__lte=DatabaseNow())
    if ids is not None:
        rows = rows.filter(pk__in=ids)
    return list(rows.only("policy", "state", "attempts", "run_at").order_by("run_at", "pk")[:limit])


def extend(ids: Collection[int], until: datetime, using: str) -> None:
    """Let those of `ids` that are firing expire at `until`.

    Waits for locked rows after all others are written, and one by one: the transaction that has locked one may be
    waiting for another of them.
    """
    firing = in_state(Timeout.objects.using(using).filter(pk__in=ids), State.FIRING, using)
    with transaction_of(using):
        free = list(for_update(firing.order_by("pk"), using, wait=False).values_list("pk", flat=True))
        Timeout.objects.using(using).filter(pk__in=free).update(run_at=until)
    for id in firing.exclude(pk__in=free).values_list("pk", flat=True):
        in_state(Timeout.objects.using(using).filter(pk=id), State.FIRING, using).update(run_at=until)


def delete_settled(using: str, before: datetime, start: datetime | None) -> tuple[int, datetime | None]:
    """Delete a page of the rows that were settled from `start` on, and settled and due before `before`.

    Return how many, and the `start` of the next page; None: there are no more. So rows that must stay are read once,
    and not once a page. Sorted by `settled_at` alone, as the index is: with ids PostgreSQL would sort all rows that
    were settled by one bulk call, for each page again.
    """
    old = Timeout.objects.using(using).filter(settled_at__lt=before, due_at__lt=before)
    rows = old if start is None else old.filter(settled_at__gte=start)
    page = list(rows.order_by("settled_at").values_list("settled_at", "id")[:PRUNED_PAGE])
    with transaction_of(using):
        # Read again, because an operator may have revived one in between. A row that another transaction has locked
        # stays until the next time: that transaction may be waiting for another row of the page.
        found = old.filter(pk__in=[id for _, id in page]).order_by("pk")
        free = list(for_update(found, using, wait=False).values_list("pk", flat=True))
        count, _ = old.filter(pk__in=free).delete()
    return count, page[-1][0] if count and len(page) == PRUNED_PAGE else None


def _due(ids: Sequence[Any], using: str) -> TimeoutQuerySet:
    # Not by the state: see `in_state`.
    return Timeout.objects.using(using).filter(pk__in=ids, slot_taken=1, run_at__lte=DatabaseNow())


def _assign(row: Timeout, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(row, name, value)
