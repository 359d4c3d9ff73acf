"""Change the guard rails of policies at run time: the limit of lateness, the brake, and shadow mode.

What an operator sets replaces what is declared, until it is set again or the declared value is restored. Workers follow
within two seconds. Settled rounds stay settled: what was skipped in shadow mode or as too late does not fire later.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from django_delayq.guard_rails import Brake, Late, Then
from django_delayq.ledger.controls import PolicyState, valid_guards
from django_delayq.models import PolicyChange
from django_delayq.operations.policies import control_of
from django_delayq.policies import TimeoutPolicy, get_policy

DECLARED: Final = "declared"


def late(
    policy: str | TimeoutPolicy[Any],
    *,
    after: timedelta | None = None,
    then: Then = "skip",
    off: bool = False,
    by: str,
    reason: str = "",
) -> PolicyChange | None:
    """Set what happens to timeouts of `policy` whose first attempt would begin too late.

    Args:
        policy, by, reason: see `operations`.
        after, then: as for `Late`. Without `after`, what is declared is in force again.
        off: lateness is not limited.

    Returns:
        The change; None: this was in force already, set by an operator, or as declared.

    Raises:
        TypeError, ValueError: as `Late` does, or `off` and `after` are both given.
        PolicyConflict: an earlier change still moves rows.
    """
    value = None if off or after is None else Late(after, then)
    _refuse_both(off, after=after)
    return _set(policy, "late", _stored(value) if off or value else DECLARED, by, reason)


def brake(
    policy: str | TimeoutPolicy[Any],
    *,
    most: int | None = None,
    per: timedelta | None = None,
    off: bool = False,
    by: str,
    reason: str = "",
) -> PolicyChange | None:
    """Set after how many firings of `policy` within a period it pauses itself. A pause in force remains.

    Args:
        policy, by, reason: see `operations`.
        most, per: as for `Brake`; both or neither. Without them, what is declared is in force again.
        off: there is no brake.

    Returns:
        The change; None: this was in force already, set by an operator, or as declared.

    Raises:
        TypeError, ValueError: as `Brake` does, or `off` and one of the others are given.
        PolicyConflict: an earlier change still moves rows.
    """
    _refuse_both(off, most=most, per=per)
    given: Any = (most, per)
    value = None if given == (None, None) else Brake(*given)
    return _set(policy, "brake", _stored(value) if off or value else DECLARED, by, reason)


def shadow(policy: str | TimeoutPolicy[Any], *, share: int | None, by: str, reason: str = "") -> PolicyChange | None:
    """Set for how many of the objects of `policy` everything happens but the handler.

    Args:
        policy, by, reason: see `operations`.
        share: percent of the objects, chosen by a stable hash of their keys: 100 for all, 0 for none. None: what is
            declared is in force again.

    Returns:
        The change; None: this was in force already, set by an operator, or as declared.

    Raises:
        ValueError: `share` is not an int from 0 to 100.
        PolicyConflict: an earlier change still moves rows.
    """
    if share is not None and (isinstance(share, bool) or not isinstance(share, int) or not 0 <= share <= 100):
        raise ValueError(f"share is a percentage from 0 to 100, or None for what is declared, not {share!r}.")
    return _set(policy, "shadow", DECLARED if share is None else share, by, reason)


def _refuse_both(off: bool, **values: Any) -> None:
    given = [name for name, value in values.items() if value is not None]
    if off and given:
        raise ValueError(f"Give either off=True or {' and '.join(given)}.")


def _stored(value: Any) -> Any:
    """Return the value of a guard as `PolicyControl.guards` has it."""
    if isinstance(value, Late):
        return {"after": value.after.total_seconds(), "then": value.then}
    if isinstance(value, Brake):
        return {"most": value.most, "per": value.per.total_seconds()}
    return value


def _set(policy: str | TimeoutPolicy[Any], guard: str, value: Any, by: str, reason: str) -> PolicyChange | None:
    """Put `value` in force for `guard`, as it is stored, or `DECLARED`; return the change, None if there is none."""
    found = get_policy(policy)
    with control_of(found, by, reason) as (control, change):
        known = valid_guards(found, control.guards)
        before = PolicyState(found, guards=known)
        if known.get(guard, DECLARED) == value:
            return None
        guards = {name: each for name, each in known.items() if name not in {guard, "by"}}
        actors = {name: each for name, each in known.get("by", {}).items() if name != guard}
        if value != DECLARED:
            guards, actors = {**guards, guard: value}, {**actors, guard: change.by}
        control.guards = {**guards, "by": actors} if actors else guards
        after = PolicyState(found, guards=control.guards)
        shown = [_stored(getattr(state, guard)) for state in (before, after)]
        change.details = {"before": shown[0], "after": shown[1], "declared": value == DECLARED}
        change.what, change.finished_at = guard, change.at
    return change
