"""What operators have put in force for policies: stopped, or with another delay. Reads only; `steering` writes.

Whoever arms reads the delay in the very query that looks at the row, so it is never old and costs no query. Whoever
fires reads the stop in the very query that locks the row: what is remembered may be old, or the process may have stood
still between a look and the firing, and what was paused a moment before would fire.

So that what is stopped need not be locked to find that out, workers remember for a second that nothing is; before they
leave a timeout alone they ask again, or one that has just been resumed would be put aside for another minute.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from django.db.models import BooleanField, DurationField, Expression, ExpressionWrapper, Q, Subquery, Value

from django_delayq.clock import DatabaseNow
from django_delayq.models import PolicyControl
from django_delayq.policies import get_policies, get_policy, registry

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models import QuerySet
    from django.db.models.sql.compiler import SQLCompiler

    from django_delayq.policies import TimeoutPolicy

REMEMBERED_SECONDS: Final = 1.0
LOOKED_AT_AGAIN: Final = timedelta(minutes=1)
"""About how long the timeouts of a stopped policy are put aside; whoever resumes it brings them back at once."""
SPREAD: Final = 0.5

Stop = PolicyControl.Stop
Stopped = Mapping[str, datetime | None]
"""The labels of stopped policies, each with the moment at which that ends by itself."""


@dataclass(frozen=True, slots=True)
class PolicyState:
    """How one policy stands: what is declared, and what operators have put in force."""

    policy: TimeoutPolicy[Any]
    stop: str = ""
    """`paused`, `held`, `releasing` (its rows are being moved, and then it goes on), or empty."""
    stopped_at: datetime | None = None
    until: datetime | None = None
    after: timedelta | None = None
    """The delay that an operator has put in the place of the declared one."""
    by: str = ""
    reason: str = ""
    changed_at: datetime | None = None

    @property
    def label(self) -> str:
        """The policy's present label."""
        return self.policy.label

    @property
    def is_stopped(self) -> bool:
        """Whether nothing of it fires."""
        return bool(self.stop)

    @property
    def delay(self) -> timedelta | None:
        """The delay in force, where it is the same for every object."""
        if self.after is not None:
            return self.after
        return self.policy.after if isinstance(self.policy.after, timedelta) else None


def delay_in_force(policy: TimeoutPolicy[Any], using: str) -> Any:
    """An expression for the delay that an operator has put in the place of the policy's; NULL: none."""
    if policy.after is None:
        return Value(None, output_field=DurationField())
    return Subquery(_controls_of(policy, using).values("after")[:1], output_field=DurationField())


def read_delay(policy: TimeoutPolicy[Any], using: str) -> timedelta | None:
    """The same in a query of its own. Raises the database's errors."""
    return _controls_of(policy, using).values_list("after", flat=True).first()


def policy_states(using: str) -> list[PolicyState]:
    """Every declared policy, in the order of their labels, in one query. A pause whose time is up is none."""
    controls = PolicyControl.objects.using(using)
    found: dict[str, PolicyControl] = {}
    for control in controls.annotate(is_over=_is_over()).order_by("changed_at", "id"):
        if policy := registry.get(control.policy):
            found[policy.label] = control
    policies = sorted(get_policies(), key=lambda policy: policy.label)
    return [_state_of(policy, found.get(policy.label)) for policy in policies]


def policy_state(policy: str | TimeoutPolicy[Any], using: str) -> PolicyState:
    """Return how `policy`, or the policy with that label, stands, in one query. Raises UnknownPolicy."""
    policy = get_policy(policy)
    return _state_of(policy, _controls_of(policy, using).annotate(is_over=_is_over()).first())


class IsStopped(Expression):
    """Whether `policy` is stopped by the database's clock, as the statement sees it that has this expression.

    The same as `read_stopped` asks, written out: every firing asks it, and would spend 0.6 ms on having it compiled.
    """

    output_field = BooleanField()
    contains_aggregate = False

    def __init__(self, policy: TimeoutPolicy[Any]) -> None:
        super().__init__()
        self._labels = policy.labels

    def as_sql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper) -> tuple[str, tuple[Any, ...]]:
        """EXISTS and not a join: FOR UPDATE would lock the control too, and firings stand in line for it."""
        now, moment = compiler.compile(DatabaseNow())
        table = connection.ops.quote_name(PolicyControl._meta.db_table)
        labels = ", ".join(["%s"] * len(self._labels))
        sql = (
            f"EXISTS (SELECT 1 FROM {table} control WHERE control.policy IN ({labels}) AND control.stop <> ''"
            f" AND (control.until IS NULL OR control.until > {now}))"
        )
        return sql, (*self._labels, *moment)


