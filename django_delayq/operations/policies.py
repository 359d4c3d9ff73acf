"""The operations on policies, which change them at run time.

No timeout of a stopped policy fires. Its rows stay pending and can be cancelled or postponed. A worker that reserves a
row after the commit does not fire it; rows reserved earlier are completed. A pause leaves deadlines where they are, so
that timeouts that became due meanwhile fire when it ends. A hold stops the clock: when it ends, each pending deadline
moves by its part of the hold.

A delay or guard rail that an operator sets replaces the declared one, until it is set again or the declared value is
restored. Workers follow within two seconds. Settled rounds stay settled: what was skipped in shadow mode or as too late
does not fire later.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any, Final, Literal

from django.db import connections
from django.utils.translation import gettext as _

from django_delayq.exceptions import InvalidDelay
from django_delayq.ledger.controls import PolicyState, put_stop, stop_cache, valid_guards
from django_delayq.ledger.db_connections import use_after_commit
from django_delayq.ledger.paging import newest_id
from django_delayq.ledger.routing import database_of
from django_delayq.models import PolicyChange, PolicyControl
from django_delayq.operations.changes import MoveProgress, PolicyConflict, control_of, run_move, unfinished, wake_for
from django_delayq.policy.options import Brake, Late, Then
from django_delayq.policy.policies import TimeoutPolicy, get_policy, registry
from django_delayq.rounds.memory import iso
from django_delayq.times import clock
from django_delayq.times.clock import check_length, check_moment, shifted
from django_delayq.times.lengths import resized

Stop, What = PolicyControl.Stop, PolicyChange.What
Mode = Literal["keep", "recompute", "shift"]
MODES: Final[tuple[Mode, ...]] = ("keep", "recompute", "shift")
DECLARED: Final = "declared"
HOLD_ACTOR: Final = "hold"
"""The actor of the end of a hold, if the control names none: it was written by hand."""


def pause(
    policy: str | TimeoutPolicy[Any], *, by: str, reason: str = "", until: datetime | Literal["keep"] | None = "keep"
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
    return _stop(policy, Stop.PAUSED, until, by, reason)


def hold(
    policy: str | TimeoutPolicy[Any], *, by: str, reason: str = "", until: datetime | Literal["keep"] | None = "keep"
) -> PolicyChange | None:
    """Stop `policy` until `resume`, or until a datetime; then all pending deadlines move by the length of the hold.

    A worker resumes a hold that has reached its end, within seconds. Nothing fires before the deadlines have moved, and
    they move by the time until that end, however late the worker was. A pause becomes a hold that begins now. Holding a
    held policy again changes what is given and keeps the rest, as for `pause`.

    Args:
        policy, by, reason: see `operations`. Without a reason, that of the stop in force remains.
        until: as for `pause`. `"keep"`: the end of the hold that is in force, or none; the end of a pause is not kept.

    Returns:
        The change; None: the policy was held like this already.

    Raises:
        InvalidDelay: as `pause` does.
        PolicyConflict: it is being released.
    """
    return _stop(policy, Stop.HELD, until, by, reason)


def outlasts(state: PolicyState, until: datetime | None) -> bool:
    """Return whether the stop in force ends later than `until` (None: only an operator ends it), or at the same time.

    An operation on many policies leaves such a stop alone. Otherwise "everything for an hour" would let a policy
    continue after this hour that another operator has stopped for longer.
    """
    return state.is_stopped and (state.until is None or (until is not None and state.until >= until))


def _stop(
    policy: str | TimeoutPolicy[Any],
    stop: PolicyControl.Stop,
    until: datetime | Literal["keep"] | None,
    by: str,
    reason: str,
) -> PolicyChange | None:
    """Put `stop` in force; return the change, None if the policy is stopped like this already."""
    end = None if until is None or until == "keep" else check_moment(until, "until")
    with control_of(policy, by, reason) as (control, change):
        if end is not None and end <= change.at:
            raise InvalidDelay(_("{moment} is in the past.").format(moment=clock.local(end)))
        if control.stop not in (Stop.NONE, Stop.PAUSED, stop):
            words = _("{policy} is {stop}: resume it first.")
            raise PolicyConflict(words.format(policy=control.policy, stop=control.get_stop_display()))
        if until == "keep" and stop in {control.stop, Stop.PAUSED}:
            end = control.until
        if control.stop == stop and control.until == end and change.reason in {"", control.reason}:
            return None
        former: dict[str, Any] = {}
        if control.stop != Stop.NONE:
            former = {"was": str(control.stop), "since": iso(control.stopped_at)}
            former |= {"was_until": iso(control.until), "was_reason": control.reason}
        put_stop(control, change, stop, end, **former)
        return change


def resume(
    policy: str | TimeoutPolicy[Any],
    *,
    by: str,
    reason: str = "",
    shift: bool = True,
    progress: MoveProgress | None = None,
) -> PolicyChange | None:
    """Let `policy` continue; workers fire due timeouts within two seconds.

    After a hold its pending rows are moved first, page by page; it continues when all are moved. If this process dies
    meanwhile, the next call or, after half a minute, a worker completes the change; no row is moved twice. Inside a
    transaction the rows are moved after its commit.

    Args:
        policy, by, reason: see `operations`.
        shift: False: after a hold, deadlines stay where they are, and timeouts that became due meanwhile fire.
        progress: called with the number of rows examined, page by page.

    Returns:
        The change. None: the policy was not stopped.
    """
    return _resume(get_policy(policy), by, reason, shift=shift, progress=progress)


def end_holds(using: str) -> int:
    """Resume the policies whose holds have reached their end; return how many. Raises the database's errors.

    Any worker may call it: the control is locked, so one of them begins, and `PolicyChange` has how far it has come.
    Does nothing inside a transaction, as `continue_moves`.
    """
    if connections[using].in_atomic_block:
        return 0
    ended = [(registry.get(control.policy), control.by) for control in stop_cache.recent(using).ended_holds()]
    done = 0
    for policy, by in ended:
        if policy is not None:
            with suppress(PolicyConflict):  # another process moves its deadlines
                done += _resume(policy, by or HOLD_ACTOR, "", only_ended=True) is not None
    return done


def _resume(
    found: TimeoutPolicy[Any],
    by: str,
    reason: str,
    *,
    shift: bool = True,
    progress: MoveProgress | None = None,
    only_ended: bool = False,
) -> PolicyChange | None:
    """Do what `resume` does; with `only_ended`, only to a hold that has reached its end."""
    using = database_of(found.concrete_model)
    earlier = unfinished(using, found).first()
    if earlier is not None and earlier.what == What.RESUMED:
        return run_move(earlier, using, progress)
    with control_of(found, by, reason) as (control, change):
        ended_at = control.until if control.until is not None and control.until <= change.at else None
        if control.stop == Stop.NONE or (only_ended and ended_at is None):
            return None
        moves = control.stop == Stop.HELD and control.stopped_at is not None and shift
        change.what = What.RESUMED
        change.details = {"was": str(control.stop), "since": iso(control.stopped_at)}
        if moves:
            change.details |= {"held_until": iso(ended_at or change.at), "held_reason": control.reason}
            change.held_from, change.held_until = control.stopped_at, ended_at or change.at
            change.last_id = newest_id(using)  # rows that are scheduled later follow it already
            control.stop = Stop.RELEASING
        else:
            control.stop, control.stopped_at = Stop.NONE, None
            control.resumed_at = change.finished_at = change.at
        control.until = None
    if moves:
        return run_move(change, using, progress)
    use_after_commit(lambda: wake_for(found, using), using)
    return change


def change_delay(
    policy: str | TimeoutPolicy[Any],
    after: timedelta | None,
    *,
    by: str,
    reason: str = "",
    mode: Mode = "keep",
    hand_set: bool = False,
    progress: MoveProgress | None = None,
) -> PolicyChange:
    """Make timeouts that are armed from now on due `after` their `since`; exempt objects stay exempt.

    Inside a transaction the rows are moved after its commit. If this process dies meanwhile, a worker completes the
    change; no row is moved twice.

    Args:
        policy, by, reason: see `operations`.
        after: a delay for all objects, negative only if the policy has a `since`; None: the declared one. The delay in
            force, with `mode="recompute"`, replans pending timeouts, as after a change of the declaration.
        mode: the effect on pending deadlines. `"keep"`: none. `"recompute"`: each that the policy has computed becomes
            `since` plus the new delay; without `since` it counts from when it was scheduled. `"shift"`: each moves by
            the difference, so that one set by hand keeps its distance. By how much holds have moved a deadline, they
            move the new one, and a clock that is stopped stays stopped. A retry that is due even later keeps its time.
            Timeouts that are overdue then fire at once: see `previews.preview_delay`.
        hand_set: `"recompute"` also computes deadlines that were set by hand.
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
        new, shift = new_delay(found, after, mode, before)
        control.after = after
        change.what = What.DELAY
        seconds = [None if delay is None else delay.total_seconds() for delay in (before, new)]
        change.details = {"before": seconds[0], "after": seconds[1], "mode": mode}
        if mode == "keep":
            change.finished_at = change.at
        else:
            change.former_delay, change.shift = before, shift if mode == "shift" else None
            change.hand_set = hand_set
            change.last_id = newest_id(using)  # rows that are scheduled later follow it already
    return change if mode == "keep" else run_move(change, using, progress)


