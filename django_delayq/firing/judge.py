"""Decide which timeouts of a transaction may fire, and mark these.

Two judges give the same answers. `judge_of` chooses one for each policy and database: one that locks, checks and marks
in one statement, or one that does so step by step. The first one asks the second about what it has left alone.

A timeout may fire if it is pending, due by the database clock, not stopped and not withheld by a guard rail, and if its
object exists, matches `when`, and does not match `hold_when`; both are locked, without waiting for a lock. While
`hold_when` holds, its clock is stopped, and no attempt is counted. A computed deadline whose data has changed is
computed again first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypeAlias

from django_delayq.arming.holding import Facts
from django_delayq.arming.reconcile import arm_outdated
from django_delayq.conf import get_settings
from django_delayq.firing import rails, steps
from django_delayq.firing.handler import checkpoint
from django_delayq.firing.log_lines import log_waiting
from django_delayq.firing.members import Member, lock_objects_of, matching_of, readable_pk
from django_delayq.firing.report import ReportBuilder
from django_delayq.firing.state import LOCKED_MAX_SECONDS, firing_state
from django_delayq.firing.works import Candidate
from django_delayq.ledger import marking
from django_delayq.ledger.controls import Guards, stop_cache
from django_delayq.ledger.declarations import is_outdated
from django_delayq.ledger.locking import has_own_manager
from django_delayq.ledger.shares import shares_of
from django_delayq.models import Timeout
from django_delayq.policy.policies import TimeoutPolicy
from django_delayq.rounds import events

State, Cause = Timeout.State, Timeout.Cause
ROW_LOCKED = "another transaction has locked a row or an object of the same value"
"""Without that one, the others would have a call of their own, and it one more."""


class LostRace(Exception):
    """The rows cannot be fired now after all, for the reason that it has, such as a clock that went back."""


class Case(NamedTuple):
    """What a judge decides about: candidates of one policy, in due order.

    `is_suspect`: it runs alone in its process, which a row that is `firing` shows. `share`: the value that all objects
    must have, with `batch_by`.
    """

    policy: TimeoutPolicy[Any]
    candidates: Sequence[Candidate]
    using: str
    guards: Guards
    is_suspect: bool
    share: str | None = None


Judge: TypeAlias = Callable[[Case, ReportBuilder], list[Member]]
"""Return the members that are marked, in due order; of a batch in the order of keys. Report the outcome of all others:
settled, or when to check them again. Call it in a transaction. Raises LostRace, and the database's errors."""


def judge_of(policy: TimeoutPolicy[Any], using: str) -> Judge:
    """Return the judge that serves `policy` on this database."""
    return _at_once if marking.can_mark_at_once(policy, using) else _in_steps


def _at_once(case: Case, report: ReportBuilder) -> list[Member]:
    """Mark those with which nothing is unusual by one statement, and ask `_in_steps` about the others.

    Also about all, if a forged work names an object twice.
    """
    policy, using = case.policy, case.using
    admitted = rails.admitted(case.candidates, case.guards)
    pks = {each.id: pk for each in admitted if (pk := readable_pk(policy, each.object_id)) is not None}
    members: dict[int, Member] = {}
    if pks and len(set(pks.values())) == len(pks):
        late: Any = case.guards.late.after if case.guards.late else None  # a timedelta: see `LateRail.admitted`
        found = marking.mark_at_once(policy, pks, using, late=late)
        members = {row.pk: Member(row, obj) for row, obj in found}
        report.now = found[0][0].settled_at if found else None
    if rest := [each for each in case.candidates if each.id not in members]:
        members |= {member.row.pk: member for member in _in_steps(case._replace(candidates=rest), report)}
    return [members[each.id] for each in case.candidates if each.id in members]


