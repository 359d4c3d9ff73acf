"""Move what is pending of a policy, page by page, each row once, whoever dies meanwhile.

A change that moves rows keeps its place among them, and each page of 500 writes that place in the transaction that
moves its rows. Two who go on with one change take turns at its row: so every page is moved by exactly one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from django.db import connections, transaction
from django.utils.dateparse import parse_datetime

from django_delayq.clock import database_now
from django_delayq.delays import shifted
from django_delayq.engine import Change
from django_delayq.exceptions import InvalidDelay
from django_delayq.ledger import claiming, controls, outbox, paging
from django_delayq.ledger.history import clipped
from django_delayq.ledger.locking import for_update, transaction_of
from django_delayq.ledger.writing import move_rows, run_at_of
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from django_delayq.policies import registry

if TYPE_CHECKING:
    from django.db.models import QuerySet

    from django_delayq.policies import TimeoutPolicy

    Progress = Callable[[int], object]

LEFT_ALONE: Final = timedelta(seconds=30)
"""So long nobody has gone on with a change: its process is taken for dead, and a worker goes on with it."""
BROUGHT_BACK: Final = 10_000
"""So many due rows are brought back at once when a policy goes on; the sweep brings the others, within its interval."""
PUSHED: Final = 1_000


def new_change(policy: TimeoutPolicy[Any], now: datetime, by: str, reason: str) -> PolicyChange:
    """An unsaved change of `policy`."""
    return PolicyChange(policy=policy.label, at=now, touched_at=now, by=by, reason=clipped(reason))


def begin_move(change: PolicyChange, using: str) -> None:
    """`change`, not yet saved, is about the rows that are there now: what is scheduled later knows of it already."""
    newest = Timeout.objects.using(using).order_by("-id").values_list("id", flat=True)
    change.last_place = newest.first() or 0


def unfinished(policy: TimeoutPolicy[Any], using: str) -> PolicyChange | None:
    """The change that still moves rows of `policy`; there is one at most."""
    return _unfinished(using).filter(policy__in=policy.labels).order_by("id").first()


def go_on_with_moves(using: str, policy: TimeoutPolicy[Any] | None = None, left_alone: timedelta = timedelta(0)) -> int:
    """Changes whose process died are carried through, of all policies or of one; returns how many.

    `left_alone`: only those that nobody has touched for so long. Does nothing inside a transaction.
    """
    if connections[using].in_atomic_block:
        return 0
    changes = _unfinished(using).order_by("id")
    if policy is not None:
        changes = changes.filter(policy__in=policy.labels)
    if left_alone:
        changes = changes.filter(touched_at__lt=database_now(using) - left_alone)
    found = list(changes)
    for change in found:
        run_move(change, using)
    return len(found)


def run_move(change: PolicyChange, using: str, progress: Progress | None = None) -> PolicyChange:
    """All rows of `change` are moved, and its policy goes on; inside a transaction: once that has committed.

    Returns the change as it is in the database now.
    """
    if connections[using].in_atomic_block:
        transaction.on_commit(lambda: _run(change.pk, using, progress), using=using, robust=True)
    else:
        _run(change.pk, using, progress)
    return PolicyChange.objects.using(using).get(pk=change.pk)


def _run(change_id: int, using: str, progress: Progress | None) -> None:
    while True:
        looked = _move_page(change_id, using)
        if looked is None:
            return
        if progress is not None:
            progress(looked)


def _move_page(change_id: int, using: str) -> int | None:
    """The next rows are moved and the place is kept, in one transaction; returns how many, None: all are moved."""
    with transaction_of(using):
        change = for_update(PolicyChange.objects.using(using).filter(pk=change_id), using).get()
        policy = registry.get(change.policy)
        if change.finished_at is not None or policy is None:
            return None
        rows = Timeout.objects.using(using).pending().of_labels(policy.labels)
        page = rows.filter(pk__gt=change.place, pk__lte=change.last_place).order_by("pk")
        ids = list(page.values_list("pk", flat=True)[: paging.CHUNK])
        change.touched_at = database_now(using)
        if ids:
            moved = _move_rows(ids, change, policy, using)
            change.place, change.moved = ids[-1], change.moved + moved
            change.unmoved += len(ids) - moved
        else:
            _finish(change, policy, using)
        change.save(using=using)
    return len(ids) or None


def _finish(change: PolicyChange, policy: TimeoutPolicy[Any], using: str) -> None:
    change.finished_at = change.touched_at
    if change.what != PolicyChange.What.RESUMED:
        return
    releasing = PolicyControl.objects.using(using).filter(policy__in=policy.labels, stop=PolicyControl.Stop.RELEASING)
    releasing.update(stop=PolicyControl.Stop.NONE, stopped_at=None, changed_at=change.touched_at)
    transaction.on_commit(lambda: bring_back(policy, using), using=using, robust=True)


def _move_rows(ids: list[int], change: PolicyChange, policy: TimeoutPolicy[Any], using: str) -> int:
    """Move those of `ids` that are still pending and have another deadline now; return how many."""
    page = paging.read_page(ids, using)
    moves = []
    for row in page.rows:
        try:
            due_at, run_at = _moments_of(row, change, policy, page)
        except InvalidDelay:
            continue  # farther away than a deadline can be: it stays where it is
        if (due_at, run_at) != (row.due_at, row.run_at):
            moves.append((row, due_at, run_at))
    at, by, reason = change.touched_at, change.by, change.reason
    return len(move_rows(moves, using, what="replanned", at=at, by=by, reason=reason))


def _moments_of(
    row: Timeout, change: PolicyChange, policy: TimeoutPolicy[Any], page: paging.Page
) -> tuple[datetime, datetime]:
    """The deadline and the next attempt of `row` after `change`."""
    details = change.details
    if details["move"] == "thaw":
        # Frozen is what it has lived through of the hold: an order of the last minute of it has not waited for hours.
        began = max(_moment(details["frozen_at"]), _counts_from(row))
        frozen = max(timedelta(0), _moment(details["thawed_at"]) - began)
        return shifted(row.due_at, frozen), shifted(row.run_at, frozen)
    if details["move"] == "shift":
        due_at = shifted(row.due_at, timedelta(microseconds=details["microseconds"]))
    else:
        due_at = _planned(row, details["after"], policy, page) or row.due_at
    return due_at, run_at_of(row, due_at)


def _counts_from(row: Timeout) -> datetime:
    """When the deadline of `row` was last counted from a present moment, and not from an earlier deadline."""
    anew = [_moment(event["at"]) for event in row.history if event.get("what") in {"rescheduled", "retried"}]
    return max([row.created_at, *anew])


def _planned(row: Timeout, after: int | None, policy: TimeoutPolicy[Any], page: paging.Page) -> datetime | None:
    """The deadline that the policy has for `row` with the delay `after`, in microseconds, or with its declared one."""
    obj = page.object_of(row) if callable(policy.after) else None
    if obj is None and callable(policy.after):
        return None
    in_force = None if after is None else timedelta(microseconds=after)
    return policy.due_of(obj, row.since_at or row.created_at, in_force)


def bring_back(policy: TimeoutPolicy[Any], using: str) -> None:
    """What is due of `policy` is looked at now, and not when the minute ends for which it was put aside.

    The first of it; should this fail, or be more, the sweep brings back the rest. Outside a transaction.
    """
    controls.forget()
    due = Timeout.objects.using(using).due().of_labels(policy.labels).order_by("run_at", "id")
    rows = list(due.values_list("id", "queue", "run_at")[:BROUGHT_BACK])
    for chunk in paging.chunks(rows, PUSHED):
        claiming.free([row_id for row_id, _, _ in chunk], using)
        # Not only earlier: who leases one just now may be about to put it aside for a minute, and loses it by this.
        outbox.push(using, [Change(queue, row_id, outbox.due_ms_of(run_at)) for row_id, queue, run_at in chunk])


def _unfinished(using: str) -> QuerySet[PolicyChange]:
    return PolicyChange.objects.using(using).filter(finished_at__isnull=True)


def _moment(text: str) -> datetime:
    moment = parse_datetime(text)
    assert moment is not None
    return moment