def check_delay(policy: TimeoutPolicy[Any], after: timedelta | None) -> None:
    """Raise InvalidDelay if `policy` cannot have the delay `after`; None: the declared one."""
    if policy.after is None:
        words = _("{policy} declares no delay that could be changed: each call sets its own.")
        raise InvalidDelay(words.format(policy=policy.label))
    if after is not None:
        shifted(clock.now(), check_length(after, "after", may_be_negative=policy.since is not None))
        if policy.fixed_length is not None:
            resized(policy.fixed_length, after, strict=True)


def new_delay(
    policy: TimeoutPolicy[Any], after: timedelta | None, mode: Mode, before: timedelta | None
) -> tuple[timedelta | None, timedelta]:
    """Return the new delay, None if it differs from object to object; and by how much `mode` shifts pending deadlines.

    Raises ValueError, InvalidDelay.
    """
    if mode not in MODES:
        raise ValueError(f'mode is "keep", "recompute" or "shift", not {mode!r}.')
    check_delay(policy, after)
    new = PolicyState(policy, after=after).delay
    if mode != "shift":
        return new, timedelta(0)
    if new is None or before is None:
        words = _("The delay of {policy} depends on the object, so deadlines cannot be shifted by one difference.")
        raise InvalidDelay(words.format(policy=policy.label))
    return new, new - before


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
    return _set(policy, "late", _given(None if after is None else Late(after, then), off=off), by, reason)


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
    given: Any = (most, per)
    return _set(policy, "brake", _given(None if given == (None, None) else Brake(*given), off=off), by, reason)


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


