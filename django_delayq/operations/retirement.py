"""Cancel the pending timeouts of a policy that is not declared any more."""

from __future__ import annotations

from collections.abc import Callable

from django.db.models import F
from django.utils.translation import gettext as _

from django_delayq import signals
from django_delayq.clock import database_now
from django_delayq.ledger import writing
from django_delayq.ledger.history import clipped, record
from django_delayq.ledger.locking import database_of
from django_delayq.ledger.search import labels_in
from django_delayq.models import PolicyChange, Timeout
from django_delayq.operations.policies import PolicyConflict
from django_delayq.operations.timeouts import Action, Context, Refusal, Result, checked_actor, run_action
from django_delayq.policies import get_policy, registry


def retire(
    label: str,
    *,
    by: str,
    reason: str = "",
    dry_run: bool = False,
    progress: Callable[[Result], object] | None = None,
) -> Result:
    """Cancel the pending timeouts of the policy `label`, which is not declared any more, with the cause `retired`.

    Until then workers leave them pending, because another release may declare the policy. Dead rows stay. Each page of
    500 rows is one transaction, or part of the caller's. A `PolicyChange` counts the rows, page by page, and the call
    may be interrupted and repeated.

    Args:
        label: the label that the rows have, such as `shop.order.cancel_unpaid`.
        by, reason: see `operations`.
        dry_run: count, and write nothing.
        progress: called with the result of each page, after its commit.

    Raises:
        PolicyConflict: a policy with this label, or with this alias, is declared. Nothing was changed.
        UnknownPolicy: the ledger has no timeout with this label.
    """
    by, using, policy = checked_actor(by), database_of(Timeout), registry.get(label)
    if policy is not None:
        words = _("{policy} is declared in {handler}. Remove the declaration first.")
        raise PolicyConflict(words.format(policy=policy.label, handler=policy.handler_path))
    ledger = Timeout.objects.using(using)
    if label not in labels_in(ledger):
        get_policy(label)  # raises UnknownPolicy, with near names
    rows, now = ledger.pending().of_labels([label]), database_now(using)
    change = PolicyChange(policy=label, what=PolicyChange.What.RETIRED, at=now, touched_at=now, finished_at=now)
    change.by, change.reason = by, clipped(reason)

    def refuse(row: Timeout, context: Context) -> Refusal | None:
        return {Timeout.State.PENDING: None, Timeout.State.FIRING: Refusal.FIRING}.get(
            Timeout.State(row.state), Refusal.SETTLED
        )

    def write(accepted: list[Timeout], refused: list[Timeout], context: Context) -> None:
        for row in accepted:
            record(row, "retired", **context.event)
        writing.cancel_rows(accepted, using, context.reason, context.now, cause=Timeout.Cause.RETIRED)
        # Each page is counted in its transaction: a process that dies leaves a record of what it has done.
        if change.pk is None:
            change.save(using=using)
        PolicyChange.objects.using(using).filter(pk=change.pk).update(moved=F("moved") + len(accepted))

    action = Action("retire", signals.timeout_cancelled, refuse, write)
    return run_action(rows, action, by=by, reason=reason, dry_run=dry_run, progress=progress)
