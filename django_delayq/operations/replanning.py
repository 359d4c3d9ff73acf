"""Compute deadlines of pending and held timeouts again, as their policies declare them now."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Unpack

from django.db import Error as DatabaseError

from django_delayq import signals
from django_delayq.arming.holding import Facts
from django_delayq.arming.row_state import terms_of
from django_delayq.exceptions import InvalidDelay
from django_delayq.ledger import writing
from django_delayq.ledger.error_texts import message_of
from django_delayq.models import Timeout
from django_delayq.operations.runner import Action, Context, How, Refusal, Result, Target, refuse_unless_waiting
from django_delayq.policy.policies import TimeoutPolicy, registry
from django_delayq.policy.terms import has_column, terms_of_code, values_in
from django_delayq.rounds import events
from django_delayq.rounds.events import Plan
from django_delayq.times.paths import read_relations

logger = logging.getLogger("django_delayq.operations")


class Plans:
    """What the policies of `rows` of a page compute now. `delays`: with others than those in force."""

    def __init__(
        self, facts: Facts, rows: Iterable[Timeout], delays: Mapping[TimeoutPolicy[Any], timedelta | None] | None = None
    ) -> None:
        self._facts = facts
        self._by_id: dict[int, Plan | Refusal] = {}
        by_policy: dict[TimeoutPolicy[Any] | None, list[Timeout]] = {}
        for row in rows:
            by_policy.setdefault(registry.get(row.policy), []).append(row)
        for policy, of_policy in by_policy.items():
            if policy is not None:
                in_force = delays[policy] if delays else facts.states[policy].after
                self._add(policy, of_policy, in_force)

    def of(self, row: Timeout) -> Plan | Refusal:
        """Return the plan for `row`, or why there is none."""
        return self._by_id.get(row.pk, Refusal.POLICY_UNKNOWN)

    def _add(self, policy: TimeoutPolicy[Any], rows: list[Timeout], in_force: timedelta | None) -> None:
        failed = list[str]()
        objects = {row.pk: self._facts.of(row) if policy.needs_object else None for row in rows}
        known = {policy.pk_of(obj): (None, obj) for obj in objects.values() if obj is not None}
        # Before the related objects: a value that changes in between moves the deadline again, as terms differ then.
        terms = terms_of(policy, known, self._facts.using) if has_column(policy) else {}
        read_relations([obj for _, obj in known.values()], policy.relations)
        for row in rows:
            obj = objects[row.pk]
            try:
                own = terms.get(policy.pk_of(obj), "") if obj is not None else ""
                self._by_id[row.pk] = self._plan(row, policy, obj, own, in_force)
            except InvalidDelay:
                self._by_id[row.pk] = Refusal.TOO_FAR
            except DatabaseError:
                raise
            except Exception as error:  # noqa: BLE001 - `after` of the application; else it would stop all others
                self._by_id[row.pk] = Refusal.NO_DEADLINE
                failed.append(failure(row, error))
        log_failures(policy.label, failed)

    def _plan(
        self, row: Timeout, policy: TimeoutPolicy[Any], obj: Any, terms: str, in_force: timedelta | None
    ) -> Plan | Refusal:
        if policy.after is None:
            return Refusal.NO_DEADLINE
        if obj is None and policy.needs_object:
            return Refusal.OBJECT_GONE
        data = values_in(terms, policy) or obj
        begun = row.since_at or row.created_at
        computed = policy.due_of(data, begun, in_force)
        # A row without `since` counts from when it was scheduled, and is never due before.
        if computed is None or (row.since_at is None and computed < row.created_at):
            return Refusal.NO_DEADLINE
        if policy.is_automatic and policy.needs_object and not has_column(policy):
            terms = terms_of_code(policy, obj, begun)
        return events.plan_of(row, computed, terms, policy.own_time(data, in_force), self._facts)


def failure(row: Timeout, error: Exception) -> str:
    """Return which deadline cannot be computed, and why."""
    return f"{row.object_id}: {type(error).__name__}: {message_of(error)}"


def log_failures(label: str, failed: Sequence[str]) -> None:
    """Log how many deadlines of a policy cannot be computed, if any."""
    if failed:
        logger.warning(
            "%s: %d deadlines cannot be computed and stay where they are. The first is that of object %s",
            *(label, len(failed), failed[0]),
            extra={"event": "replan_failed", "policy": label, "count": len(failed)},
        )


def replan(target: Target, *, hand_set: bool = False, **how: Unpack[How]) -> Result:
    """Compute the deadlines of pending and held timeouts again, from the `since` of their rounds.

    With `after` as their policy declares it now, or the delay that an operator has put in force, and the present values
    and calendars. What has stopped their clocks moves the new deadlines, too; a stopped clock stays stopped, and keeps
    the rest of the new time. A deadline that has passed is due at once, and `Result.due_at_once` counts it. A
    retry or snooze that is due later keeps its time. An object for which the policy has no deadline keeps the one it
    has. The other arguments and errors are those of `cancel`.

    Args:
        hand_set: also deadlines that were set by hand, which follow their data from then on.
    """
    last: list[tuple[Context, Plans]] = []  # of the present page

    def plans_of(context: Context) -> Plans:
        if not last or last[0][0] is not context:
            rows = [row for row in context.facts.rows if row.is_waiting and (hand_set or row.is_computed)]
            last[:] = [(context, Plans(context.facts, rows))]
        return last[0][1]

    def refuse(row: Timeout, context: Context) -> Refusal | None:
        if why := refuse_unless_waiting(row, context):
            return why
        if not (hand_set or row.is_computed):
            return Refusal.HAND_SET
        plan = plans_of(context).of(row)
        if isinstance(plan, Refusal):
            return plan
        if plan.is_of(row):
            return Refusal.SAME_DEADLINE
        context.fires(row, writing.run_at_of(row, plan.due_at, context.facts) <= context.now)
        return None

    def write(rows: list[Timeout], context: Context) -> None:
        planned = ((row, plans_of(context).of(row)) for row in rows)
        plans = [(row, plan) for row, plan in planned if isinstance(plan, Plan)]
        writing.write_plans(plans, context.facts, what="replanned", **context.event)

    return Action("replan", signals.timeout_rescheduled, refuse, write).run(target, **how)
