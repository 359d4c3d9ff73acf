"""Another delay for a policy, from now on, and what it means for what is pending already."""

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
from django_delayq.operations.moves import begin_move, run_move
from django_delayq.operations.stops import control_of, resolved
from django_delayq.policies import TimeoutPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

Mode = Literal["keep", "recompute", "shift"]
MODES: Final[tuple[Mode, ...]] = ("keep", "recompute", "shift")
COUNTED: Final = 100_000
"""A preview counts no further than this."""


@dataclass(frozen=True, slots=True)
class DelayPreview:
    """What another delay would mean for what is pending.

    Attributes:
        before: the delay in force; None: it differs from object to object.
        after: the one asked for; None: as before.
        pending: how many wait, `COUNTED` at most.
        overdue: how many deadlines would have passed then, with the mode asked for; None: nobody can say beforehand.
        is_capped: there are more.
    """

    before: timedelta | None
    after: timedelta | None
    mode: Mode
    pending: int
    overdue: int | None
    is_capped: bool


def preview_delay(policy: str | TimeoutPolicy[Any], after: timedelta | None, mode: Mode = "recompute") -> DelayPreview:
    """What `change_delay` would mean. Reads only; counts no further than `COUNTED` rows.

    Raises the same as `change_delay`.
    """
    found = resolved(policy)
    using = database_of(found.concrete_model)
    before = policy_state(found, using).delay
    new = _checked(found, after, mode, before)
    rows = Timeout.objects.using(using).filter(state=Timeout.State.PENDING).of_labels(found.labels)
    rows = rows.order_by("policy", "state", "run_at", "id")
    wanted = {"pending": rows}
    passed = _passed(before, new, mode)
    if passed is not None:
        wanted["overdue"] = rows.filter(passed)
    counts = count_each(wanted, using, COUNTED)
    pending, overdue = counts["pending"], counts.get("overdue")
    known = None if overdue is None else overdue.value
    return DelayPreview(before, new, mode, pending.value, known, is_capped=pending.is_capped)


def _passed(before: timedelta | None, new: timedelta | None, mode: Mode) -> Q | None:
    """Rows whose new deadline has passed already; None: it differs from object to object."""
    now = clock.now()
    if mode == "keep":
        return Q(due_at__lte=now)
    if new is None:
        return None
    if mode == "shift":
        assert before is not None
        return Q(due_at__lte=now - (new - before))
    return Q(since_at__lte=now - new) | Q(since_at__isnull=True, created_at__lte=now - new)


def change_delay(
    policy: str | TimeoutPolicy[Any],
    after: timedelta | None,
    *,
    by: str,
    reason: str = "",
    mode: Mode = "keep",
    progress: Callable[[int], object] | None = None,
) -> PolicyChange:
    """What is armed from now on is due `after` its `since`; exempt objects stay exempt.

    Args:
        policy: the policy or its label.
        after: a delay for every object, or None: what is declared holds again. The same as now, with
            `mode="recompute"`, plans anew what is pending, as after a change of the declaration.
        by: who does it, such as `admin:alice`.
        reason: for people.
        mode: what becomes of pending deadlines. `"keep"`: nothing. `"recompute"`: each is `since` plus the new delay,
            also one that was set by hand; one without `since` counts from when it was scheduled. `"shift"`: each
            moves by the difference, so what was set by hand keeps its distance. A retry that waits for longer goes on
            waiting. What is overdue then fires at once: see `preview_delay`.
        progress: called with the number of rows looked at, page by page.

    Inside a transaction the moving begins when that has committed. If this process dies meanwhile, a worker goes on
    with it; no row is moved twice.

    Raises:
        UnknownPolicy: it is not declared.
        InvalidDelay: `after` is no length of time.
        ValueError: the policy has no delay of its own, a wrong mode, `by` is empty, or `"shift"` where the old or the
            new delay differs from object to object.
        PolicyConflict: an earlier change still moves rows.
    """
    found = resolved(policy)
    using = database_of(found.concrete_model)
    _checked(found, after, mode, None, is_shift_known=False)
    with control_of(found, by, reason) as (control, change):
        # By the locked row: a plain read may show what was before somebody else's change that was waited for.
        before = _same_for_all(found, control.after)
        new = _checked(found, after, mode, before)
        control.after = after
        change.what = PolicyChange.What.DELAY
        change.details = {"before": _seconds(before), "after_seconds": _seconds(new), "mode": mode}
        if mode == "keep":
            change.finished_at = change.at
        else:
            length = None if after is None else _microseconds(after)
            shift = _microseconds(new - before) if mode == "shift" and new is not None and before is not None else 0
            change.details |= {"move": mode, "after": length, "microseconds": shift}
            begin_move(change, using)
    return change if mode == "keep" else run_move(change, using, progress)


def _checked(
    policy: TimeoutPolicy[Any],
    after: timedelta | None,
    mode: Mode,
    before: timedelta | None,
    *,
    is_shift_known: bool = True,
) -> timedelta | None:
    """The new delay, where it is the same for every object."""
    if mode not in MODES:
        raise ValueError(f'mode is "keep", "recompute" or "shift", not {mode!r}.')
    if policy.after is None:
        words = _("{policy} has no delay of its own: each scheduling names one, so none can be changed.")
        raise ValueError(words.format(policy=policy.label))
    if after is not None:
        check_length(after, "after")
    new = _same_for_all(policy, after)
    if mode == "shift" and is_shift_known and (new is None or before is None):
        words = _("The delay of {policy} differs from object to object: there is no one shift for all.")
        raise ValueError(words.format(policy=policy.label))
    return new


def _same_for_all(policy: TimeoutPolicy[Any], after: timedelta | None) -> timedelta | None:
    """The delay with `after` in the place of the declared one; None: it differs from object to object."""
    return after if after is not None else policy.after if isinstance(policy.after, timedelta) else None


def _microseconds(length: timedelta) -> int:
    return length // timedelta(microseconds=1)


def _seconds(length: timedelta | None) -> float | None:
    return None if length is None else length.total_seconds()
