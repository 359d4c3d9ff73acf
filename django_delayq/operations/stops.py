"""Pause, hold, resume: nothing of a policy fires until it goes on.

Its rows stay pending, and people may cancel and postpone them. What a worker takes up after the commit does not fire;
what it has taken up before ends as always. A pause only waits, so what fell due meanwhile fires when it is over. A hold
stops the clock: when it is over, every pending deadline lies later by as much of it as the row has lived through.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from django.db import connections, transaction
from django.utils.translation import gettext as _

from django_delayq import clock
from django_delayq.clock import database_now
from django_delayq.delays import check_moment
from django_delayq.exceptions import DelayqError, InvalidDelay
from django_delayq.ledger import controls
from django_delayq.ledger.history import clipped
from django_delayq.ledger.locking import database_of, for_update, transaction_of
from django_delayq.models import PolicyChange, PolicyControl
from django_delayq.operations.actors import checked_actor
from django_delayq.operations.moves import begin_move, bring_back, go_on_with_moves, new_change, run_move, unfinished
from django_delayq.policies import TimeoutPolicy, get_policy

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("django_delayq.steering")
Stop, What = PolicyControl.Stop, PolicyChange.What


class PolicyConflict(DelayqError):
    """What an operator asks for does not go together with what is in force; nothing was changed."""


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
        policy: the policy or its label.
        by: the actor, such as `admin:alice`.
        reason: for people; empty: the reason of the pause that is in force.
        until: a datetime in the future, by the database's clock; None: until it is resumed. `"keep"`: the end of
            the pause that is in force, or none.

    Returns:
        The change; None: the policy was paused like this already.

    Raises:
        UnknownPolicy: it is not declared.
        InvalidDelay: `until` has passed, or its awareness does not fit `USE_TZ`.
        PolicyConflict: it is held, or being released. Only `resume` ends a hold, as it decides about the deadlines.
        ValueError: `by` is empty.
    """
    if isinstance(until, datetime) and check_moment(until, "until") <= clock.now():
        raise InvalidDelay(_("{moment} has passed already.").format(moment=until))
    with control_of(policy, by, reason) as (control, change):
        if control.stop not in (Stop.NONE, Stop.PAUSED):
            raise PolicyConflict(_told(_("{policy} is {stop}: resume it first."), control))
        is_stopped = _is_stopped(control, change.at)
        if until == "keep":
            until = control.until if is_stopped else None
        if is_stopped and until == control.until and not _is_news(reason, control):
            return None
        change.details = {"until": _text(until), **(_before(control) if is_stopped else {})}
        if not is_stopped:
            control.stopped_at = change.at
        control.stop, control.until = Stop.PAUSED, until
        change.what, change.finished_at = What.PAUSED, change.at
    return change


def hold(policy: str | TimeoutPolicy[Any], *, by: str, reason: str = "") -> PolicyChange | None:
    """Stop `policy` until `resume`, which then moves all pending deadlines by the length of the hold.

    A pause becomes a hold that begins now and has no end; its reason stays unless another one is given. Holding a held
    policy again changes its reason only.

    Args:
        policy: the policy or its label.
        by: the actor.
        reason: for people; empty: the reason of the pause or hold that is in force.

    Returns:
        The change; None: the policy was held like this already.

    Raises:
        PolicyConflict: it is being released.
        UnknownPolicy, ValueError: as for `pause`.
    """
    with control_of(policy, by, reason) as (control, change):
        if control.stop == Stop.RELEASING:
            raise PolicyConflict(_told(_("{policy} is {stop} already."), control))
        if control.stop == Stop.HELD and not _is_news(reason, control):
            return None
        change.details = _before(control) if _is_stopped(control, change.at) else {}
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
    progress: Callable[[int], object] | None = None,
) -> PolicyChange | None:
    """`policy` goes on, and what is due fires within two seconds. None: it was not stopped.

    After a hold its pending rows are moved first, page by page, and it goes on when all of them are. Should this
    process die meanwhile, a worker goes on with it after half a minute, or whoever calls this again; no row is moved
    twice. Inside a transaction the moving begins when that has committed.

    Args:
        policy: the policy or its label.
        by: who does it.
        reason: for people.
        shift: False: after a hold, deadlines stay where they are, and what fell due meanwhile fires.
        progress: called with the number of rows looked at, page by page.

    Raises:
        UnknownPolicy, ValueError: as for `pause`.
    """
    found = resolved(policy)
    using = database_of(found.concrete_model)
    waiting = unfinished(found, using)
    if waiting is not None and waiting.what == What.RESUMED:
        return run_move(waiting, using, progress)
    with control_of(found, by, reason) as (control, change):
        if not _is_stopped(control, change.at):
            control.stop, control.until = Stop.NONE, None
            return None
        held_since = control.stopped_at if control.stop == Stop.HELD and shift else None
        details = {"was": str(control.stop), "since": _text(control.stopped_at)}
        control.until, change.what, change.details = None, What.RESUMED, details
        if held_since is None:
            control.stop, control.stopped_at, change.finished_at = Stop.NONE, None, change.at
        else:
            control.stop = Stop.RELEASING
            change.details |= {"move": "thaw", "frozen_at": _text(held_since), "thawed_at": _text(change.at)}
            begin_move(change, using)
    if held_since is None:
        transaction.on_commit(lambda: bring_back(found, using), using=using, robust=True)
        return change
    return run_move(change, using, progress)


