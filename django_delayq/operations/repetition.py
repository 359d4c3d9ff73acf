"""Repeat settled timeouts, by new rounds."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.db.models import QuerySet

from django_delayq import signals
from django_delayq.delays import check_moment
from django_delayq.ledger import writing
from django_delayq.ledger.history import record
from django_delayq.ledger.locking import database_of
from django_delayq.ledger.subjects import subject_at
from django_delayq.models import Timeout
from django_delayq.operations.timeouts import (
    Action,
    Context,
    Progress,
    Refusal,
    Result,
    Target,
    refuse_round,
    run_action,
)
from django_delayq.policies import registry


def refire(
    target: Target,
    *,
    by: str,
    reason: str = "",
    at: datetime | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Repeat settled timeouts: each gets a new round, a new row with the same payload, key and queue.

    The settled row stays, and the histories of both name each other. The new one has all its attempts, and its own
    `idempotency_key`, so that effects outside the database are repeated. A worker fires it if `when` holds. Refused if
    the object is gone, the policy is no longer declared, or a round is pending. Of several rounds of one object only
    the newest is repeated. The other arguments and errors are those of `cancel`.

    Args:
        at: the deadline of the new rounds; by default, and if it has passed, now.

    Raises:
        InvalidDelay: `at` is not a datetime, its awareness does not fit `USE_TZ`, or it is too far in the future.
    """
    wanted = None if at is None else check_moment(at, "at")

    def refuse(row: Timeout, context: Context) -> Refusal | None:
        return refuse_round(row, context) if row.is_settled else Refusal.NOT_SETTLED

    def write(rows: list[Timeout], refused: list[Timeout], context: Context) -> list[Timeout]:
        due_at = max(wanted or context.now, context.now)
        new = [_repetition(row, due_at, context) for row in rows]
        writing.insert(new, context.using)
        for row, repetition in zip(rows, new, strict=True):
            record(row, "refired", timeout=repetition.pk, to=due_at, **context.event)
            record(repetition, "refires", timeout=row.pk, **context.event)
        writing.write_histories([*rows, *new], context.using)
        return new

    if isinstance(target, QuerySet) and target.model is Timeout and not target.query.is_sliced:
        # Rows are read page by page. A worker may have fired new rounds of the first pages when the last one is read,
        # and they would be repeated again and again.
        newest = Timeout.objects.using(database_of(Timeout, target)).order_by("-pk").values_list("pk", flat=True)
        target = target.filter(pk__lte=newest.first() or 0)
    action = Action("refire", signals.timeout_scheduled, refuse, write)
    return run_action(target, action, by=by, reason=reason, dry_run=dry_run, progress=progress)


def _repetition(row: Timeout, due_at: datetime, context: Context) -> Timeout:
    """Return an unsaved round like `row`.

    It counts from the present value of `since`: arming leaves a pending round with this value alone, although a former
    round has closed it, and would move or cancel one with another value.
    """
    policy: Any = registry.get(row.policy)
    obj = context.page.object_of(row)
    subject = subject_at(policy, obj.pk, row.key, context.using)
    new = writing.new_row(subject, due_at, policy.since_of(obj), payload=row.payload, reason=context.reason)
    new.queue = row.queue
    return new
