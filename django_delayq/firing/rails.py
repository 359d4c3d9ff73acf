"""What guard rails do in a firing: withhold timeouts that are too late or in shadow mode, and count for the brake."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from django_delayq.delays import counted, duration_text
from django_delayq.firing.state import firing_state
from django_delayq.ledger import braking, settling
from django_delayq.ledger.controls import Guards, stop_cache
from django_delayq.ledger.db_errors import transient_reason
from django_delayq.ledger.scrubbing import message_of, shown
from django_delayq.models import Timeout

if TYPE_CHECKING:
    from django_delayq.policies import TimeoutPolicy

logger = logging.getLogger("django_delayq.firing")
State, Cause = Timeout.State, Timeout.Cause
REQUESTED: Final = frozenset(("fire_requested", "retried", "refires"))
"""The events by which an operator wants a timeout fired, however late it is."""


def withhold(rows: Sequence[Timeout], guards: Guards, now: datetime, using: str, *, counted: bool) -> list[Timeout]:
    """Settle those of the due, locked `rows` that are too late or in shadow mode; return them.

    A statement reads the histories of those that seem too late: an operator may have asked to fire them.
    """
    withheld: list[Timeout] = []
    if late := guards.late:
        ids = [row.pk for row in rows if settling.is_late(row, now, late.after, counted=counted)]
        histories = Timeout.objects.using(using).filter(pk__in=ids).values_list("pk", "history") if ids else ()
        unwanted = {row_id for row_id, history in histories if not _is_requested(history)}
        if withheld := [row for row in rows if row.pk in unwanted]:
            state = State.DEAD if late.then == "dead" else State.SKIPPED
            begin = now.isoformat(" ", "seconds")
            reason = f"It would have begun at {begin}, more than {duration_text(late.after)} after its deadline."
            settling.mark_settled(withheld, Cause.LATE, now, using, state=state, reason=reason)
    if guards.shadow:
        rest = [row for row in rows if not row.is_settled and is_in_shadow(row.object_id, guards.shadow)]
        if rest:
            settling.mark_settled(rest, Cause.SHADOW, now, using)
        withheld = withheld + rest
    return withheld


def _is_requested(history: Sequence[dict[str, object]]) -> bool:
    """Return whether the last event that set the time of the attempt is an operator's request to fire it."""
    last = next((event for event in reversed(history) if "to" in event or event["what"] in REQUESTED), None)
    return last is not None and last["what"] in REQUESTED


def is_in_shadow(object_id: str, percent: int) -> bool:
    """Return whether an object is among the `percent` of all objects that are in shadow mode.

    By a hash of its key, so that each worker, process and database gives the same answer, and a larger share contains
    a smaller one.
    """
    digest = hashlib.blake2b(object_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) % 100 < percent


def log_withheld(label: str, rows: Collection[Timeout]) -> None:
    """Log each timeout that was settled in shadow mode, and how many were settled because they were too late."""
    for row in rows:
        if row.cause == Cause.SHADOW:
            logger.info(
                "Timeout %s (%s) would have fired: its policy is in shadow mode",
                *(row.pk, label),
                extra={"event": "timeout_shadow", "timeout_id": row.pk, "policy": label},
            )
    late = [row for row in rows if row.cause == Cause.LATE]
    if late:
        words = counted(len(late), f"timeout of {label} was", f"timeouts of {label} were")
        logger.log(
            logging.ERROR if late[0].state == State.DEAD else logging.WARNING,
            "%s too late and %s, such as %s: %s",
            *(words, late[0].state, late[0].pk, late[0].reason),
            extra={"event": "timeouts_late", "policy": label, "count": len(late)},
        )


def count_fired(policy: TimeoutPolicy[Any], count: int, guards: Guards, using: str) -> None:
    """Count timeouts whose firing has committed, and pause the policy if its brake allows no more.

    Called before the thread fires more, so that at most one group of each thread fires beyond the limit. Errors are
    logged: the firing is committed, and the next one counts again.
    """
    brake = guards.brake
    if brake is None or not count:
        return
    try:
        total = braking.count_fired(policy, brake, count, guards.changed_at, using)
        firing_state.brake_counts[policy.label] = total
        if total > brake.most:
            braking.pause(policy, guards, total, using)
    except Exception as error:  # see above
        logger.warning(
            "The brake of %s could not count %s: %s",
            *(policy.label, counted(count, "timeout"), message_of(error)),
            exc_info=None if transient_reason(error, using) else shown(error),
            extra={"event": "brake_failed", "policy": policy.label},
        )


def brake_room(policy: TimeoutPolicy[Any], using: str) -> int:
    """Return how many timeouts a group may have: one more than the brake still allows, by its last count."""
    brake = stop_cache.guards(policy, using).brake
    if brake is None:
        return sys.maxsize
    return max(0, brake.most - firing_state.brake_counts.get(policy.label, 0)) + 1
