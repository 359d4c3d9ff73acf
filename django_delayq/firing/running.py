"""Run one piece of work in this thread: in a transaction, outside of one, or as a suspect."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from math import inf
from typing import Any

from django.db import connections

from django_delayq.arming.reconcile import by_handler_of
from django_delayq.conf import get_settings
from django_delayq.firing import rails, steps
from django_delayq.firing.attempt import Attempt
from django_delayq.firing.gathering import Gathering, count_first, forget, next_part
from django_delayq.firing.handler import call_handler, checkpoint, raised_by, tracked
from django_delayq.firing.log_lines import UNKNOWN_PAUSE, log_unknown_policy, log_waiting
from django_delayq.firing.report import ReportBuilder
from django_delayq.firing.settling import (
    persistently,
    reason_to_repeat,
    record_deaths,
    settle,
)
from django_delayq.firing.state import TRANSIENT_MAX_SECONDS, firing_state
from django_delayq.firing.time_limits import run_within_limit
from django_delayq.firing.works import AHEAD_SECONDS, Call, Candidate, Report, RunningWork, Work
from django_delayq.ledger import marking
from django_delayq.ledger.controls import stop_cache
from django_delayq.ledger.left_open import close_left_open
from django_delayq.models import Timeout
from django_delayq.policy.outcomes import Fired, Outcome, returned_outcome
from django_delayq.policy.policies import registry
from django_delayq.rounds.after_attempt import TransientFailure, as_given
from django_delayq.sql.now import database_now

State, Cause = Timeout.State, Timeout.Cause
WORK_SECONDS = 0.4
"""After this time the rest of a batch that raised is released: a worker that stops would wait for all of its calls."""
EXTEND_LOCKED_SECONDS = 1.0
"""A row that is locked is extended soon again: it would expire within two thirds of a lease."""


def run(work: Work, using: str) -> Report:
    """Wait until `work` begins. Then fire, skip, record as failed or release every timeout of it, and report which.

    Call it outside a transaction, in any thread. Errors of handlers and of the database are recorded or logged, and not
    raised. Only KeyboardInterrupt passes, and only in the main thread, after the interrupted transaction has rolled
    back. It does not acknowledge in Redis.
    """
    return run_each(iter([work]), using)


def run_each(works: Iterator[Work], using: str) -> Report:
    """Run works in turn, as `run` does; log and report together what has fired.

    Each is taken when all before it are settled, and no receiver waits for their signals; the others are not taken.
    """
    close_left_open()
    report, work = ReportBuilder(), next(works)
    is_nested = firing_state.current is not None  # a handler fires others, in a thread that is inside already
    with nullcontext(True) if is_nested else firing_state.gate.entered(alone=work.suspect) as is_open:
        if is_open:
            _run_one(work, using, report)
            while report.is_quiet and (other := next(works, None)) is not None:
                _run_one(other, using, report)
            report.publish(using)
            checkpoint("reported")
        else:
            report.release(work.ids, using, "a timeout that may kill its process needs that for itself")
    return report.report()


def _run_one(work: Work, using: str, report: ReportBuilder) -> None:
    error = raised_by(lambda: _run(RunningWork(work, using, report, registry.get(work.policy))))
    if error is not None:
        report.release_unknown(work.policy, work.ids, error, using)
    for timeout_id in work.ids:
        if timeout_id not in report.uncounted:
            firing_state.backoff.reset(using, timeout_id)
    for timeout_id in report.again.keys() - set(work.ids):  # with `batch_by`: they are leased by others, or not yet
        del report.again[timeout_id]
        firing_state.backoff.reset(using, timeout_id)


def _run(running: RunningWork) -> None:
    """Fire a work. After a call that took longer than its limit, fire the rest of the work one by one."""
    work, report, policy = running.work, running.report, running.policy

    def fire() -> None:
        running.wait(AHEAD_SECONDS)
        with tracked(running):
            _fire(running)

    if not run_within_limit(fire, running):
        return
    end = time.monotonic() + WORK_SECONDS
    # With `batch_by` nothing is gathered yet when `confirm` is asked about one of them. The others still fire together.
    is_by_value = policy is not None and policy.batch_by is not None
    together = running.gathered if is_by_value else work.candidates()
    rest = [each for each in together if each.id not in report.done and each.id not in report.again]
    while rest and len(together) > 1 and time.monotonic() < end:
        alone = rest.pop(0)
        one = replace(work, ids=(alone.id,), object_ids=(alone.object_id,), begin_by=inf, alone=True)
        _run(RunningWork(one, running.using, report, policy))
    left = [each for each in work.ids if each not in report.done and each not in report.again]
    report.release_rest(left, report.current_time())


def _fire(running: RunningWork) -> None:
    work, report, policy, candidates = running.work, running.report, running.policy, running.work.candidates()
    if policy is None or work.suspect or policy.batch_by is not None or policy.confirmation is not None:
        running.wait()  # they read before the transaction
    if work.suspect:  # the process of those that are still `firing` has died
        record_deaths(report, running.using, len(work.ids), work.ids)
        candidates = [each for each in candidates if each.id not in report.done and each.id not in report.again]
    if policy is None:
        log_unknown_policy(work.policy)
        report.again |= dict.fromkeys([each.id for each in candidates], report.current_time() + UNKNOWN_PAUSE)
        return
    with by_handler_of(policy):
        if policy.batch_by is not None and not work.alone and (work.share or not work.suspect):
            _fire_by_value(running)
        # Whether a step runs in the transaction that marks its row, only the locked row shows.
        elif policy.atomic and not policy.steps and not work.suspect:
            _fire_in_transactions(running, candidates)
        else:
            for candidate in candidates:
                noted: Sequence[int] | None = ()
                if work.suspect and (policy.atomic or policy.steps):
                    noted = count_first(running, [candidate.id], lambda: [candidate])  # noqa: B023 - called at once
                if noted is not None:
                    _fire_non_atomic(running, candidate)
                    forget(running, noted)


def _fire_in_transactions(running: RunningWork, candidates: Sequence[Candidate]) -> None:
    """Fire `candidates` in due order: each in a transaction of its own, or several in one, as their policy declares.

    Handlers that share a transaction run without savepoints, which would cost as much as a transaction each. So one
    that raises, be it only an outcome, rolls all of them back, and they are fired one by one.
    """
    policy, report = running.policy, running.report
    rest, size, end = list(candidates), policy.transaction_size, time.monotonic() + WORK_SECONDS
    while rest:
        chosen = rest[: min(size, rails.room(policy, stop_cache.guards(policy, running.using)))]
        if not Attempt(running, chosen).fire():
            size = 1
            continue
        rest = rest[len(chosen) :]
        if time.monotonic() > end:
            break
    report.release_rest([candidate.id for candidate in rest], report.current_time())


def _fire_by_value(running: RunningWork) -> None:
    """Fire the timeouts of a work, and with each those of its value: all that are due, in one call if they fit."""
    report = running.report
    rest, known, end = list(running.work.ids), -1, time.monotonic() + WORK_SECONDS
    while rest and known < len(report.done) + len(report.again):  # else they were changed meanwhile
        known = len(report.done) + len(report.again)
        part = next_part(running, rest)
        if part is not None:
            _fire_value(running, part, end)
        rest = [each for each in rest if each not in report.done and each not in report.again]
        if time.monotonic() > end:
            break
    report.release_rest(rest, report.current_time())


def _fire_value(running: RunningWork, part: Work, end: float) -> None:
    """Fire the due timeouts of the value of `part`; one by one if the call with all of them raises.

    A timeout without a value is alone.
    """
    gathering = Gathering(running, part)
    if part.share:
        gathering.provide_lock()
    if part.suspect:
        gathering.noted = count_first(running, part.ids, gathering.gather) or ()
        if not gathering.noted:
            return
    gather = gathering.gather if part.share else None
    attempt = Attempt(running, part.candidates(), share=part.share, gather=gather)
    if not attempt.fire():
        for candidate in attempt.candidates:
            Attempt(running, [candidate]).fire()
            if time.monotonic() > end:
                break
    forget(running, gathering.noted)


def _fire_non_atomic(running: RunningWork, candidate: Candidate) -> None:
    """Run the handler, or a step, outside a transaction, between two short ones, at least once.

    The first transaction locks, checks and marks the row `firing`, with an expiry and the attempt counted. The second
    one settles it, or records its failed attempt. A process that dies between the two leaves a row that expires. Its
    slot is free meanwhile, so that a next round can be scheduled. If it runs in the first transaction, that has
    settled or moved the row, and there is nothing to do.
    """
    policy, using, report = running.policy, running.using, running.report
    attempt = Attempt(running, [candidate])
    attempt.fire()
    if not attempt.is_committed or not attempt.ready or attempt.ready[0].row.state != State.FIRING:
        return
    [member], driver_connection = attempt.ready, connections[using].connection
    row, function = member.row, steps.function_of(policy, member.row)
    given = row if function is None else as_given(row, row.attempts)
    names = ("state", "attempts", "step", "suspected_at", "idempotency_key", "due_at")
    call = Call((row.pk,), {name: getattr(row, name) for name in names}, planned_at=member.planned_at)
    call.obj, call.could_begin_at = member.obj, member.could_fire_at()
    results = list[Any]()
    try:
        failure = raised_by(
            lambda: results.append(returned_outcome(call_handler(running, member.obj, given, call, function)))
        )
        [outcome] = results or [failure]
        if isinstance(outcome, Outcome):  # nothing is undone: it makes no difference whether it is raised or returned
            failure = outcome
        if failure is not None:
            report.add(_record_failure(running, failure, call, driver_connection))
            return
    except KeyboardInterrupt:  # also while the failure could not be recorded yet
        with suppress(Exception):
            settle(policy, TransientFailure("interrupted", timedelta(0)), using, call)
        raise
    checkpoint("handled")
    report.note_call(call)
    found = persistently(lambda: settle(policy, outcome or Fired(), using, call), row.pk, using)
    checkpoint("settled")
    report.add(found)
    rails.committed(policy, found, attempt.guards, using)


def _record_failure(running: RunningWork, error: BaseException, call: Call, driver_connection: object) -> ReportBuilder:
    """Record what a handler outside a transaction raised. After a transient error no attempt is counted."""
    [timeout_id], reason, using = call.timeout_ids, None, running.using
    if not isinstance(error, Outcome):
        reason = reason_to_repeat(error, using, call, driver_connection)
    if reason is not None:
        wait = firing_state.backoff.next_wait(using, timeout_id, reason, TRANSIENT_MAX_SECONDS)
        error = TransientFailure(reason, wait)
        log_waiting([timeout_id], reason)
    found = persistently(lambda: settle(running.policy, error, using, call), timeout_id, using)
    if reason is not None:  # not before: for `persistently`, `uncounted` means that the row is locked
        found.uncounted.update(found.again)
    return found


def extend_firing(ids: Collection[int], using: str) -> bool:
    """Extend the expiry of those of `ids` that are `firing` to one `LEASE` from now: their worker is running.

    Return False if one of them is locked: then extend again after `EXTEND_LOCKED_SECONDS`.
    """
    return not ids or marking.extend(ids, database_now(using) + get_settings().lease, using)
