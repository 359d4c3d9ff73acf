"""Which step of a row is next, and when it runs, by the plan of its policy for its deadline.

Rows of policies without steps and without grace have no plan: their handler runs at the deadline.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from django_delayq.conf import get_settings
from django_delayq.ledger.locking import read_committed, rows_of
from django_delayq.models import Timeout
from django_delayq.policy.policies import registry
from django_delayq.policy.steps import HANDLER, Course, Planned, passed_before, with_over
from django_delayq.rounds.memory import stops_of
from django_delayq.sql.key_types import pk_of
from django_delayq.times.clock import shifted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from django_delayq.policy.policies import TimeoutPolicy


def planning_policy(row: Timeout) -> TimeoutPolicy[Any] | None:
    """Return the policy of `row` if it has a plan, else None."""
    policy = registry.get(row.policy)
    return policy if policy is not None and policy.has_plan else None


def plan_of_row(row: Timeout, policy: TimeoutPolicy[Any], obj: Any = None, **given: Any) -> Iterator[Planned]:
    """Yield the plan of `row`, without what is over. The arguments are those of `course_of`."""
    return policy.plan(course_of(row, policy, obj, **given))


def course_of(row: Timeout, policy: TimeoutPolicy[Any], obj: Any = None, **given: Any) -> Course:
    """Return the course of the round of `row`. `obj`: its object, if it was read. `given`: see `Course`."""
    course = _course(policy, given.pop("due_at", row.due_at), row.since_at, row.created_at)
    given = {"obj": _needed(row, policy, obj), "over": row.steps_over, "stops": stops_of(row.stops), **given}
    return course._replace(**given)


def _needed(row: Timeout, policy: TimeoutPolicy[Any], obj: Any = None) -> Any:
    """Return `obj`, or read the object of `row` if the plan needs it."""
    return _object_of(row, policy) if policy.plan_is_unknown(obj) else obj


def _course(policy: TimeoutPolicy[Any], due_at: datetime, since_at: datetime | None, created_at: datetime) -> Course:
    """Return the course of a round. In staging it began earlier by how much the clock was advanced since then."""
    since, created = (at and at - registry.advanced(policy.concrete_model, at) for at in (since_at, created_at))
    return Course(due_at, since if since is not None and since < due_at else created or created_at)


def next_at(row: Timeout, due_at: datetime | None = None, **given: Any) -> Planned:
    """Return what is next of a waiting row if its deadline is `due_at`, by default its own. `given`: see `Course`."""
    policy = registry.get(row.policy)
    if policy is None or not policy.has_plan:
        return Planned(due_at or row.due_at, row.step if policy is None else HANDLER)
    return next(plan_of_row(row, policy, due_at=due_at or row.due_at, **given))


def waits_longer(row: Timeout) -> bool:
    """Return whether `row`, which is pending, waits for a retry or a snooze beyond when its next step is planned."""
    return bool(row.attempts or row.snoozes) and row.run_at > next_at(row).at


def opening(row: Timeout, at: datetime) -> datetime:
    """Return when the policy of `row` may act: at `at`, or at its next opening."""
    policy = registry.get(row.policy)
    return policy.opening(at) if policy else at


def begin(row: Timeout, policy: TimeoutPolicy[Any], due_at: datetime, now: datetime, obj: Any = None) -> datetime:
    """Set what is first of the round of `row` that begins now, without steps whose time has passed; return when.

    Steps that are over in `row` stay so: it continues a former round.
    """
    first, row.steps_over = _begun(policy, course_of(row, policy, obj, due_at=due_at), now)
    row.step = first.name
    return first.at


def _begun(policy: TimeoutPolicy[Any], course: Course, now: datetime) -> tuple[Planned, str]:
    """Return what is first of a round that begins now, and what is over then."""
    over = passed_before(now, policy.plan(course._replace(now=now)), course.over)
    return next(policy.plan(course._replace(over=over))), over


def begin_each(
    policy: TimeoutPolicy[Any], rounds: Collection[tuple[Any, datetime | None, datetime]], now: datetime, using: str
) -> list[tuple[datetime, str, str]]:
    """Return when the first step of each new round runs, its name, and what is over.

    `rounds`: the keys of their objects, with `since_at` and `due_at`.
    """
    objects: dict[Any, Any] = {}
    if policy.plan_needs_object:
        rows = rows_of(policy.model, using).filter(pk__in=[pk for pk, *_ in rounds])
        objects = {obj.pk: obj for obj in read_committed(rows, using)}
    found = []
    for pk, since_at, due_at in rounds:
        first, over = _begun(policy, _course(policy, due_at, since_at, now)._replace(obj=objects.get(pk)), now)
        found.append((first.at, first.name, over))
    return found


def following(row: Timeout, policy: TimeoutPolicy[Any], obj: Any = None) -> tuple[Planned, str]:
    """Return what follows the step of `row`, and what is over then."""
    over = with_over(row.steps_over, [row.step])
    return next(plan_of_row(row, policy, obj, over=over)), over


def final_at(row: Timeout, policy: TimeoutPolicy[Any] | None) -> datetime:
    """Return when the handler of `row` acts: at its deadline, or at the end of its grace."""
    if policy is None or policy.grace is None:
        return row.due_at
    return policy.acts_at(row.due_at, _needed(row, policy))


def acts_at(policy: TimeoutPolicy[Any], due_at: datetime, obj: Any) -> datetime:
    """Return when the handler acts on a deadline, as far as arming counts that.

    At most half of `RETENTION` later: after that the row of the round may have been pruned, and it would begin again.
    """
    grace_ends_at = policy.acts_at(due_at, obj)
    return due_at if grace_ends_at == due_at else min(grace_ends_at, due_at + get_settings().retention / 2)


def deadline_for(row: Timeout, run_at: datetime) -> datetime:
    """Return with which deadline the handler of `row` would act at `run_at`, where a retry has moved it."""
    return shifted(run_at, row.due_at - final_at(row, registry.get(row.policy)))


def _object_of(row: Timeout, policy: TimeoutPolicy[Any]) -> Any:
    """Read the object of `row`; None: it does not exist any more."""
    using = row._state.db or "default"
    try:
        pk = pk_of(policy.concrete_model, row.object_id)
    except ValueError:
        return None
    return read_committed(rows_of(policy.model, using).filter(pk=pk), using).first()
