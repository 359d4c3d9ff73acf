"""The brake of a policy: count what it fires, over all workers, and pause it when that is too much.

The period is divided into `SLICES` slices. The count is that of the present slice and of the complete ones before it,
so it never covers more than the period, and no policy is paused for firings that lie further apart. It covers nine
tenths of the period at least.

Each change of a policy by an operator begins a new count: a policy that was resumed is not paused again at once.
"""

from __future__ import annotations

import logging
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from django.db import transaction

from django_delayq.clock import database_now, to_ms
from django_delayq.delays import duration_text
from django_delayq.engine.records import SLICES
from django_delayq.exceptions import EngineError
from django_delayq.guard_rails import Brake
from django_delayq.ledger.controls import BRAKE_ACTOR, Guards, is_stop_in_force, lock_control, stop_cache
from django_delayq.ledger.history import BRAKED
from django_delayq.ledger.locking import transaction_of
from django_delayq.ledger.meters import meter
from django_delayq.models import PolicyChange, PolicyControl
from django_delayq.redis_clients import get_engine
from django_delayq.signals import policy_paused

if TYPE_CHECKING:
    from django_delayq.policies import TimeoutPolicy

logger = logging.getLogger("django_delayq.steering")
Stop = PolicyControl.Stop


def count_fired(policy: TimeoutPolicy[Any], brake: Brake, count: int, changed_at: datetime | None, using: str) -> int:
    """Add `count` firings of `policy`, and return how many there were within the period since `changed_at`.

    In Redis, or in the ledger if there is no Redis or it fails. Raises the errors of the database.
    """
    since_ms = 0 if changed_at is None else to_ms(changed_at)
    slice_ms = brake.per // timedelta(milliseconds=SLICES)
    engine = get_engine()
    if engine is not None:
        try:
            return engine.count(f"{policy.label}:{since_ms}", count, slice_ms)
        except EngineError as error:  # the circuit breaker has logged it
            logger.debug("The brake of %s counts in the ledger: %s", policy.label, error)
    with meter(policy.label, "brake", using) as state:
        assert state is not None
        present = to_ms(database_now(using)) // slice_ms
        shape = [since_ms, slice_ms]
        before = state.get("slices", {}) if state.get("shape") == shape else {}
        slices = {key: number for key, number in before.items() if 0 <= present - int(key) < SLICES}
        slices[str(present)] = slices.get(str(present), 0) + count
        state.update(shape=shape, slices=slices)
        return sum(slices.values())


def pause(policy: TimeoutPolicy[Any], guards: Guards, count: int, using: str) -> PolicyChange | None:
    """Pause `policy`, of which `count` timeouts have fired within the period of its brake; return the change.

    None, and nothing is written: it is stopped already, or was changed since the count began. So a brake neither
    overwrites a hold, nor pauses what an operator has just resumed. Logs and sends `policy_paused` after the commit.
    """
    brake = guards.brake
    assert brake is not None
    with transaction_of(using):
        control, now = lock_control(policy, using), database_now(using)
        # Without a control when the count began, it was just created, and has no actor.
        is_unchanged = control.changed_at == guards.changed_at or (guards.changed_at is None and not control.by)
        if is_stop_in_force(control, now) or not is_unchanged:
            change = None
        else:
            reason = BRAKED.format(count=count, per=duration_text(brake.per), most=brake.most)
            control.stop, control.stopped_at, control.until = Stop.PAUSED, now, None
            control.changed_at, control.by, control.reason = now, BRAKE_ACTOR, reason
            control.save(using=using)
            change = PolicyChange.objects.using(using).create(
                policy=policy.label,
                what=PolicyChange.What.PAUSED,
                at=now,
                touched_at=now,
                finished_at=now,
                by=BRAKE_ACTOR,
                reason=reason,
                details={"until": None, "fired": count, "most": brake.most, "per": brake.per.total_seconds()},
            )
    stop_cache.forget()
    if change is not None:
        transaction.on_commit(lambda: _report(policy, change), using=using, robust=True)
    return change


def _report(policy: TimeoutPolicy[Any], change: PolicyChange) -> None:
    stop_cache.forget()  # another thread of this process may have cached the state before the commit
    logger.error(
        "%s is paused by its brake: %s Check its condition, then resume it with delayq_resume.",
        *(policy.label, change.reason),
        extra={"event": "policy_paused", "policy": policy.label, "what": change.what, "by": change.by},
    )
    policy_paused.send_robust(policy.model, policy=policy, change=change)
