"""Change the delay of a policy, and preview the effect on pending timeouts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal

from django.db.models import Q
from django.utils.translation import gettext as _

from django_delayq import clock
from django_delayq.delays import check_length
from django_delayq.ledger.controls import policy_state
from django_delayq.ledger.locking import database_of
from django_delayq.ledger.search import count_each
from django_delayq.models import PolicyChange, Timeout
from django_delayq.operations.replan import begin_move, run_move
from django_delayq.operations.stops import control_of
from django_delayq.policies import TimeoutPolicy, get_policy

if TYPE_CHECKING:
    from django_delayq.operations.replan import Progress

Mode = Literal["keep", "recompute", "shift"]
MODES: Final[tuple[Mode, ...]] = ("keep", "recompute", "shift")
MAX_COUNT: Final = 100_000
"""A preview counts at most this many rows."""


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
    """Return what `change_delay` would do. Writes nothing.

    Raises the same as `change_delay`.
    """
    found = get_policy(policy)
    using = database_of(found.concrete_model)
    before, now = policy_state(found, using).delay, clock.now()
    new = _checked(found, after, mode)
    _check_shift(found, mode, before, new)
    rows = Timeout.objects.using(using).filter(state=Timeout.State.PENDING).of_labels(found.labels)
    rows = rows.order_by("policy", "state", "run_at", "id")
    wanted = {"pending": rows}
    if mode == "keep":
        wanted["overdue"] = rows.filter(due_at__lte=now)
    elif mode == "shift" and new is not None and before is not None:
        wanted["overdue"] = rows.filter(due_at__lte=now - (new - before))
    elif new is not None:
        begun = now - new
        wanted["overdue"] = rows.filter(Q(since_at__lte=begun) | Q(since_at__isnull=True, created_at__lte=begun))
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
        after: a delay for all objects; None: the declared one. The delay in force, with `mode="recompute"`, replans
            pending timeouts, as after a change of the declaration.
        mode: the effect on pending deadlines. `"keep"`: none. `"recompute"`: each becomes `since` plus the new delay,
            also one that was set by hand; without `since` it counts from when it was scheduled. `"shift"`: each moves
            by the difference, so that one set by hand keeps its distance. A retry that is due even later keeps its
            time. Timeouts that are overdue then fire at once: see `preview_delay`.
        progress: called with the number of rows examined, page by page.

    Raises:
        InvalidDelay: `after` is not a valid duration.
        ValueError: the policy has no delay of its own, or `"shift"` where a delay differs from object to object.
        PolicyConflict: an earlier change still moves rows.
    """
    found = get_policy(policy)
    using = database_of(found.concrete_model)
    new = _checked(found, after, mode)
    with control_of(found, by, reason) as (control, change):
        # Of the locked row: `policy_state` may show the state before a concurrent change that was waited for.
        before = _same_for_all(found, control.after)
        _check_shift(found, mode, before, new)
        control.after = after
        change.what = PolicyChange.What.DELAY
        change.details = {"before": _seconds(before), "after_seconds": _seconds(new), "mode": mode}
        if mode == "keep":
            change.finished_at = change.at
        else:
            shift = new - before if mode == "shift" and new is not None and before is not None else timedelta(0)
            microsecond = timedelta(microseconds=1)
            change.details |= {"move": mode, "microseconds": shift // microsecond}
            change.details["after"] = None if after is None else after // microsecond
            begin_move(change, using)
    return change if mode == "keep" else run_move(change, using, progress)


def _checked(policy: TimeoutPolicy[Any], after: timedelta | None, mode: Mode) -> timedelta | None:
    """Return the new delay, None if it differs from object to object. Raises ValueError, InvalidDelay."""
    if mode not in MODES:
        raise ValueError(f'mode is "keep", "recompute" or "shift", not {mode!r}.')
    if policy.after is None:
        words = _("{policy} declares no delay that could be changed: each call sets its own.")
        raise ValueError(words.format(policy=policy.label))
    if after is not None:
        check_length(after, "after")
    return _same_for_all(policy, after)


def _check_shift(policy: TimeoutPolicy[Any], mode: Mode, before: timedelta | None, new: timedelta | None) -> None:
    if mode == "shift" and (new is None or before is None):
        words = _("The delay of {policy} depends on the object, so deadlines cannot be shifted by one difference.")
        raise ValueError(words.format(policy=policy.label))


def _same_for_all(policy: TimeoutPolicy[Any], after: timedelta | None) -> timedelta | None:
    """Return `after` or the declared delay; None if that differs from object to object."""
    return after if after is not None else policy.after if isinstance(policy.after, timedelta) else None


def _seconds(delay: timedelta | None) -> float | None:
    return None if delay is None else delay.total_seconds()
