"""Changes of policies that move pending timeouts page by page, each exactly once, even if the process dies.

The `PolicyChange` that moves rows stores how far it has come. Each page of 500 updates that position in the transaction
that moves its rows, under the lock of the change. So each page is moved by one process only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final, TypeAlias

from django.db import Error as DatabaseError
from django.db import connections, transaction
from django.db.models import F, Q, QuerySet
from django.utils.translation import gettext as _

from django_delayq.arming.holding import Facts
from django_delayq.engine.records import Change
from django_delayq.exceptions import DelayqError, InvalidDelay
from django_delayq.ledger import outbox, paging
from django_delayq.ledger.controls import lock_control, stop_cache
from django_delayq.ledger.db_connections import use_after_commit
from django_delayq.ledger.locking import for_update, read_committed, transaction_of
from django_delayq.ledger.routing import database_of
from django_delayq.ledger.writing import move_rows, run_at_of, write_plans
from django_delayq.models import WAITING, PolicyChange, PolicyControl, Timeout
from django_delayq.operations.replanning import Plans, failure, log_failures
from django_delayq.operations.runner import checked_actor
from django_delayq.policy.policies import TimeoutPolicy, get_policy, registry
from django_delayq.rounds import events
from django_delayq.rounds.events import Plan
from django_delayq.rounds.memory import clipped
from django_delayq.sql import statements
from django_delayq.sql.now import database_now

logger = logging.getLogger("django_delayq.operations")
Stop, What = PolicyControl.Stop, PolicyChange.What

MoveProgress: TypeAlias = Callable[[int], object]
"""Called with the number of rows examined, page by page."""

ABANDONED_AFTER: Final = timedelta(seconds=30)
"""After this time without progress the process of a change counts as dead, and a worker continues the change."""
MISSED_FOR: Final = timedelta(minutes=10)
"""For this time after a change of a delay, workers move rows of transactions that were open then."""
MISSED_EVERY: Final = timedelta(minutes=1)
"""How late a row may be moved whose transaction was open during the change."""
SCHEDULED_WITHIN: Final = timedelta(seconds=1)
"""A row without `since` is stored so soon after its deadline was computed; a later one would not be found as missed."""
MAX_REQUEST_SECONDS: Final = 2.0
"""A request moves the rows of a policy for at most this long; a worker moves the rest."""


class TimeIsUp(Exception):
    """The request has moved rows for as long as it may. `run_move` then returns the unfinished change."""


def time_limit(seconds: float = MAX_REQUEST_SECONDS) -> MoveProgress:
    """Return a `progress` that raises TimeIsUp after so many seconds, between two pages."""
    end = time.monotonic() + seconds

    def check(_rows: int) -> None:
        if time.monotonic() > end:
            raise TimeIsUp

    return check


class PolicyConflict(DelayqError):
    """The operation contradicts the state of the policy. Nothing was changed."""


def unfinished(using: str, policy: TimeoutPolicy[Any] | None = None) -> QuerySet[PolicyChange]:
    """Return the changes that still move rows: of all policies, or of one, which has at most one."""
    changes = PolicyChange.objects.using(using).filter(finished_at__isnull=True).order_by("id")
    return changes if policy is None else changes.filter(policy__in=policy.labels)


def continue_moves(using: str, policy: TimeoutPolicy[Any] | None = None, left_alone: timedelta = timedelta(0)) -> int:
    """Complete the unfinished changes of all policies, or of one; return how many.

    `left_alone`: only those without progress for so long, whose process has died. Does nothing inside a transaction.
    """
    if connections[using].in_atomic_block:
        return 0
    changes = list(unfinished(using, policy))
    if changes and left_alone:
        now = database_now(using)  # before the time of a change only if the clock was set back
        changes = [change for change in changes if not now - left_alone <= change.touched_at <= now]
    return len([run_move(change, using) for change in changes])


@contextmanager
def control_of(policy: str | TimeoutPolicy[Any], by: str, reason: str) -> Iterator[tuple[PolicyControl, PolicyChange]]:
    """Yield the locked control of `policy` and a new change; save both after the block, nothing without `what`."""
    found, actor = get_policy(policy), checked_actor(by)
    using = database_of(found.concrete_model)
    continue_moves(using, found)
    # The second one is a savepoint: a refusal below leaves nothing behind in a caller's transaction.
    with transaction_of(using), transaction.atomic(using=using):
        control, now = lock_control(found, using)
        if read_committed(unfinished(using, found), using).exists():
            words = _("An earlier change of {policy} is still moving deadlines. Wait until it is finished.")
            raise PolicyConflict(words.format(policy=found.label))
        change = PolicyChange(policy=found.label, at=now, touched_at=now, by=actor, reason=clipped(reason))
        was_stopped = control.stop != Stop.NONE
        yield control, change
        if change.what:
            control.changed_at = now
            # The actor and reason of a stop are kept as long as it lasts.
            if not was_stopped or change.what in {What.PAUSED, What.HELD, What.RESUMED}:
                keeps_reason = was_stopped and change.what != What.RESUMED
                control.by, control.reason = actor, change.reason or (control.reason if keeps_reason else "")
            change.save(using=using)
            control.save(using=using)
        else:  # also undo the row that `lock_control` may have created for a policy that no operator has changed
            transaction.set_rollback(True, using=using)
    stop_cache.forget()

    def after_commit() -> None:
        stop_cache.forget()  # another thread of this process may have read and cached the state before the commit
        if change.what:
            logger.info(
                "%s by %s: %s %s",
                *(change.policy, change.by, change.what, change.reason),
                extra={"event": "policy_changed", "policy": change.policy, "what": change.what, "by": change.by},
            )

    transaction.on_commit(after_commit, using=using, robust=True)


def run_move(change: PolicyChange, using: str, progress: MoveProgress | None = None) -> PolicyChange:
    """Move all rows of `change`, then let its policy continue; inside a transaction: after its commit.

    Returns the change as the database has it now.
    """

    def move() -> None:
        with suppress(TimeIsUp):
            while examined := _move_page(change.pk, using):
                if progress is not None:
                    progress(examined)

    if connections[using].in_atomic_block:
        use_after_commit(move, using)
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
        if not change.cursor and _is_repeatable(change):
            # Also rows that were scheduled by the former delay while this one was being committed.
            change.last_id = paging.newest_id(using)
        rows = Timeout.objects.using(using).waiting().of_labels(policy.labels)
        page = rows.filter(pk__gt=change.cursor, pk__lte=change.last_id).order_by("pk")
        ids = list(page.values_list("pk", flat=True)[: statements.CHUNK])
        change.touched_at = database_now(using)
        if ids:
            moved = _move_rows(paging.read_page(ids, using), change, policy)
            change.cursor, change.moved = ids[-1], change.moved + moved
            change.unmoved += len(ids) - moved
        else:
            change.finished_at = ended_at = change.touched_at
            if change.what == What.RESUMED:
                control = PolicyControl.objects.using(using).filter(policy__in=policy.labels, stop=Stop.RELEASING)
                control.update(stop=Stop.NONE, stopped_at=None, changed_at=ended_at, resumed_at=ended_at)
                use_after_commit(lambda: wake_for(policy, using), using)
        change.save(using=using)
    return len(ids)


def _is_repeatable(change: PolicyChange) -> bool:
    """Return whether a row may be moved twice: its deadline is computed again, and none that was set by hand is."""
    return change.what == What.DELAY and change.shift is None and not change.hand_set


def move_missed(using: str) -> int:
    """Move rows that follow a former delay because their transaction was open when it was changed; return how many.

    The transaction had read the former delay, and committed after the pages of the change were read. Its rows are due
    the former delay after their `since`, or else after they were scheduled, and were never moved.
    """
    now, total = database_now(using), 0
    delays = PolicyChange.objects.using(using).filter(what=What.DELAY)
    recent = Q(touched_at__gt=now - MISSED_EVERY, touched_at__lte=now)  # later only if the clock was set back
    moving = delays.filter(~recent, finished_at__gt=now - MISSED_FOR, former_delay__isnull=False)
    for change in moving.order_by("id"):
        policy, former = registry.get(change.policy), change.former_delay
        claimed = delays.filter(pk=change.pk, touched_at=change.touched_at).update(touched_at=now)  # by one worker
        if not claimed or policy is None or former is None:
            continue
        if delays.filter(policy__in=policy.labels, pk__gt=change.pk).exists():
            continue
        change.touched_at = now
        rows = Timeout.objects.using(using).waiting().of_labels(policy.labels)
        about = (F("created_at") + former - SCHEDULED_WITHIN, F("created_at") + former)
        unset = Q(since_at__isnull=True, terms__isnull=False, due_at__range=about)
        rows = rows.filter(Q(due_at=F("since_at") + former) | unset, created_at__lt=change.finished_at)
        move = partial(_move_missed, change=change, policy=policy, former=former)
        total += sum(paging.each_page(rows, move, by_id="pk"))
    return total


def _move_missed(page: paging.Page, change: PolicyChange, policy: TimeoutPolicy[Any], former: timedelta) -> int:
    """Move those rows of `page` that are due the delay `former` after their `since`, unmoved and without a snooze."""
    rows = [row for row in page.rows if row.since_at is None or row.due_at - row.since_at == former]
    rows = [row for row in rows if row.ready_at is None]
    moved = _move_rows(replace(page, rows=rows), change, policy)
    PolicyChange.objects.using(page.using).filter(pk=change.pk).update(moved=F("moved") + moved)
    return moved


def _move_rows(page: paging.Page, change: PolicyChange, policy: TimeoutPolicy[Any]) -> int:
    """Move the rows of `page`; return how many got another deadline.

    The clock of a row that is held stays stopped. The end of a hold leaves it alone; a delay changes the rest.
    """
    reason = clipped("; ".join(filter(None, (change.details.get("held_reason"), change.reason))))
    event: dict[str, Any] = {"at": change.touched_at, "by": change.by, "reason": reason}
    facts = Facts.of_page(page)
    if change.held_from is not None:
        moved = list(moves_of_hold(facts, change, policy))
        unmoved = [row for row in page.rows if row.hold_ended_at == change.touched_at]
        paging.update_each(unmoved, page.using, WAITING)
        return len(move_rows(moved, facts, what="hold_ended", **event))
    if change.shift is not None:
        return len(move_rows(list(_shifted(facts, change.shift)), facts, what="replanned", **event))
    rows = [row for row in page.rows if change.hand_set or row.is_computed]
    plans = Plans(facts, rows)
    found = [(row, plan) for row in rows if isinstance(plan := plans.of(row), Plan) and not plan.is_of(row)]
    return len(write_plans(found, facts, what="replanned", **event))


Moves: TypeAlias = Iterator[tuple[Timeout, datetime, datetime]]
"""Rows with their new `due_at` and `run_at`."""


def moves_of_hold(facts: Facts, change: PolicyChange, policy: TimeoutPolicy[Any]) -> Moves:
    """Yield the rows of a page that the end of a hold moves. Note it in others: in another calendar they might move."""
    failed = list[str]()
    for row in [each for each in facts.rows if not each.has_stopped_clock]:
        begin = max(change.held_from, facts.counts_from(row, policy))
        try:
            due_at = events.pass_hold(row, begin, change.held_until, facts, at=change.touched_at)
        except InvalidDelay:
            continue  # the deadline would be too far in the future: it stays where it is
        except DatabaseError:
            raise
        except Exception as error:  # noqa: BLE001 - a calendar of the application; else it would stop the change
            failed.append(failure(row, error))
            continue
        if due_at != row.due_at:
            yield row, due_at, row.run_at if row.is_requested else run_at_of(row, due_at, facts)
    log_failures(policy.label, failed)


def _shifted(facts: Facts, by: timedelta) -> Moves:
    for row in facts.rows:
        with suppress(InvalidDelay):  # too far in the future: it stays where it is
            due_at = events.shift(row, by, facts)
            if by:
                yield row, due_at, run_at_of(row, due_at, facts)


def wake_for(policy: TimeoutPolicy[Any], using: str) -> None:
    """Make workers check now whether `policy` has due timeouts, because it was resumed. Call it outside a transaction.

    Only a hint: without it they notice after a few seconds.
    """
    stop_cache.forget()
    due = Timeout.objects.using(using).due().of_labels(policy.labels).order_by("run_at", "id")
    first = due.values_list("queue", "policy", "id")[:1]
    # Due in 1970: a message is sent if the line has work earlier than before.
    outbox.push(using, [Change(*row, due_ms=0) for row in first])
