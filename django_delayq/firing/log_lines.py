"""Log each timeout that fires, is skipped, snoozes or fails; at DEBUG also why one waits.

Each record names the policy and the object. Its `extra` has them, and the times in seconds, for filters and for JSON.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, Final

from django_delayq.firing.state import firing_state
from django_delayq.firing.works import Call
from django_delayq.ledger.error_texts import keep_user_frames, message_of, scrubbed, shown
from django_delayq.models import Timeout
from django_delayq.policy.outcomes import Outcome
from django_delayq.policy.policies import registry
from django_delayq.policy.steps import DEAD, LATE, PASSED, RAN, SHADOWED, SKIPPED, Ended
from django_delayq.rounds.memory import DIED
from django_delayq.times.clock import brief, plural

logger = logging.getLogger("django_delayq.firing")
State, Cause = Timeout.State, Timeout.Cause

MAX_LISTED: Final = 20
"""More ids would make a line of a whole batch unreadable."""
MAX_NAME: Final = 100
"""Longer names of objects are cut, so that a line remains readable."""
MIN_FAILURES_ERROR: Final = 2
"""One failure is often transient. See `log_failure`."""
STOPPED: Final = "its policy is paused or on hold"
UNKNOWN_PAUSE: Final = timedelta(seconds=5)
"""After which a process is asked again that does not know a policy. More often would only send works to and fro."""
_STEP_ENDS: Final = {
    RAN: "ran",
    SKIPPED: "is skipped",
    DEAD: "is dead, and what follows continues",
    PASSED: "missed and passed, because what follows is due",
    LATE: "is passed",
    SHADOWED: "would have run: its policy is in shadow mode",
}
_SKIPPED: Final = {Cause.CONDITION: "its condition does not hold", Cause.GONE: "its object does not exist any more"}


def log_settled(rows: Iterable[Timeout], calls: Iterable[Call]) -> None:
    """Log at INFO those of the `rows` that fired, were skipped or are held. `calls`: of their handlers."""
    if not logger.isEnabledFor(logging.INFO):
        return
    call_of = {timeout_id: call for call in calls for timeout_id in call.timeout_ids}
    for row in rows:
        if row.state == State.FIRED and row.settled_at:
            call = call_of.get(row.pk) or Call((row.pk,))
            others = len(call.timeout_ids) - 1
            together = f", together with {plural(others, 'other')}" if others else ""
            times, facts = _timing(row.could_fire_at(), call.at or row.settled_at, call.took or 0.0)
            extra = _extra(row, "timeout_fired", **facts)
            call.log(logger.info, "%s fired %s%s", _name(row, call), times, together, extra=extra)
        elif row.state == State.SKIPPED and row.cause in {*_SKIPPED, Cause.HANDLER}:
            why = _SKIPPED.get(Cause(row.cause), row.reason)
            name = _name(row, call_of.get(row.pk))
            logger.info("%s is skipped: %s", name, why, extra=_extra(row, "timeout_skipped", cause=row.cause))
        elif row.state == State.HELD:
            words = "%s is held: hold_when of its policy holds"
            logger.info(words, _name(row, call_of.get(row.pk)), extra=_extra(row, "timeout_held"))
        elif row.cause == Cause.SHADOW:
            words = "%s would have fired: its policy is in shadow mode"
            logger.info(words, _name(row), extra=_extra(row, "timeout_shadow"))


def log_unknown_policy(label: str) -> None:
    """Log once a minute that the timeouts of a policy that is not declared here are left to other processes."""
    if firing_state.is_time_to_log((label, "policy_unknown")):
        words = "No timeout policy %r is declared here: its timeouts are left to processes that know it"
        logger.warning(words, label, extra={"event": "policy_unknown", "policy": label})


def log_suspect(row: Timeout) -> None:
    """Log that a process may have died of `row`, before it runs again.

    As a warning once a minute for each policy, and otherwise at DEBUG: a worker that dies holds a thousand others.
    """
    is_first = firing_state.is_time_to_log((row.policy, "timeout_suspected"))
    words = "%s was held by a worker that died or lost its lease: it is fired alone%s"
    more = ". Others of its policy follow at level DEBUG, for a minute" if is_first else ""
    facts = _extra(row, "timeout_suspected", deaths=row.deaths)
    logger.log(logging.WARNING if is_first else logging.DEBUG, words, _name(row), more, extra=facts)


def log_step(row: Timeout, ended: Ended, call: Call | None, error: BaseException | None) -> None:
    """Log how a step has ended: a dead one as an error, one that was too late as a warning, others at INFO.

    Args:
        row: as it is now: what follows is next.
        ended: how, and which step.
        call: of the step; None: it was not called.
        error: what it raised.
    """
    facts = _extra(row, ended.what, step=ended.name, next_at=None if row.is_settled else row.run_at)
    words = _STEP_ENDS[ended.what] + (f": {ended.reason}" if ended.reason else "")
    if call is not None and call.took is not None and ended.what == RAN:
        times, measured = _timing(call.could_begin_at or row.created_at, call.at or row.run_at, call.took)
        words, facts = f"{words} {times}", {**facts, **measured}
    trace = None if error is None or isinstance(error, Outcome) else shown(keep_user_frames(error), row)
    level = {DEAD: logging.ERROR, LATE: logging.WARNING}.get(ended.what, logging.INFO)
    logger.log(level, "%s: %s %s", _name(row, call), ended.name, words, exc_info=trace, extra=facts)


def log_snooze(row: Timeout, now: datetime, reason: str, call: Call) -> None:
    """Log at INFO that the handler of `row` has asked to be called again later."""
    if not logger.isEnabledFor(logging.INFO):
        return
    args = _name(row, call), _until(row, now), f": {reason}" if reason else ""
    extra = _extra(row, "timeout_snoozed", next_at=row.run_at)
    call.log(logger.info, "%s snoozes, and is tried again %s%s", *args, extra=extra)


def log_failure(row: Timeout, error: BaseException, now: datetime, call: Call, *, is_recorded: bool) -> None:
    """Log the first failed attempt of a timeout as a warning, further ones and a dead timeout as errors.

    One failure is often transient. A handler that fails again must be noticed where only errors are read: its timeouts
    may be retried for a day before they are dead.

    Of the traceback only the frames of the project are shown. While timeouts of a policy are retried after the same
    kind of exception, it is shown once a minute: a server that is down makes thousands of them fail.

    Args:
        row: as it is after the attempt.
        error: what the handler raised.
        now: the time by the database clock.
        call: that of the handler, and for how long it ran, if that is known.
        is_recorded: False: the row was changed meanwhile, and the attempt does not count.
    """
    is_dead, is_decided = row.state == State.DEAD, row.cause in {Cause.HANDLER, Cause.LIMIT}
    times, facts = "", dict[str, Any]()
    if call.took is not None:
        times, facts = _timing(call.could_begin_at or row.due_at, now, call.took, failed=True)
    is_error = is_dead or (is_recorded and row.attempts >= MIN_FAILURES_ERROR)
    reason = message_of(error, row) if is_decided else f"{type(error).__name__}: {message_of(error, row)}"
    has_trace = not is_decided and (is_dead or firing_state.is_time_to_log((row.policy, str(type(error)))))
    if is_recorded and row.state == State.PENDING:
        facts["next_at"] = row.run_at
    call.log(
        logger.log,
        logging.ERROR if is_error else logging.WARNING,
        "%s %s: %s",
        _name(row, call),
        _outcome(row, now, f"{', ' * bool(times)}{times}") if is_recorded else f"failed, and is already {row.state}",
        reason,
        exc_info=shown(keep_user_frames(error), row) if has_trace else None,
        extra=_extra(row, "timeout_dead" if is_dead else "timeout_failed", attempt=row.attempts, **facts),
    )


def _outcome(row: Timeout, now: datetime, times: str) -> str:
    """Describe what an attempt has made of `row`; `times`: how late it began and for how long it ran."""
    attempt = f"attempt {row.attempts}{times}"
    if row.state == State.PENDING:
        return f"failed at {attempt}; attempt {row.attempts + 1} follows {_until(row, now)}"
    if row.state != State.DEAD:
        return f"failed at {attempt}, and is now {row.state}"
    if row.cause == Cause.LIMIT or row.reason == DIED:
        return "is dead"
    how = "its handler gave up at" if row.cause == Cause.HANDLER else "no retry is left after"
    return f"is dead: {how} {attempt}"


def log_waiting(ids: Collection[int], why: str) -> None:
    """Log at DEBUG why the timeouts `ids`, if there are any, do not fire now."""
    if ids and logger.isEnabledFor(logging.DEBUG):
        more = f" and {len(ids) - MAX_LISTED} more" if len(ids) > MAX_LISTED else ""
        listed = ", ".join(map(str, islice(ids, MAX_LISTED))) + more
        logger.debug("Not fired now: %s: %s", listed, why, extra={"event": "not_fired", "timeout_ids": tuple(ids)})


def _name(row: Timeout, call: Call | None = None) -> str:
    """Name `row` and its object, by the value of `search` too, such as an order number, if the object is at hand."""
    step = f", next: {row.step}" if row.step else ""
    return f"Timeout {row.pk} ({row.policy}, object {_printable(row.object_id)}{_object_name(row, call)}{step})"


def _object_name(row: Timeout, call: Call | None) -> str:
    """Return ` (A-2026-0050)`, the first local `search` field of the locked object. Never queries the database."""
    obj, policy = row._state.fields_cache.get("content_object"), registry.get(row.policy)
    if obj is None and call is not None and call.timeout_ids == (row.pk,):
        obj = call.obj
    for path in policy.search if policy and obj else ():
        value = vars(obj).get(path)  # a path to another model is not there, nor a deferred column
        if value not in (None, "") and str(value) != row.object_id:
            name = scrubbed(str(value), row)
            return f" ({_printable(name if len(name) <= MAX_NAME else f'{name[:MAX_NAME]}...')})"
    return ""


def _printable(text: str) -> str:
    return text if text.isprintable() else repr(text)


def _timing(due_at: datetime, at: datetime, seconds: float, *, failed: bool = False) -> tuple[str, dict[str, Any]]:
    """Return `3 ms late, in 12 ms`, and both in seconds.

    Args:
        due_at: since when the handler could begin.
        at: when it began, or when it `failed`.
        seconds: for how long it ran.
        failed: it has raised.
    """
    # The duration is measured by the clock of this process, so that the difference may be just below zero.
    late = max(0.0, (at - due_at).total_seconds() - (seconds if failed else 0.0))
    words = f"{brief(late)} late, {'after' if failed else 'in'} {brief(seconds)}"
    return words, {"late_seconds": round(late, 3), "seconds": round(seconds, 6)}


def _until(row: Timeout, now: datetime) -> str:
    left = (row.run_at - now).total_seconds()
    return f"in {brief(left)}" if left > 0 else "at once"


def _extra(row: Timeout, event: str, **facts: Any) -> dict[str, Any]:
    return {"event": event, "timeout_id": row.pk, "policy": row.policy, "object_id": row.object_id, **facts}