def resolved(policy: str | TimeoutPolicy[Any]) -> TimeoutPolicy[Any]:
    """The policy that a label or the policy itself means. Raises UnknownPolicy."""
    return policy if isinstance(policy, TimeoutPolicy) else get_policy(policy)


@contextmanager
def control_of(policy: str | TimeoutPolicy[Any], by: str, reason: str) -> Iterator[tuple[PolicyControl, PolicyChange]]:
    """The locked control of `policy` and a new change; both are saved after the block, the change if it says what."""
    found, actor = resolved(policy), checked_actor(by)
    using = database_of(found.concrete_model)
    go_on_with_moves(using, found)
    # The second is a savepoint: what is refused below leaves nothing behind in a caller's transaction.
    with transaction_of(using), transaction.atomic(using=using):
        control = lock_control(found, using)
        if unfinished(found, using):
            words = _("Rows of {policy} are still being moved by an earlier change: wait for it.")
            raise PolicyConflict(words.format(policy=found.label))
        change = new_change(found, database_now(using), actor, reason)
        was_stopped = _is_stopped(control, change.at)
        yield control, change
        if change.what:
            _sign(control, change, was_stopped=was_stopped)
            change.save(using=using)
        control.save(using=using)
    controls.stop_cache.forget()
    transaction.on_commit(lambda: _tell(change), using=using, robust=True)


def _told(words: str, control: PolicyControl) -> str:
    return words.format(policy=control.policy, stop=control.get_stop_display())


def _tell(change: PolicyChange) -> None:
    """After the commit: this process asks anew, and the log knows."""
    controls.stop_cache.forget()
    if change.what:
        logger.info(
            "%s by %s: %s %s",
            change.policy,
            change.by,
            change.what,
            change.reason,
            extra={"event": "policy_changed", "policy": change.policy, "what": change.what, "by": change.by},
        )


def lock_control(policy: TimeoutPolicy[Any], using: str) -> PolicyControl:
    """The control of `policy`, under its present label and locked; made if there is none."""
    rows = PolicyControl.objects.using(using)
    known = rows.filter(policy__in=policy.labels).order_by("-changed_at", "-id").values_list("pk", flat=True).first()
    if known is None:
        # Of several who come first at the same time, the others find the row of the first. Each writes it: MySQL and
        # MariaDB would lock what is only ignored for all who wait at once, and then nobody could have it alone.
        features = connections[using].features
        rows.bulk_create(
            [PolicyControl(policy=policy.label, changed_at=database_now(using))],
            update_conflicts=True,
            update_fields=("policy",),
            unique_fields=("policy",) if features.supports_update_conflicts_with_target else None,
        )
        return for_update(rows.filter(policy=policy.label), using).get()
    return for_update(rows.filter(pk=known), using).get()


def _sign(control: PolicyControl, change: PolicyChange, *, was_stopped: bool) -> None:
    """Keep who stopped the policy and why, for as long as that stop lasts."""
    control.changed_at = change.at
    if was_stopped and change.what == What.DELAY:
        return
    keeps_reason = was_stopped and change.what != What.RESUMED
    control.by, control.reason = change.by, change.reason or (control.reason if keeps_reason else "")


def _is_stopped(control: PolicyControl, now: datetime) -> bool:
    is_over = control.stop == Stop.PAUSED and control.until is not None and control.until <= now
    return control.stop != Stop.NONE and not is_over


def _is_news(reason: str, control: PolicyControl) -> bool:
    return bool(reason) and clipped(reason) != control.reason


def _before(control: PolicyControl) -> dict[str, Any]:
    """What was in force until now, for the change."""
    return {
        "was": str(control.stop),
        "since": _text(control.stopped_at),
        "was_until": _text(control.until),
        "was_reason": control.reason,
    }


def _text(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()