def read_stopped(using: str) -> Stopped:
    """The policies that are stopped now by the database's clock, by their present labels. Asks the database."""
    rows = PolicyControl.objects.using(using).exclude(stop=Stop.NONE)
    rows = rows.filter(Q(until__isnull=True) | Q(until__gt=DatabaseNow()))
    found = {}
    asked_at = time.monotonic()  # and not when the answer is there: a slow one would be remembered for longer
    for label, until in rows.values_list("policy", "until"):
        policy = registry.get(label)
        found[policy.label if policy else label] = until
    _remembered[using] = (asked_at, found)
    return found


def resumed_since(moment: datetime, using: str) -> set[str]:
    """Labels of the policies that were changed since `moment` by the database's clock and are not stopped now."""
    rows = PolicyControl.objects.using(using).filter(stop=Stop.NONE, changed_at__gt=moment)
    return set(rows.values_list("policy", flat=True))


def stopped_lately(using: str) -> Stopped:
    """The same as it was within the last second. Raises the database's errors."""
    asked_at, found = _remembered.get(using, (-REMEMBERED_SECONDS, {}))
    return found if time.monotonic() - asked_at < REMEMBERED_SECONDS else read_stopped(using)


def still_stopped(using: str) -> Stopped:
    """What is stopped. A stop that ended before the call is never in the answer.

    One that began within the last second may be missing. For whoever reads the ledger once a second: what was resumed
    just after one look is not left out of the next. Raises the database's errors.
    """
    return read_stopped(using) if stopped_lately(using) else {}


def stopped_among(labels: Collection[str], using: str) -> Stopped:
    """Those of the present `labels` that are stopped. A stop that ended before the call is never in the answer.

    One that began within the last second may be missing. For whoever is about to fire: it saves locking what is
    stopped, and is not what the firing decides by. Raises the database's errors.
    """
    if not any(label in stopped_lately(using) for label in labels):
        return {}
    stopped = read_stopped(using)
    return {label: stopped[label] for label in labels if label in stopped}


def labels_of(stopped: Stopped) -> list[str]:
    """The labels, present and former, under which the ledger has rows of the `stopped` policies."""
    policies = {label: registry.get(label) for label in stopped}
    return sorted({each for label, policy in policies.items() for each in (policy.labels if policy else (label,))})


def look_again_at(now: datetime, until: datetime | None) -> datetime:
    """When to look again at a timeout of a policy that is stopped `until` then.

    Spread, because a hundred thousand that all come back in one moment would keep everybody else waiting.
    """
    again = now + LOOKED_AT_AGAIN * random.uniform(1 - SPREAD, 1 + SPREAD)
    return again if until is None else min(again, until)


def forget() -> None:
    """The next look asks the database: something was changed here."""
    _remembered.clear()


_remembered: dict[str, tuple[float, Stopped]] = {}


def _controls_of(policy: TimeoutPolicy[Any], using: str) -> QuerySet[PolicyControl]:
    """The control of `policy`; under a former label too, as the policy may have been renamed since."""
    return PolicyControl.objects.using(using).filter(policy__in=policy.labels).order_by("-changed_at", "-id")


def _is_over() -> ExpressionWrapper[Q]:
    return ExpressionWrapper(Q(until__isnull=False, until__lte=DatabaseNow()), output_field=BooleanField())


def _state_of(policy: TimeoutPolicy[Any], control: Any) -> PolicyState:
    if control is None:
        return PolicyState(policy)
    if control.is_over:
        return PolicyState(policy, after=control.after, changed_at=control.changed_at)
    stop = str(control.stop)
    return PolicyState(
        policy, stop, control.stopped_at, control.until, control.after, control.by, control.reason, control.changed_at
    )
