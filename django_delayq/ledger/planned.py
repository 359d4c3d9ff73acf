"""Which step of a row is next, and when it runs, by the plan of its policy for its deadline.

Rows of policies without steps and without grace have no plan: their handler runs at the deadline.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from django_delayq.conf import get_settings
from django_delayq.ledger.locking import read_committed, rows_of
from django_delayq.models import Timeout
from django_delayq.policy.policies import TimeoutPolicy, registry
from django_delayq.policy.steps import Course, Planned, passed_before, with_over
from django_delayq.rounds.memory import stops_of
from django_delayq.sql.key_types import pk_of
from django_delayq.times.paths import read_relations

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator


def planning_policy(row: Timeout) -> TimeoutPolicy[Any] | None:
    """Return the policy of `row` if it has a plan, else None."""
    policy = registry.get(row.policy)
    return policy if policy is not None and policy.has_plan else None


def plan_of_row(row: Timeout, policy: TimeoutPolicy[Any], obj: Any, **given: Any) -> Iterator[Planned]:
    """Yield the plan of `row`, without what is over. The arguments are those of `course_of`."""
    return policy.plan(course_of(row, policy, obj, **given))


def course_of(row: Timeout, policy: TimeoutPolicy[Any], obj: Any, **given: Any) -> Course:
    """Return the course of the round of `row`. `obj`: its object, if the plan needs it. `given`: see `Course`."""
    course = _course(policy, given.pop("due_at", row.due_at), row.since_at, row.created_at)
    stops = [each for each in stops_of(row.stops) if each[1] > course.start]  # of a row that continues a round
    return course._replace(**{"obj": obj, "over": row.steps_over, "stops": stops, **given})


def _course(policy: TimeoutPolicy[Any], due_at: datetime, since_at: datetime | None, created_at: datetime) -> Course:
    """Return the course of a round. In staging it began earlier by how much the clock was advanced since then."""
    since, created = (at and at - registry.advanced(policy.concrete_model, at) for at in (since_at, created_at))
    return Course(due_at, since if since is not None and since < due_at else created or created_at)


def begin(row: Timeout, policy: TimeoutPolicy[Any], due_at: datetime, now: datetime, obj: Any) -> datetime:
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
        read_relations(list(objects.values()), policy.followed)
    found = []
    for pk, since_at, due_at in rounds:
        first, over = _begun(policy, _course(policy, due_at, since_at, now)._replace(obj=objects.get(pk)), now)
        found.append((first.at, first.name, over))
    return found


def following(row: Timeout, policy: TimeoutPolicy[Any], obj: Any = None) -> tuple[Planned, str]:
    """Return what follows the step of `row`, and what is over then. `obj`: its object, if it was read."""
    over = with_over(row.steps_over, [row.step])
    if policy.plan_is_unknown(obj):
        rows = rows_of(policy.model, row._state.db or "default").filter(pk=pk_of(policy.concrete_model, row.object_id))
        obj = read_committed(rows, rows.db).first()
    return next(plan_of_row(row, policy, obj, over=over)), over


def acts_at(policy: TimeoutPolicy[Any], due_at: datetime, obj: Any) -> datetime:
    """Return when the handler acts on a deadline, as far as arming counts that.

    At most half of `RETENTION` later: after that the row of the round may have been pruned, and it would begin again.
    """
    grace_ends_at = policy.acts_at(due_at, obj)
    return due_at if grace_ends_at == due_at else min(grace_ends_at, due_at + get_settings().retention / 2)