def _stored(value: Any) -> Any:
    """Return the value of a guard as `PolicyControl.guards` has it."""
    if isinstance(value, Late) and isinstance(value.after, timedelta):
        return {"after": value.after.total_seconds(), "then": value.then}
    if isinstance(value, Brake):
        return {"most": value.most, "per": value.per.total_seconds()}
    return value


def _given(value: Late | Brake | None, *, off: bool) -> Any:
    """Return what is stored of a guard: `value`, or None with `off`, or else that it is as declared."""
    if off and value is not None:
        raise ValueError(f"Give either off=True or {value!r}.")
    return _stored(value) if off or value is not None else DECLARED


def _set(policy: str | TimeoutPolicy[Any], guard: str, value: Any, by: str, reason: str) -> PolicyChange | None:
    """Put the guard `value` in force; return the change, if any."""
    found = get_policy(policy)
    with control_of(found, by, reason) as (control, change):
        guards = valid_guards(found, control.guards)
        if guards.get(guard, DECLARED) == value:
            return None
        before = _stored(getattr(PolicyState(found, guards=guards), guard))
        actors = guards.pop("by", {})
        if value == DECLARED:
            del guards[guard]
            actors.pop(guard, None)
        else:
            guards[guard], actors[guard] = value, change.by
        after = _stored(getattr(PolicyState(found, guards=guards), guard))
        control.guards = {**guards, "by": actors} if actors else guards
        change.details = {"before": before, "after": after, "declared": value == DECLARED}
        change.what, change.finished_at = guard, change.at
        return change
