"""Let time pass in staging: everything that would happen within a duration happens now, in order."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from django_delayq.exceptions import DelayqError, InvalidDelay
from django_delayq.ledger import advances
from django_delayq.ledger.controls import stop_cache
from django_delayq.ledger.routing import database_of
from django_delayq.models import PolicyControl, Timeout
from django_delayq.operations.changes import unfinished
from django_delayq.operations.runner import checked_actor
from django_delayq.policy.policies import registry
from django_delayq.rounds.memory import clipped
from django_delayq.sql.now import database_now
from django_delayq.times.clock import check_moment, duration_text

logger = logging.getLogger("django_delayq.operations")

MAX_STEPS: Final = 100
"""In steps of a hundredth at least: each writes all waiting rows. Timeouts of one become due together."""
PATIENCE_SECONDS: Final = 15.0
"""Workers that fire nothing for so long have stopped. Some of their passes begin every five seconds."""
POLL_SECONDS: Final = 0.1
"""How often it is checked whether workers are ready with a step."""


@dataclass(frozen=True, slots=True)
class Passed:
    """What `advance_clock` has done.

    Attributes:
        ahead: by how much the clock of the installation is ahead now.
        due: how many timeouts became due.
        steps: in how many steps.
        is_complete: workers were ready with each step before the next; otherwise the rest was one step.
    """

    ahead: timedelta
    due: int = 0
    steps: int = 0
    is_complete: bool = True


def advance_clock(
    by: timedelta,
    *,
    actor: str,
    reason: str = "",
    using: str | None = None,
    between: Callable[[], object] | None = None,
) -> Passed:
    """Let the duration `by` pass for all timeouts of a staging installation.

    Step by step: the next timeout becomes due, the workers fire it, and so on, so that what its handler schedules
    within the duration happens, too, and in order. A deadline that counts from a time before an advance is
    earlier by it, one that counts from a later time is not. `timezone.now()` does not change, nor does a database.

    Args:
        by: the duration.
        actor, reason: are stored.
        using: the database; by default where the routers write the ledger.
        between: is called after each step; the next one begins when it returns, and the rest is one step if it returns
            False. By default it waits for the workers, and returns False if they fire nothing for 15 seconds.

    Raises:
        DelayqError: this installation may not advance its clock, see `ledger.advances.refusal`, or a policy is on hold.
            Nothing was changed.
        InvalidDelay: `by` is not a positive timedelta.
    """
    actor, using = checked_actor(actor), using or database_of(Timeout)
    _check(using)
    if not isinstance(by, timedelta) or by <= timedelta(0):
        raise InvalidDelay(f"The clock is advanced by a positive timedelta, not by {by!r}: time does not run back.")
    left, due, steps, is_complete = by, 0, 0, True
    wait = (lambda: wait_for_workers(using)) if between is None else between
    while left:
        at = advances.next_event(using) if is_complete else None
        gap = left if at is None else at - database_now(using)
        step = min(left, max(gap, by / MAX_STEPS))
        step = left if left - step < timedelta.resolution else step
        due += advances.advance(using, step, actor=actor, reason=clipped(reason))
        stop_cache.forget()
        left, steps = left - step, steps + 1
        if is_complete:
            is_complete = wait() is not False
    logger.info(
        "The clock was advanced by %s, by %s: %d timeouts became due",
        *(duration_text(by), actor, due),
        extra={"event": "clock_advanced", "by": actor, "reason": reason, "seconds": by.total_seconds()},
    )
    return Passed(advances.total(using), due, steps, is_complete)


def set_clock(at: datetime, *, actor: str, reason: str = "", using: str | None = None) -> Passed:
    """Advance the clock to a datetime: see `advance_clock`. Raises InvalidDelay if it is not ahead."""
    using = using or database_of(Timeout)
    by = check_moment(at, "at") - database_now(using) - advances.total(using)
    return advance_clock(by, actor=actor, reason=reason, using=using)


def reset_clock(*, actor: str, reason: str = "", using: str | None = None) -> timedelta:
    """Forget by how much the clock was advanced; return that. Deadlines that have moved stay where they are.

    Raises DelayqError as `advance_clock` does.
    """
    actor, using = checked_actor(actor), using or database_of(Timeout)
    _check(using)
    before = advances.total(using)
    advances.reset(using)
    words = "The clock was reset by %s; it was %s ahead"
    logger.info(words, actor, duration_text(before), extra={"event": "clock_reset", "by": actor, "reason": reason})
    return before


def _check(using: str) -> None:
    if why := advances.refusal(using):
        raise DelayqError(f"The clock of this installation cannot be advanced. {why}")
    held = PolicyControl.objects.using(using).filter(stop__in=(PolicyControl.Stop.HELD, PolicyControl.Stop.RELEASING))
    label = held.values_list("policy", flat=True).first() or unfinished(using).values_list("policy", flat=True).first()
    if label:
        words = "is on hold, or its deadlines are being moved. Resume it first, or wait"
        raise DelayqError(f"The clock cannot be advanced: {label} {words}.")


def wait_for_workers(using: str) -> bool:
    """Wait until nothing is due that workers fire; return False if they have fired nothing for `PATIENCE_SECONDS`."""
    before, since = -1, time.monotonic()
    while left := _count_due(using):
        if left != before:
            before, since = left, time.monotonic()
        if time.monotonic() - since > PATIENCE_SECONDS:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _count_due(using: str) -> int:
    """Return how much is due or running, but not what is stopped, or whose policy is not declared here."""
    stopped, rows = stop_cache.read(using), Timeout.objects.using(using)
    labels = [label for policy in registry if policy.label not in stopped for label in policy.labels]
    firing = rows.filter(state=Timeout.State.FIRING, settled_at=None).of_labels(labels)
    held = rows.held().filter(held_until__lte=database_now(using))
    return int(rows.due().of_labels(labels).count() + firing.count() + held.count())
