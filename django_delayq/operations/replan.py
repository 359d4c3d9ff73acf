"""Move the pending rows of a policy, page by page, each row exactly once, even if the process dies.

The `PolicyChange` that moves rows stores how far it has come. Each page of 500 updates that position in the transaction
that moves its rows, under the lock of the change. So each page is moved by one process only.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Final, TypeAlias

from django.db import connections, transaction
from django.db.models import QuerySet

from django_delayq.clock import database_now
from django_delayq.delays import shifted
from django_delayq.engine import Change
from django_delayq.exceptions import InvalidDelay
from django_delayq.ledger import claiming, outbox, paging
from django_delayq.ledger.controls import stop_cache
from django_delayq.ledger.history import moment
from django_delayq.ledger.locking import for_update, transaction_of
from django_delayq.ledger.writing import move_rows, run_at_of
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from django_delayq.policies import TimeoutPolicy, registry

Progress: TypeAlias = Callable[[int], object]
"""Called with the number of rows examined, page by page."""

ABANDONED_AFTER: Final = timedelta(seconds=30)
"""After this time without progress the process of a change counts as dead, and a worker continues the change."""
MAX_REQUEUED: Final = 10_000
"""So many due rows are requeued at once when a policy is resumed; the next sweep requeues the others."""
REQUEUE_PAGE: Final = 1_000


def unfinished(using: str, policy: TimeoutPolicy[Any] | None = None) -> QuerySet[PolicyChange]:
    """Return the changes that still move rows: of all policies, or of one, which has at most one."""
    changes = PolicyChange.objects.using(using).filter(finished_at__isnull=True).order_by("id")
    return changes if policy is None else changes.filter(policy__in=policy.labels)


def continue_moves(using: str, policy: TimeoutPolicy[Any] | None = None, left_alone: timedelta = timedelta(0)) -> int:
    """Complete the changes of all policies, or of one, whose process died; return how many.

    `left_alone`: only those without progress for so long. Does nothing inside a transaction.
    """
    if connections[using].in_atomic_block:
        return 0
    changes = list(unfinished(using, policy))
    if changes and left_alone:
        until = database_now(using) - left_alone
        changes = [change for change in changes if change.touched_at < until]
    return len([run_move(change, using) for change in changes])


def begin_move(change: PolicyChange, using: str) -> None:
    """Limit the unsaved `change` to the present rows; rows that are scheduled later already follow it."""
    newest = Timeout.objects.using(using).order_by("-id").values_list("id", flat=True)
    change.last_place = newest.first() or 0


def run_move(change: PolicyChange, using: str, progress: Progress | None = None) -> PolicyChange:
    """Move all rows of `change`, then let its policy continue; inside a transaction: after its commit.

    Returns the change as the database has it now.
    """

    def move() -> None:
        while examined := _move_page(change.pk, using):
            if progress is not None:
                progress(examined)

    if connections[using].in_atomic_block:
        transaction.on_commit(move, using=using, robust=True)
    else:
        move()
    return PolicyChange.objects.using(using).get(pk=change.pk)


def _move_page(change_id: int, using: str) -> int:
    """Move the next rows and store the position, in one transaction; return how many were examined, 0 at the end."""
    with transaction_of(using):
        change = for_update(PolicyChange.objects.using(using).filter(pk=change_id), using).get()
        policy = registry.get(change.policy)
        if change.finished_at is not None or policy is None:
            return 0
        rows = Timeout.objects.using(using).pending().of_labels(policy.labels)
        page = rows.filter(pk__gt=change.place, pk__lte=change.last_place).order_by("pk")
        ids = list(page.values_list("pk", flat=True)[: paging.CHUNK])
        change.touched_at = database_now(using)
        if ids:
            moved = _move_rows(ids, change, policy, using)
            change.place, change.moved = ids[-1], change.moved + moved
            change.unmoved += len(ids) - moved
        else:
            change.finished_at = change.touched_at
            if change.what == PolicyChange.What.RESUMED:
                stop = PolicyControl.Stop
                control = PolicyControl.objects.using(using).filter(policy__in=policy.labels, stop=stop.RELEASING)
                control.update(stop=stop.NONE, stopped_at=None, changed_at=change.touched_at)
                transaction.on_commit(lambda: requeue_due(policy, using), using=using, robust=True)
        change.save(using=using)
    return len(ids)


def _move_rows(ids: list[int], change: PolicyChange, policy: TimeoutPolicy[Any], using: str) -> int:
    page = paging.read_page(ids, using)
    moves = []
    for row in page.rows:
        try:
            due_at, run_at = _replanned(row, change, policy, page)
        except InvalidDelay:
            continue  # the deadline would be too far in the future: it stays where it is
        if (due_at, run_at) != (row.due_at, row.run_at):
            moves.append((row, due_at, run_at))
    at, by, reason = change.touched_at, change.by, change.reason
    return len(move_rows(moves, using, what="replanned", at=at, by=by, reason=reason))


def _replanned(
    row: Timeout, change: PolicyChange, policy: TimeoutPolicy[Any], page: paging.Page
) -> tuple[datetime, datetime]:
    details = change.details
    if details["move"] == "thaw":  # after a hold; these words are stored, and unfinished changes have them
        held_from, held_until = (moment(details[name]) for name in ("frozen_at", "thawed_at"))
        # A row that was scheduled during the hold moves only by the rest of it.
        restarts = (event["at"] for event in row.history if event.get("what") in {"rescheduled", "retried"})
        counts_from = max([row.created_at, *map(moment, restarts)])
        shift = max(timedelta(0), held_until - max(held_from, counts_from))
        return shifted(row.due_at, shift), shifted(row.run_at, shift)
    due_at = row.due_at
    if details["move"] == "shift":
        due_at = shifted(due_at, timedelta(microseconds=details["microseconds"]))
    else:
        obj = page.object_of(row) if callable(policy.after) else None
        after = None if details["after"] is None else timedelta(microseconds=details["after"])
        if obj is not None or not callable(policy.after):
            planned = policy.due_of(obj, row.since_at or row.created_at, after) or due_at
            # A row without `since` counts from when it was scheduled, and is never due before.
            due_at = planned if row.since_at is not None or planned >= row.created_at else due_at
    return due_at, run_at_of(row, due_at)


def requeue_due(policy: TimeoutPolicy[Any], using: str) -> None:
    """Make workers read the due rows of `policy` now instead of up to a minute later. Call it outside a transaction.

    Only the first rows; if this fails or there are more, the sweep requeues the rest.
    """
    stop_cache.forget()
    due = Timeout.objects.using(using).due().of_labels(policy.labels).order_by("run_at", "id")
    rows = list(due.values_list("id", "queue", "run_at")[:MAX_REQUEUED])
    for chunk in paging.chunks(rows, REQUEUE_PAGE):
        claiming.requeue([row_id for row_id, _, _ in chunk], using)
        # Not an "only earlier" change: a worker that leases the row now may be about to defer it for a minute. This
        # change makes that lease stale.
        outbox.push(using, [Change(queue, row_id, outbox.due_ms_of(run_at)) for row_id, queue, run_at in chunk])
