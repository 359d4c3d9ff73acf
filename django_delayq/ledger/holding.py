"""The statements that stop and resume the clocks of rows: pending ones become held, and held ones pending.

A held row keeps its slot, so that every statement that finds a row by its slot finds it. Its `run_at` is `far()`, so
that no worker and no sweep finds it. The caller has locked the objects, and then the rows.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django_delayq.ledger.columns import far
from django_delayq.ledger.history import clipped, record, with_stop
from django_delayq.ledger.outbox import push_rows
from django_delayq.ledger.paging import update_each
from django_delayq.ledger.planned import set_next
from django_delayq.models import WAITING, Timeout
from django_delayq.policy.policies import registry
from django_delayq.rounds.outcomes import LEASE, RUNNING_CLOCK

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime


def hold_rows(rests: Iterable[tuple[Timeout, timedelta]], using: str, *, at: datetime, **event: Any) -> list[Timeout]:
    """Stop the clocks of rows, pending or held, each with the rest of its time; return the rows.

    Those that keep their deadline are paused: the rest is how much later than that their next attempt is.

    Args:
        rests: the rows are locked. Those that are held may have another end, or another rest.
        using: the database.
        at: now.
        **event: `by` and `reason`, see `history.record`.
    """
    rows = []
    for row, rest in rests:
        details = {"what": "paused"} if row.keeps_deadline else {"what": "held", "rest": rest.total_seconds()}
        record(row, at=at, until=row.held_until, **details, **event)
        row.state, row.run_at, row.remaining, row.held_at = Timeout.State.HELD.value, far(), rest, row.held_at or at
        vars(row).update(LEASE)
        rows.append(row)
    update_each(rows, using, WAITING)
    push_rows(rows, using)  # which removes their entries
    return rows


def resume_rows(
    deadlines: Iterable[tuple[Timeout, datetime, datetime]], using: str, *, at: datetime, **event: Any
) -> list[Timeout]:
    """Let the clocks of held, locked rows run: each gets its deadline, and since when it counts; return the rows.

    Those that have kept their deadline keep the time of their next attempt, too, unless it has passed. Others wait
    until `ready_at` for a retry or a snooze.

    The other arguments are those of `hold_rows`.
    """
    rows = list[Timeout]()
    for row, counts_from, due_at in deadlines:
        record(row, "resumed", at, **{"from": row.due_at, "to": due_at, **event})
        if not row.keeps_deadline:
            row.stops = with_stop(row.stops, row.held_at or counts_from, counts_from)
        planned_at, changed = set_next(row, due_at)
        run_at = planned_at
        if row.keeps_deadline:
            run_at = max(planned_at + (row.remaining or timedelta(0)), counts_from)
        else:
            row.asked_due_at, row.restarted_at = row.asked_due_at or row.due_at, counts_from
            run_at = planned_at if changed else max(planned_at, row.ready_at or planned_at)
        vars(row).update(RUNNING_CLOCK)
        policy = registry.get(row.policy)
        row.due_at, row.run_at = due_at, policy.opening(run_at) if policy else run_at
        row.ready_at = counts_from
        vars(row).update(LEASE)
        rows.append(row)
    update_each(rows, using, WAITING)
    push_rows(rows, using)
    return rows


def note_holds(rows: Sequence[Timeout], using: str, reason: str = "", **event: Any) -> None:
    """Write by what the held, locked `rows` are held, which the caller has changed."""
    for row in rows:
        record(row, reason=clipped(reason), **event)
    update_each(rows, using, (Timeout.State.HELD,))