def _in_steps(case: Case, report: ReportBuilder) -> list[Member]:
    """Lock the objects, then the rows; check them, and mark those that may be fired.

    Each is a statement of its own, so that the report shows what prevents a firing. The condition comes after the
    locks: joined into the locking statement, PostgreSQL refuses outer joins, and to-many look-ups find a row twice.
    """
    policy, using = case.policy, case.using
    objects, locked_elsewhere = lock_objects_of(policy, case.candidates, using)
    checkpoint("locked")
    free = [candidate for candidate in case.candidates if candidate.id not in locked_elsewhere]
    wanted, has_steps = [candidate.id for candidate in free], bool(policy.steps)
    rows, now, is_stopped = marking.lock_rows(wanted, using, policy=policy, history=has_steps)
    report.now = now
    _require_all(case, locked_elsewhere, are_rows_locked=len(rows) == len(free))
    due = _due(case, free, rows, now, report)
    if due and is_stopped:
        stop_cache.forget()  # the worker must not ask for more of them
        report.release_stopped([row.pk for row in due])
        due = []
    found = [Member(row, objects[row.pk]) for row in due if row.pk in objects]
    matching, on_hold = matching_of(policy, [member.obj for member in found], using)
    gone = [row for row in due if row.pk not in objects]
    members = _of_value(case, [member for member in found if member.obj.pk in matching], now, report)
    members = _with_present_data(case, members, report)
    decided = _decided(case, [member for member in found if member.obj.pk not in matching], now, report)
    unmet = [member.row for member in decided if member.obj.pk not in on_hold]
    for skipped, cause in ((gone, Cause.GONE), (unmet, Cause.CONDITION)):
        if skipped:
            marking.mark_settled(skipped, cause, now, using)
            report.add_outcomes(skipped)
    _hold(case, [member.row for member in decided if member.obj.pk in on_hold], now, report)
    members = _confirmed(case, _permitted(case, members, now, report), report)
    hidden = ", or the base manager of its model hides it" if has_own_manager(policy.model) else ""
    report.release(locked_elsewhere, using, f"another transaction has locked its object{hidden}")
    report.release({each.id for each in free} - rows.keys(), using, "another transaction has locked its row")
    checkpoint("checked")
    if members:
        _mark(case, members, now)
    ids = objects if policy.batch else [candidate.id for candidate in case.candidates]
    order = {timeout_id: place for place, timeout_id in enumerate(ids)}
    return sorted(members, key=lambda member: order[member.row.pk])


def _require_all(case: Case, locked_elsewhere: Collection[int], *, are_rows_locked: bool) -> None:
    """Raise LostRace if another transaction has locked one of the timeouts of a value, so that they fire together.

    Workers lock rows only briefly, to claim or release them. An object may be locked for long: then they do not wait,
    because one order must not keep all others of its customer from firing.
    """
    if case.share is None:
        return
    waited = firing_state.backoff.waited(case.using, [each.id for each in case.candidates]) if locked_elsewhere else 0.0
    if not are_rows_locked or (locked_elsewhere and waited < LOCKED_MAX_SECONDS):
        raise LostRace(ROW_LOCKED)


def _hold(case: Case, rows: list[Timeout], now: datetime, report: ReportBuilder) -> None:
    """Stop the clocks of rows on whose objects `hold_when` holds. Only of a step the deadline may be ahead."""
    if rows:
        has_plan, facts = case.policy.has_plan, Facts(rows, case.using)
        rests = [(row, events.stop(row, now, facts) if has_plan else timedelta(0)) for row in rows]
        marking.mark_held(rests, now, case.using)
        report.add_outcomes(rows)


def _permitted(case: Case, members: list[Member], now: datetime, report: ReportBuilder) -> list[Member]:
    """Return the members that fire now; the others have missed their step, or a guard rail withholds them."""
    policy, using = case.policy, case.using
    stopped = steps.pass_missed(policy, members, now, using) if policy.steps else []
    stopped += rails.settle([each for each in members if each not in stopped], case.guards, now, using)
    if not stopped:
        return members
    report.note_steps(stopped)
    report.add_outcomes([each.row for each in stopped if each.row.is_settled])
    report.again |= {each.row.pk: each.row.run_at for each in stopped if not each.row.is_settled}
    return [member for member in members if member not in stopped]


