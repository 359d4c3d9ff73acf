"""Count what a policy fires, over all workers, and pause it when that is too much.

The period of a brake is divided into `SLICES` slices. The count is that of the present slice and of the complete ones
before it, so it never covers more than the period, and no policy is paused for firings that lie further apart. It
covers nine tenths of the period at least. Each change of a policy by an operator begins a new count: a policy that was
resumed is not paused again at once.
"""

from __future__ import annotations

import logging
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from django.db import transaction

from django_delayq.engine.records import SLICES
from django_delayq.exceptions import EngineError
from django_delayq.firing.rails.rail import Rail
from django_delayq.firing.state import firing_state
from django_delayq.ledger.claiming import meter
from django_delayq.ledger.controls import BRAKE_ACTOR, Guards, lock_control, put_stop, stop_cache
from django_delayq.ledger.db_connections import transient_reason
from django_delayq.ledger.error_texts import message_of, shown
from django_delayq.ledger.locking import transaction_of
from django_delayq.models import PolicyChange, PolicyControl
from django_delayq.policy.options import Brake
from django_delayq.redis_clients import get_engine
from django_delayq.rounds.memory import BRAKED
from django_delayq.signals import policy_paused, policy_pausing
from django_delayq.sql.now import database_now
from django_delayq.times.clock import duration_text, plural, to_ms

if TYPE_CHECKING:
    from django_delayq.firing.report import ReportBuilder
    from django_delayq.policy.policies import TimeoutPolicy

logger = logging.getLogger("django_delayq.firing")
operations_logger = logging.getLogger("django_delayq.operations")


class BrakeRail(Rail):
    """Counts firings, and pauses a policy that fires more than `Brake` allows.

    Each thread fires at most once beyond the limit: it counts before it fires more.
    """

    guard = "brake"

    def room(self, policy: TimeoutPolicy[Any], guards: Guards) -> int:
        """Return one more than the brake still allows, by its last count."""
        assert guards.brake is not None
        return max(0, guards.brake.most - firing_state.brake_counts.get(policy.label, 0)) + 1

    def committed(self, policy: TimeoutPolicy[Any], report: ReportBuilder, guards: Guards, using: str) -> None:
        """Count what has fired, and pause the policy if its brake allows no more.

        Errors are logged: the firing is committed, and the next one counts again.
        """
        brake, count = guards.brake, len(report.fired)
        assert brake is not None
        if not count:
            return
        try:
            total = _add_to_count(policy, brake, count, guards.changed_at, using)
            firing_state.brake_counts[policy.label] = total
            if total > brake.most:
                pause_by_brake(policy, guards, total, using)
        except Exception as error:  # see above
            logger.warning(
                "The brake of %s could not count %s: %s",
                *(policy.label, plural(count, "timeout"), message_of(error)),
                exc_info=None if transient_reason(error, using) else shown(error),
                extra={"event": "brake_failed", "policy": policy.label},
            )


def _add_to_count(policy: TimeoutPolicy[Any], brake: Brake, count: int, changed_at: datetime | None, using: str) -> int:
    """Add `count` firings of `policy`, and return how many there were within the period since `changed_at`.

    In Redis, or in the ledger if there is no Redis or it fails. Raises the errors of the database.
    """
    since_ms = 0 if changed_at is None else to_ms(changed_at)
    slice_ms = brake.per // timedelta(milliseconds=SLICES)
    engine = get_engine(using)
    if engine is not None:
        try:
            return engine.count(f"{policy.label}:{since_ms}", count, slice_ms)
        except EngineError as error:  # the circuit breaker has logged it
            operations_logger.debug("The brake of %s counts in the ledger: %s", policy.label, error)
    with meter(policy.label, "brake", using) as state:
        present = to_ms(database_now(using)) // slice_ms
        shape = [since_ms, slice_ms]
        if state.get("shape", shape)[0] > since_ms:  # this count would replace that of a thread that knows the change
            stop_cache.forget()
            return 0
        before = state.get("slices", {}) if state.get("shape") == shape else {}
        slices = {key: number for key, number in before.items() if 0 <= present - int(key) < SLICES}
        slices[str(present)] = slices.get(str(present), 0) + count
        state.update(shape=shape, slices=slices)
        return sum(slices.values())


def pause_by_brake(policy: TimeoutPolicy[Any], guards: Guards, count: int, using: str) -> PolicyChange | None:
    """Pause `policy`, of which `count` timeouts have fired within the period of its brake; return the change.

    None, and nothing is written: it is stopped already, or was changed since the count began. So a brake neither
    overwrites a hold, nor pauses what an operator has just resumed. Logs and sends `policy_paused` after the commit.
    """
    brake = guards.brake
    assert brake is not None
    stop_cache.forget()  # if the policy is stopped already, the cached answer is outdated
    with transaction_of(using):
        control, now = lock_control(policy, using)
        # Without a control when the count began, it was just created, and has no actor.
        is_unchanged = control.changed_at == guards.changed_at or (guards.changed_at is None and not control.by)
        if control.stop or not is_unchanged:
            stop_cache.forget()  # else firings of the next second would count from before the change, without effect
            return None
        reason = BRAKED.format(count=count, per=duration_text(brake.per), most=brake.most)
        change = PolicyChange(policy=policy.label, at=now, touched_at=now, by=BRAKE_ACTOR, reason=reason)
        counted = {"fired": count, "most": brake.most, "per": brake.per.total_seconds()}
        put_stop(control, change, PolicyControl.Stop.PAUSED, None, **counted)
        control.changed_at, control.by, control.reason = now, BRAKE_ACTOR, reason
        control.save(using=using)
        change.save(using=using)
        policy_pausing.send(policy.model, policy=policy, change=change, fired=count, brake=brake, using=using)
    transaction.on_commit(lambda: _report_pause(policy, change), using=using, robust=True)
    return change


def _report_pause(policy: TimeoutPolicy[Any], change: PolicyChange) -> None:
    stop_cache.forget()  # another thread of this process may have cached the state before the commit
    operations_logger.error(
        "%s is paused by its brake: %s Check its condition, then resume it with delayq_resume.",
        *(policy.label, change.reason),
        extra={"event": "policy_paused", "policy": policy.label, "what": change.what, "by": change.by},
    )
    policy_paused.send_robust(policy.model, policy=policy, change=change)
