"""Pause, hold and resume policies, change their delays, and retire those that are not declared any more.

No timeout of a stopped policy fires. Its rows stay pending and can be cancelled or postponed. A worker that reserves a
row after the commit does not fire it; rows reserved earlier are completed. A pause leaves deadlines where they are, so
that timeouts that became due meanwhile fire when it ends. A hold stops the clock: when it ends, each pending deadline
moves by its part of the hold.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal

from django.db import transaction
from django.db.models import F, Q
from django.utils.translation import gettext as _

from django_delayq import clock, signals
from django_delayq.clock import database_now
from django_delayq.delays import check_length, check_moment, shifted
from django_delayq.exceptions import DelayqError, InvalidDelay
from django_delayq.ledger import writing
from django_delayq.ledger.controls import PolicyState, is_stop_in_force, lock_control, policy_state, stop_cache
from django_delayq.ledger.history import clipped, iso, record
from django_delayq.ledger.locking import database_of, transaction_of
from django_delayq.ledger.search import count_each, labels_in
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from django_delayq.operations.replan import Progress, begin_move, continue_moves, requeue_due, run_move, unfinished
from django_delayq.operations.runner import Action, Context, Result, checked_actor, refuse_unless_pending, run_action
from django_delayq.policies import TimeoutPolicy, get_policy, registry

logger = logging.getLogger("django_delayq.steering")
Stop, What = PolicyControl.Stop, PolicyChange.What
Mode = Literal["keep", "recompute", "shift"]
MODES: Final[tuple[Mode, ...]] = ("keep", "recompute", "shift")
MAX_COUNT: Final = 100_000
"""A preview counts at most this many rows."""


class PolicyConflict(DelayqError):
    """The operation contradicts the state of the policy. Nothing was changed."""


def pause(
    policy: str | TimeoutPolicy[Any],
    *,
    by: str,
    reason: str = "",
    until: datetime | Literal["keep"] | None = "keep",
) -> PolicyChange | None:
    """Stop `policy` until `resume`, or until a datetime. What falls due meanwhile fires afterwards.

    Pausing a paused policy again changes what is given and keeps the rest: its end, its reason and its beginning.

    Args:
        policy, by, reason: see `operations`. Without a reason, that of the pause in force remains.
        until: a datetime in the future, by the database's clock; None: until it is resumed. `"keep"`: the end of
            the pause that is in force, or none.

    Returns:
        The change; None: the policy was paused like this already.

    Raises:
        InvalidDelay: `until` is not a datetime, has passed, or its awareness does not fit `USE_TZ`.
        PolicyConflict: it is held, or being released. Only `resume` ends a hold, as it decides about the deadlines.
    """
    if until is not None and until != "keep" and check_moment(until, "until") <= clock.now():
        raise InvalidDelay(_("{moment} is in the past.").format(moment=until))
    with control_of(policy, by, reason) as (control, change):
        if control.stop not in (Stop.NONE, Stop.PAUSED):
            words = _("{policy} is {stop}: resume it first.")
            raise PolicyConflict(words.format(policy=control.policy, stop=control.get_stop_display()))
        is_stopped = control.stop != Stop.NONE
        if until == "keep":
            until = control.until
        if is_stopped and until == control.until and clipped(reason) in {"", control.reason}:
            return None
        change.details = {"until": iso(until), **(_previous(control) if is_stopped else {})}
        if not is_stopped:
            control.stopped_at = change.at
        control.stop, control.until = Stop.PAUSED, until
        change.what, change.finished_at = What.PAUSED, change.at
    return change


def hold(policy: str | TimeoutPolicy[Any], *, by: str, reason: str = "") -> PolicyChange | None:
    """Stop `policy` until `resume`, which then moves all pending deadlines by the length of the hold.

    A pause becomes a hold that begins now and has no end. Its reason remains unless another one is given. Holding a
    held policy again changes its reason only. Returns the change; None: the policy was held like this already.
    Raises PolicyConflict while it is being released.
    """
    with control_of(policy, by, reason) as (control, change):
        if control.stop == Stop.HELD and clipped(reason) in {"", control.reason}:
            return None
        change.details = _previous(control) if control.stop != Stop.NONE else {}
        if control.stop != Stop.HELD:
            control.stopped_at = change.at
        control.stop, control.until = Stop.HELD, None
        change.what, change.finished_at = What.HELD, change.at
    return change


def resume(
    policy: str | TimeoutPolicy[Any],
    *,
    by: str,
    reason: str = "",
    shift: bool = True,
    progress: Progress | None = None,
) -> PolicyChange | None:
    """Let `policy` continue; due timeouts fire within two seconds. Returns the change; None: it was not stopped.

    After a hold its pending rows are moved first, page by page; it continues when all are moved. If this process dies
    meanwhile, the next call or, after half a minute, a worker completes the change; no row is moved twice. Inside a
    transaction the rows are moved after its commit.

    Args:
        policy, by, reason: see `operations`.
        shift: False: after a hold, deadlines stay where they are, and timeouts that became due meanwhile fire.
        progress: called with the number of rows examined, page by page.
    """
    found = get_policy(policy)
    using = database_of(found.concrete_model)
    earlier = unfinished(using, found).first()
    if earlier is not None and earlier.what == What.RESUMED:
        return run_move(earlier, using, progress)
    with control_of(found, by, reason) as (control, change):
        if control.stop == Stop.NONE:
            return None
        moves = control.stop == Stop.HELD and control.stopped_at is not None and shift
        change.what = What.RESUMED
        since = iso(control.stopped_at)
        change.details = {"was": str(control.stop), "since": since}
        if moves:
            change.details |= {"move": "thaw", "frozen_at": since, "thawed_at": iso(change.at)}
            begin_move(change, using)
            control.stop = Stop.RELEASING
        else:
            control.stop, control.stopped_at, change.finished_at = Stop.NONE, None, change.at
        control.until = None
    if moves:
        return run_move(change, using, progress)
    transaction.on_commit(lambda: requeue_due(found, using), using=using, robust=True)
    return change


@contextmanager
def control_of(policy: str | TimeoutPolicy[Any], by: str, reason: str) -> Iterator[tuple[PolicyControl, PolicyChange]]:
    """Yield the locked control of `policy` and a new change; save both after the block, the change only with `what`.

    A pause that is over is removed from the control before.
    """
    found, actor = get_policy(policy), checked_actor(by)
    using = database_of(found.concrete_model)
    continue_moves(using, found)
    # The second one is a savepoint: a refusal below leaves nothing behind in a caller's transaction.
    with transaction_of(using), transaction.atomic(using=using):
        control = lock_control(found, using)
        if unfinished(using, found).exists():
            words = _("An earlier change of {policy} is still moving deadlines. Wait until it is finished.")
            raise PolicyConflict(words.format(policy=found.label))
        now = database_now(using)
        change = PolicyChange(policy=found.label, at=now, touched_at=now, by=actor, reason=clipped(reason))
        was_stopped = is_stop_in_force(control, now)
        if not was_stopped:
            control.stop, control.until = Stop.NONE, None
        yield control, change
        if change.what:
            control.changed_at = now
            # The actor and reason of a stop are kept as long as it lasts.
            if not was_stopped or change.what in {What.PAUSED, What.HELD, What.RESUMED}:
                keeps_reason = was_stopped and change.what != What.RESUMED
                control.by, control.reason = actor, change.reason or (control.reason if keeps_reason else "")
            change.save(using=using)
        control.save(using=using)
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


def _previous(control: PolicyControl) -> dict[str, Any]:
    return {
        "was": str(control.stop),
        "since": iso(control.stopped_at),
        "was_until": iso(control.until),
        "was_reason": control.reason,
    }


@dataclass(frozen=True, slots=True)
class DelayPreview:
    """The effect of another delay on pending timeouts.

    Attributes:
        before: the delay in force; None: it differs from object to object.
        after: the new delay; None: as before.
        pending: the number of pending timeouts, at most `MAX_COUNT`.
        overdue: how many of their new deadlines have already passed; None: it cannot be computed beforehand.
        is_capped: more than `MAX_COUNT` are pending.
    """

    before: timedelta | None
    after: timedelta | None
    mode: Mode
    pending: int
    overdue: int | None
    is_capped: bool


def preview_delay(policy: str | TimeoutPolicy[Any], after: timedelta | None, mode: Mode = "recompute") -> DelayPreview:
    """Return what `change_delay` would do. Writes nothing, and raises the same."""
    found = get_policy(policy)
    using = database_of(found.concrete_model)
    before, now = policy_state(found, using).delay, clock.now()
    new = _new_delay(found, after, mode, before)
    rows = Timeout.objects.using(using).filter(state=Timeout.State.PENDING).of_labels(found.labels)
    rows = rows.order_by("policy", "state", "run_at", "id")
    wanted = {"pending": rows}
    if mode == "keep":
        wanted["overdue"] = rows.filter(due_at__lte=now)
    elif mode == "shift" and new is not None and before is not None:
        wanted["overdue"] = rows.filter(due_at__lte=now - (new - before))
    elif new is not None:
        begun = now - new
        # A row without `since` counts from when it was scheduled, and is never due before.
        unset = Q(since_at__isnull=True, created_at__lte=begun) if new >= timedelta(0) else Q()
        wanted["overdue"] = rows.filter(Q(since_at__lte=begun) | unset)
    counts = count_each(wanted, using, MAX_COUNT)
    overdue = counts["overdue"].value if "overdue" in counts else None
    return DelayPreview(before, new, mode, counts["pending"].value, overdue, counts["pending"].is_capped)


def change_delay(
    policy: str | TimeoutPolicy[Any],
    after: timedelta | None,
    *,
    by: str,
    reason: str = "",
    mode: Mode = "keep",
    progress: Progress | None = None,
) -> PolicyChange:
    """Make timeouts that are armed from now on due `after` their `since`; exempt objects stay exempt.

    Inside a transaction the rows are moved after its commit. If this process dies meanwhile, a worker completes the
    change; no row is moved twice.

    Args:
        policy, by, reason: see `operations`.
        after: a delay for all objects, negative only if the policy has a `since`; None: the declared one. The delay in
            force, with `mode="recompute"`, replans pending timeouts, as after a change of the declaration.
        mode: the effect on pending deadlines. `"keep"`: none. `"recompute"`: each becomes `since` plus the new delay,
            also one that was set by hand; without `since` it counts from when it was scheduled. `"shift"`: each moves
            by the difference, so that one set by hand keeps its distance. A retry that is due even later keeps its
            time. Timeouts that are overdue then fire at once: see `preview_delay`.
        progress: called with the number of rows examined, page by page.

    Raises:
        InvalidDelay: `after` is not a valid duration, the policy has no delay of its own, or `"shift"` is given where
            delays differ from object to object.
        PolicyConflict: an earlier change still moves rows.
    """
    found = get_policy(policy)
    using = database_of(found.concrete_model)
    with control_of(found, by, reason) as (control, change):
        # Of the locked row: `policy_state` may show the state before a concurrent change that was waited for.
        before = PolicyState(found, after=control.after).delay
        new = _new_delay(found, after, mode, before)
        control.after = after
        change.what = What.DELAY
        seconds = [None if delay is None else delay.total_seconds() for delay in (before, new)]
        change.details = {"before": seconds[0], "after_seconds": seconds[1], "mode": mode}
        if mode == "keep":
            change.finished_at = change.at
        else:
            shift = new - before if mode == "shift" and new is not None and before is not None else timedelta(0)
            microsecond = timedelta(microseconds=1)
            change.details |= {"move": mode, "microseconds": shift // microsecond}
            change.details["after"] = None if after is None else after // microsecond
            begin_move(change, using)
    return change if mode == "keep" else run_move(change, using, progress)


def _new_delay(
    policy: TimeoutPolicy[Any], after: timedelta | None, mode: Mode, before: timedelta | None
) -> timedelta | None:
    """Return the new delay, None if it differs from object to object. Raises ValueError, InvalidDelay."""
    if mode not in MODES:
        raise ValueError(f'mode is "keep", "recompute" or "shift", not {mode!r}.')
    if policy.after is None:
        words = _("{policy} declares no delay that could be changed: each call sets its own.")
        raise InvalidDelay(words.format(policy=policy.label))
    if after is not None:
        shifted(clock.now(), check_length(after, "after", may_be_negative=policy.since is not None))
    new = PolicyState(policy, after=after).delay
    if mode == "shift" and (new is None or before is None):
        words = _("The delay of {policy} depends on the object, so deadlines cannot be shifted by one difference.")
        raise InvalidDelay(words.format(policy=policy.label))
    return new


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

    def write(accepted: list[Timeout], refused: list[Timeout], context: Context) -> None:
        for row in accepted:
            record(row, "retired", **context.event)
        writing.cancel_rows(accepted, using, context.reason, context.now, cause=Timeout.Cause.RETIRED)
        # Each page is counted in its transaction: a process that dies leaves a record of what it has done.
        if change.pk is None:
            change.save(using=using)
        PolicyChange.objects.using(using).filter(pk=change.pk).update(moved=F("moved") + len(accepted))

    action = Action("retire", signals.timeout_cancelled, refuse_unless_pending, write)
    return run_action(rows, action, by=by, reason=reason, dry_run=dry_run, progress=progress)
