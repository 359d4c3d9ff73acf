"""How things stand: one snapshot for people, probes and metrics, at a cost that a million rows do not change."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from django.db import router

from django_delayq.clock import database_now
from django_delayq.ledger.controls import PolicyState, policy_states
from django_delayq.ledger.search import NOTHING, Count, count_each, labels_in
from django_delayq.models import Timeout, TimeoutQuerySet, WorkerSeen
from django_delayq.monitoring.redis import RedisStatus, redis_status
from django_delayq.policies import registry

OVERDUE: Final = timedelta(minutes=1)
"""So long after its time nothing should wait any more."""
ALIVE: Final = timedelta(seconds=20)
"""A worker that has not been seen for so long is not there any more."""
LATELY: Final = timedelta(hours=24)
SAMPLE: Final = 1_000
HOURS: Final = 24

COUNTED: Final = ("pending", "firing", "dead", "fired", "skipped")
"""The counts of a policy that do not include one another."""

State = Timeout.State


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker that lives."""

    name: str
    queues: tuple[str, ...] | None
    concurrency: int
    held: int
    uses_redis: bool
    version: str
    started_at: datetime
    seen_at: datetime
    stuck_seconds: float
    """For how long it has not looked for due timeouts; about a second is usual."""


@dataclass(frozen=True, slots=True)
class PolicyStatus:
    """How one policy stands. Counts go up to `search.MAX_COUNT`; fired and skipped ones are those of the last day."""

    label: str
    state: PolicyState | None
    """What is declared and in force; None: the label is not declared (renamed, removed), but rows name it."""
    pending: Count = NOTHING
    due: Count = NOTHING
    overdue: Count = NOTHING
    firing: Count = NOTHING
    dead: Count = NOTHING
    fired: Count = NOTHING
    skipped: Count = NOTHING
    oldest_due_at: datetime | None = None
    """When the pending row that has waited longest was to run; None: nothing is due."""
    lag_p50: float | None = None
    """Seconds between deadline and firing of half of the last 1,000 firings of the last day; None: there are none."""
    lag_p99: float | None = None
    hours: tuple[Count, ...] = ()
    """What falls due in each of the next 24 hours; empty where it was not asked for."""

    @property
    def is_stopped(self) -> bool:
        """Whether an operator has paused or held it."""
        return self.state is not None and self.state.is_stopped


@dataclass(frozen=True, slots=True)
class Snapshot:
    """How everything stands at one moment of the database's clock. The counts are the sums of the policies'."""

    at: datetime
    database: str
    workers: tuple[WorkerStatus, ...]
    policies: tuple[PolicyStatus, ...]
    redis: RedisStatus
    pending: Count = NOTHING
    due: Count = NOTHING
    overdue: Count = NOTHING
    firing: Count = NOTHING
    dead: Count = NOTHING
    oldest_overdue_seconds: float = 0.0
    """For how long the oldest due row of a policy that is not stopped has waited; 0: nothing is due."""
    lag_p50: float | None = None
    """The worst of the policies'."""
    lag_p99: float | None = None


def snapshot(using: str | None = None) -> Snapshot:
    """How everything stands now. Asks the database some times for each policy, and Redis once for each queue.

    Raises the database's errors, none of Redis.
    """
    using = using or router.db_for_write(Timeout)
    now = database_now(using)
    policies = tuple(policy_statuses(using, hours=False))
    running = [policy.oldest_due_at for policy in policies if not policy.is_stopped and policy.state is not None]
    oldest = min((moment for moment in running if moment is not None), default=now)
    sums: dict[str, Any] = {
        name: sum((getattr(policy, name) for policy in policies), NOTHING)
        for name in ("pending", "due", "overdue", "firing", "dead")
    }
    worst: dict[str, Any] = {
        name: max((lag for policy in policies if (lag := getattr(policy, name)) is not None), default=None)
        for name in ("lag_p50", "lag_p99")
    }
    return Snapshot(
        at=now,
        database=using,
        workers=tuple(workers_alive(using)),
        policies=policies,
        redis=redis_status(using, now),
        oldest_overdue_seconds=max(0.0, (now - oldest).total_seconds()),
        **sums,
        **worst,
    )


def workers_alive(using: str) -> list[WorkerStatus]:
    """The workers that said so within the last seconds, the oldest first."""
    now = database_now(using)
    rows = WorkerSeen.objects.using(using).filter(seen_at__gt=now - ALIVE).order_by("started_at", "id")
    return [
        WorkerStatus(
            str(row),
            None if row.queues is None else tuple(row.queues),
            row.concurrency,
            row.held,
            row.uses_redis,
            row.version,
            row.started_at,
            row.seen_at,
            max(0.0, (row.seen_at - row.passed_at).total_seconds()),
        )
        for row in rows
    ]


def policy_statuses(using: str | None = None, *, hours: bool = True) -> list[PolicyStatus]:
    """Return each declared policy by its label, then each label that is not declared and has rows that are counted."""
    using = using or router.db_for_write(Timeout)
    now = database_now(using)
    declared = [policy_status(state, using, now, hours=hours) for state in policy_states(using)]
    unknown = [label for label in labels_in(Timeout.objects.using(using)) if registry.get(label) is None]
    left = [_status_of(label, [label], None, using, now, hours=hours) for label in unknown]
    return declared + [policy for policy in left if any(getattr(policy, name).value for name in COUNTED)]


def policy_status(state: PolicyState, using: str, now: datetime, *, hours: bool = True) -> PolicyStatus:
    """How one declared policy stands; rows under its former labels are its own."""
    return _status_of(state.label, list(state.policy.labels), state, using, now, hours=hours)


def _status_of(
    label: str, labels: list[str], state: PolicyState | None, using: str, now: datetime, *, hours: bool
) -> PolicyStatus:
    rows: TimeoutQuerySet = Timeout.objects.using(using).of_labels(labels).order_by("policy", "state", "run_at", "id")
    pending, lately = rows.filter(state=State.PENDING), rows.filter(run_at__gte=now - LATELY)
    wanted = {
        "pending": pending,
        "due": pending.filter(run_at__lte=now),
        "overdue": pending.filter(run_at__lte=now - OVERDUE),
        "firing": rows.filter(state=State.FIRING),
        "dead": rows.filter(state=State.DEAD),
        "fired": lately.filter(state=State.FIRED),
        "skipped": lately.filter(state=State.SKIPPED),
    }
    if hours:
        moments = [now + timedelta(hours=number) for number in range(HOURS + 1)]
        for number in range(HOURS):
            wanted[str(number)] = pending.filter(run_at__gt=moments[number], run_at__lte=moments[number + 1])
    counts = count_each(wanted, using)
    by_hour = tuple(counts.pop(str(number)) for number in range(HOURS)) if hours else ()
    oldest = pending.filter(run_at__lte=now).order_by("run_at", "id").values_list("run_at", flat=True).first()
    p50, p99 = _lags(lately.filter(state=State.FIRED))
    return PolicyStatus(label, state, **counts, oldest_due_at=oldest, lag_p50=p50, lag_p99=p99, hours=by_hour)


def _lags(fired: TimeoutQuerySet) -> tuple[float | None, float | None]:
    """Of the last `SAMPLE` firings: the lateness that half of them, and one in a hundred, exceeded."""
    last = fired.order_by("-run_at", "-id").values_list("due_at", "settled_at")[:SAMPLE]
    lags = sorted(max(0.0, (settled_at - due_at).total_seconds()) for due_at, settled_at in last if settled_at)
    if not lags:
        return None, None
    return lags[len(lags) // 2], lags[min(len(lags) - 1, int(len(lags) * 0.99))]