def _due(
    case: Case, candidates: Sequence[Candidate], rows: dict[int, Timeout], now: datetime, report: ReportBuilder
) -> list[Timeout]:
    """Return the rows that are pending and due by the database clock, in the order of `candidates`."""
    due, labels = [], case.policy.labels
    for candidate in candidates:
        row = rows.get(candidate.id)
        if row is None:  # locked by another transaction, or deleted by hand: the next plan shows which
            continue
        if row.is_settled or row.state == State.HELD:
            log_waiting([row.pk], "it is settled already" if row.is_settled else "its clock is stopped")
            report.done.append(row.pk)
            report.before.append(row.pk)
        elif row.run_at > now:  # moved meanwhile, or the entry in Redis was early; if firing: until it expires
            log_waiting([row.pk], "it is not due yet")
            report.again[row.pk] = row.run_at
        elif row.state == State.PENDING and row.object_id == candidate.object_id and row.policy in labels:
            due.append(row)
        else:  # the next plan shows which
            report.release([row.pk], case.using, "its process has died, or the work is stale or forged")
    return due


def _with_present_data(case: Case, members: list[Member], report: ReportBuilder) -> list[Member]:
    """Return the members whose deadline is that of their present data, and compute those of the others again."""
    moved = arm_outdated(case.policy, ((each.obj.pk, each.row) for each in members), case.using)
    for row in Timeout.objects.using(case.using).filter(pk__in=moved) if moved else ():
        if row.is_settled:
            report.add_outcomes([row])
        else:
            report.again[row.pk] = row.run_at
    return [member for member in members if member.row.pk not in moved]


def _confirmed(case: Case, members: list[Member], report: ReportBuilder) -> list[Member]:
    """Return the members about which `confirm` has answered, or all if the policy has none; release the others.

    They could not fire when they were to be asked about, or their answer is too old by now. Steps need no answer.
    """
    if case.policy.confirmation is None:
        return members
    unasked = [each.row.pk for each in members if not (each.row.step or firing_state.has_answer(case.using, each.row))]
    report.release(unasked, case.using, "nothing has confirmed it yet")
    return [each for each in members if each.row.pk not in unasked]


def _of_value(case: Case, members: list[Member], now: datetime, report: ReportBuilder) -> list[Member]:
    """Return the members whose object has the value of this call; the others fire with those of their present value.

    The rows have the value of when they were scheduled, or none if `batch_by` is newer.
    """
    if case.share is None:
        return members
    rows = [member.row for member in members]
    present = shares_of(case.policy, [row.object_id for row in rows], case.using)
    moved = {row.pk: share for row in rows if (share := present.get(row.object_id, "")) != case.share}
    for share in set(moved.values()):
        marking.write_pending([row for row in rows if moved.get(row.pk) == share], case.using, share=share)
    report.release_rest(moved, now, "its object has another value now")
    return [member for member in members if member.row.pk not in moved]


def _decided(case: Case, unmet: list[Member], now: datetime, report: ReportBuilder) -> list[Member]:
    """Return the members `unmet`, or release them, if workers with a newer condition for the policy are running."""
    if not unmet or not is_outdated(case.policy, case.using, now):
        return unmet
    why = "a newer declaration of its policy decides about its condition"
    report.release([member.row.pk for member in unmet], case.using, why)
    return []


def _mark(case: Case, members: Sequence[Member], now: datetime) -> None:
    policy, rows = case.policy, [member.row for member in members]
    is_inside = steps.runs_inside(policy, rows[0]) if policy.steps else policy.atomic
    if rows[0].step and is_inside:  # alone: such a policy has neither `batch` nor `together`
        is_marked = all(steps.mark(member, now, case.using) for member in members)
    elif is_inside:
        is_marked = marking.mark_fired(rows, now, case.using)
    else:
        until = now + get_settings().lease
        suspected_at = now if case.is_suspect else None
        for member in members:
            member.planned_at = member.row.run_at
        is_marked = all(marking.mark_firing(row, until, case.using, suspected_at=suspected_at) for row in rows)
    if not is_marked:
        raise LostRace("the database clock went back")
