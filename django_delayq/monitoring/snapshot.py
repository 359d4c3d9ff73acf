"""Snapshot of workers, policies and Redis for people, probes and metrics. Its cost does not grow with the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple, TypeAlias

from django.db import router
from django.utils import translation
from django.utils.translation import gettext as _

from django_delayq.conf import ConfigError, get_settings
from django_delayq.exceptions import EngineError
from django_delayq.ledger import advances
from django_delayq.ledger.controls import PolicyState, policy_states, stop_cache
from django_delayq.ledger.db_connections import limited_waits
from django_delayq.ledger.installation import ledger_name
from django_delayq.ledger.rollups import BY_HOUR, OVERDUE, counted, day_of, hour_of
from django_delayq.ledger.search import MAX_COUNT, NOTHING, Count, count_each, undeclared_in
from django_delayq.models import PolicySync, Timeout, WorkerSeen
from django_delayq.monitoring.reports import COUNTS, HOURS, MAX_READ, read_figures
from django_delayq.policy.policies import declared_queues, get_policies, registry
from django_delayq.redis_clients import get_engine
from django_delayq.scheduling.story import stop_label, undeclared_label
from django_delayq.sql.now import database_now
from django_delayq.times.clock import fitting, to_ms

ALIVE: Final = timedelta(seconds=10)
"""A worker whose last heartbeat is older does not count as running. One comes every five seconds, and may be late by a
few if Redis or the database is slow."""
COMPARED: Final = 100
"""How many of the rows that are due next are looked up in Redis."""
PEEKED: Final = 500
"""How many entries are read of each queue and shard. The engine returns no more."""

Names: TypeAlias = Collection[str] | None

URGENCIES: Final = ("braked", "overdue", "undeclared", "failing", "dead", "stopped", "late", "fine")
"""What a policy is, the first one that an operator should see to first."""


class WorkerStatus(NamedTuple):
    """One worker that is running."""

    name: str
    queues: tuple[str, ...] | None
    concurrency: int
    held: int
    stuck_threads: int
    """Threads that still run a handler after its time limit."""
    uses_redis: bool
    version: str
    started_at: datetime
    seen_at: datetime
    stuck_seconds: float
    """Seconds since it last checked for due timeouts; about one is normal."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A reason why due timeouts do not fire, whatever their handlers would do; `str()` is a translated sentence.

    Attributes:
        code: `no_worker`, `no_worker_for_queue`, `paused`, `braked`, `held`, `releasing`, or `undeclared`.
        policy: whose timeouts it concerns, by its present label; empty: those of every policy.
        queue: whose timeouts it concerns; empty: those of every queue.
        until: when a pause ends by itself.
        by: who has stopped the policy.
        reason: why.
    """

    code: str
    policy: str = ""
    queue: str = ""
    until: datetime | None = None
    by: str = ""
    reason: str = ""

    def __str__(self) -> str:
        if self.code == "no_worker":
            return _("No worker is running: nothing fires.")
        if self.code == "no_worker_for_queue":
            return _("No worker serves the queue {queue}.").format(queue=repr(self.queue))
        if self.code == "undeclared":
            return undeclared_label()
        return stop_label(self.code.replace("braked", "paused"), self.until, self.by, self.reason)

    def english(self) -> str:
        """Return the sentence for commands, which are in English whatever `LANGUAGE_CODE` is."""
        with translation.override("en"):
            return str(self)

    @property
    def command(self) -> str:
        """Return the command that removes it; empty: none does."""
        if self.code in {"no_worker", "no_worker_for_queue"}:
            return "manage.py delayq_worker" + (f" --queue {self.queue}" if self.queue else "")
        return f"manage.py delayq_resume {self.policy}" if self.code in {"paused", "braked", "held"} else ""


class SyncStatus(NamedTuple):
    """How far the workers have compared an automatic policy with its table."""

    is_running: bool
    checked: int
    """The objects that the present or last pass has read; 0 where the database alone compares."""
    total: int | None
    """The objects that the last complete pass has read; None: there was none."""
    began_at: datetime | None
    finished_at: datetime | None
    """The end of the last complete pass."""
    failed: int = 0
    """The objects for which `since` or `after` raises: in the last complete pass, or if more, in the present one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCounts:
    """How many timeouts are in each state that needs attention, up to `search.MAX_COUNT`."""

    pending: Count = NOTHING
    due: Count = NOTHING
    overdue: Count = NOTHING
    failing: Count = NOTHING
    """Pending timeouts of which an attempt has failed, and which are tried again."""
    firing: Count = NOTHING
    dead: Count = NOTHING
    held: Count = NOTHING
    """Timeouts whose clock is stopped."""


@dataclass(frozen=True, slots=True)
class PolicyStatus(StateCounts):
    """The counts of one policy, up to `search.MAX_COUNT` each; `fired` and `skipped` are those of the last day.

    Of timeouts that were to run more than a day ago, such as before a long pause, the last ones are examined: all that
    follow each other are counted, and among the last `MAX_LATE` also single ones.
    """

    label: str
    state: PolicyState | None
    """What is declared and in force; None: rows have this label, but no policy declares it (renamed, removed)."""
    fired: Count = NOTHING
    skipped: Count = NOTHING
    oldest_due_at: datetime | None = None
    """Since when the due row that has waited longest could fire; None: no row is due."""
    waited_seconds: float | None = None
    """For how long it could."""
    lag_p50: float | None = None
    """Median seconds from when a timeout could fire to its firing (see `Timeout.lateness`), of those of the last 1,000
    fired of each label, by the time at which they were to run, that fired in the last day; None: there are none."""
    lag_p99: float | None = None
    last_fired_at: datetime | None = None
    """When the last of these fired."""
    hours: tuple[Count, ...] = ()
    """How many fall due in each of the next 24 hours; empty if `hours=False`."""
    sync: SyncStatus | None = None
    """None: no worker has synced it yet, or it is not automatic."""
    urgency: str = field(init=False, default="fine")
    """The first of `URGENCIES` that holds."""

    @property
    def is_stopped(self) -> bool:
        return self.state is not None and self.state.is_stopped

    def __post_init__(self) -> None:
        is_braked, failed = self.state and self.state.is_braked, (self.failing.value, self.dead.value)
        is_overdue, is_late = ((x or 0) > OVERDUE.total_seconds() for x in (self.waited_seconds, self.lag_p99))
        may_fire = self.state is not None and not self.is_stopped
        holds = (is_braked, is_overdue and may_fire, self.state is None, *failed, self.is_stopped, is_late, True)
        urgency = next(name for name, it_does in zip(URGENCIES, holds, strict=True) if it_does)
        object.__setattr__(self, "urgency", urgency)


Hour = NamedTuple("Hour", [("begins_at", datetime), *((name, int) for name in BY_HOUR)])  # type: ignore[misc]
"""How many rounds have ended in an hour, in each way of `rollups.BY_HOUR`."""


class QueueStatus(NamedTuple):
    """The entries of one queue, over all its shards."""

    name: str
    entries: int
    due: int
    leased: int


class RedisStatus(NamedTuple):
    """What Redis holds.

    Attributes:
        is_configured: False: workers poll the ledger, and the other attributes have no meaning.
        is_reachable: whether it answered this process within a quarter of a second.
        error: why not.
        queues: the entries of each queue.
        compared: how many of the rows that are due next were looked up in Redis, not those of policies with a rate.
        missing: how many of them Redis has not, or hides from workers: an error if it persists, as a sweep adds them.
    """

    is_configured: bool = False
    is_reachable: bool = False
    error: str = ""
    queues: tuple[QueueStatus, ...] = ()
    compared: int = 0
    missing: int = 0

    @property
    def is_in_step(self) -> bool:
        """Return whether Redis has the timeouts that are due next."""
        return self.is_reachable and not self.missing


@dataclass(frozen=True, slots=True)
class Snapshot(StateCounts):
    """The state of the installation at `at`, by the database's clock. The counts are sums over the policies."""

    at: datetime
    database: str
    workers: tuple[WorkerStatus, ...]
    policies: tuple[PolicyStatus, ...]
    """The most urgent ones first."""
    redis: RedisStatus
    oldest_overdue_seconds: float = 0.0
    """How long the oldest due row of a policy that is not stopped has been due; 0: none is due."""
    lag_p50: float | None = None
    """The highest of the policies."""
    lag_p99: float | None = None
    installation: str | None = None
    """The name that the ledger remembers; None: no worker with a name has used it."""
    obstacles: tuple[Obstacle, ...] = ()
    """Why timeouts of declared policies do not fire: see `obstacles`."""
    clock_ahead_seconds: float = 0.0
    """By how much the clock of a staging installation was advanced; 0: it was not."""
    hours: tuple[Hour, ...] = ()
    """The last 24 hours, of which the present one has just begun; none in a `snapshot`."""
    counted_until: datetime | None = None
    """What has ended later is not counted in `hours` yet; None: all is."""


def overview(using: str | None = None) -> Snapshot:
    """Take a snapshot with the last 24 hours, and the next ones of each policy: what the first page shows."""
    seen = snapshot(using, hours=True)
    tallies, until = counted(seen.database, None, day_of(seen.at - timedelta(hours=HOURS)), day_of(seen.at), MAX_READ)
    ended, last, size = sum((tally.hours for tally in tallies.values()), Counter[int]()), hour_of(seen.at), len(BY_HOUR)
    counts = {hour: [ended[hour * size + place] for place in range(size)] for hour in range(last - HOURS + 1, last + 1)}
    hours = tuple(Hour(fitting(datetime.fromtimestamp(hour * 3600, UTC)), *each) for hour, each in counts.items())  # type: ignore[call-arg]
    return replace(seen, hours=hours, counted_until=until)


def snapshot(using: str | None = None, *, hours: bool = False) -> Snapshot:
    """Take a snapshot, with few queries for however many policies, and one call of Redis for each queue and shard.

    Raises the database's errors, LedgerLocked among them, but none of Redis. `hours`: see `policy_statuses`.
    """
    using = using or router.db_for_write(Timeout)
    with limited_waits(using):
        now = database_now(using)
        policies = sorted(policy_statuses(using, hours=hours), key=lambda each: URGENCIES.index(each.urgency))
        waited = (policy.waited_seconds or 0.0 for policy in policies if policy.state and not policy.is_stopped)
        sums: dict[str, Any] = {
            each.name: sum((getattr(policy, each.name) for policy in policies), NOTHING) for each in fields(StateCounts)
        }
        worst: dict[str, Any] = {
            name: max((lag for policy in policies if (lag := getattr(policy, name)) is not None), default=None)
            for name in ("lag_p50", "lag_p99")
        }
        alive, states = workers_alive(using, now), [policy.state for policy in policies if policy.state]
        return Snapshot(
            at=now,
            database=using,
            workers=tuple(alive),
            obstacles=tuple(obstacles_among(states, alive, queues=declared_queues())),
            policies=tuple(policies),
            redis=redis_status(using, now),
            installation=ledger_name(using),
            clock_ahead_seconds=advances.total(using).total_seconds(),
            oldest_overdue_seconds=max(waited, default=0.0),
            **sums,
            **worst,
        )


def workers_alive(using: str, now: datetime | None = None) -> list[WorkerStatus]:
    """Return the workers that run at the database's time `now`, the oldest first."""
    now = now or database_now(using)
    rows = WorkerSeen.objects.using(using).filter(seen_at__gt=now - ALIVE).order_by("started_at", "id")
    same = ("concurrency", "held", "stuck_threads", "uses_redis", "version", "started_at", "seen_at")
    return [
        WorkerStatus(
            name=str(row),
            queues=None if row.queues is None else tuple(row.queues),
            stuck_seconds=max(0.0, (row.seen_at - row.passed_at).total_seconds()),
            **{name: getattr(row, name) for name in same},
        )
        for row in rows
    ]


def obstacles(using: str, labels: Names = None, queues: Names = None) -> list[Obstacle]:
    """Return why timeouts do not fire although they are due, with at most three queries.

    Args:
        using: the database of the ledger.
        labels: only of these policies, by present or former labels; None: of all declared ones.
        queues: only of these queues, such as those of rows; None: of the queues of the policies.
    """
    return list(obstacles_among(policy_states(using), workers_alive(using), labels, queues))


def obstacles_among(
    states: Sequence[PolicyState], workers: Sequence[WorkerStatus], labels: Names = None, queues: Names = None
) -> Iterator[Obstacle]:
    """Yield the same as `obstacles`, from the policies and the running workers."""
    if labels is not None:
        states = [state for state in states if not set(labels).isdisjoint(state.policy.labels)]
    if not workers:
        yield Obstacle("no_worker")
    elif not any(worker.queues is None for worker in workers):
        served = {queue for worker in workers for queue in worker.queues or ()}
        queues = {state.policy.queue for state in states} if queues is None else queues
        yield from (Obstacle("no_worker_for_queue", queue=queue) for queue in sorted(set(queues) - served))
    for state in states:
        if state.is_stopped:
            code = "braked" if state.is_braked else state.stop
            yield Obstacle(code, state.label, until=state.until, by=state.by, reason=state.reason)
    yield from (Obstacle("undeclared", label) for label in sorted(set(labels or ())) if registry.get(label) is None)


def policy_statuses(using: str | None = None, *, hours: bool = True) -> list[PolicyStatus]:
    """Return the status of each declared policy, then of each undeclared label that has rows which are counted.

    Rows under former labels of a policy count for that policy. It makes few queries, however many policies there are.
    `hours`: count the rows that fall due hour by hour.
    """
    using = using or router.db_for_write(Timeout)
    now, unknown = database_now(using), undeclared_in(Timeout.objects.using(using))
    states: dict[str, PolicyState | None] = {state.label: state for state in policy_states(using)}
    syncs = {
        row.policy: SyncStatus(
            row.is_running, row.checked, row.total, row.began_at, row.finished_at, max(row.failed, row.failed_total)
        )
        for row in PolicySync.objects.using(using)
    }
    owners = {label: state.label for state in states.values() if state for label in state.policy.labels}
    figures = read_figures(owners | {label: label for label in unknown}, using, now, HOURS * hours)
    found = [
        PolicyStatus(
            label,
            state,
            sync=syncs.get(label) if state and state.policy.is_automatic else None,
            **figures[label].attributes(now, state.resumed_at if state and not state.stop else None),
        )
        for label, state in (states | dict.fromkeys(unknown)).items()
    ]
    return [each for each in found if each.state or any(getattr(each, name).value for name in COUNTS)]


def count_failing(states: Iterable[PolicyState], using: str) -> dict[str, Count]:
    """Return the same numbers as `PolicyStatus.failing`, by the label of the policy, in one statement."""
    rows: Any = Timeout.objects.using(using).failing().order_by("policy", "state", "attempts", "id")
    return count_each({each.label: rows.of_labels(each.policy.labels) for each in states}, using, MAX_COUNT)


def redis_status(using: str, now: datetime) -> RedisStatus:
    """Compare Redis with the ledger at the database's time `now`. Raises the database's errors, but none of Redis."""
    try:
        if (engine := get_engine(using)) is None:
            return RedisStatus()
        swept_until = now + get_settings().sweep_interval
        stopped = stop_cache.read(using).all_labels()
        # Workers claim due rows of policies with a rate from the ledger, and remove their entries.
        swept = {label for policy in get_policies() if not policy.rate for label in policy.labels}.difference(stopped)
        pending = Timeout.objects.using(using).pending().filter(run_at__lte=swept_until).order_by("run_at", "id")
        rows = list(pending.of_labels(swept).values_list("id", "queue", "policy", "run_at")[:COMPARED])
        names = sorted({*declared_queues(), *(queue for _, queue, *_ in rows)})
        queues = []
        for name in names:
            shards = [engine.queue(name, shard).stats() for shard in range(engine.shards)]
            total, due, leased = (sum(getattr(each, field) for each in shards) for field in ("total", "due", "leased"))
            queues.append(QueueStatus(name, total, due, leased))
        missing = _missing(engine, rows, using, now)
    except (EngineError, ConfigError) as error:
        return RedisStatus(is_configured=True, error=str(error))
    # Rows that were fired, moved or cancelled in the meantime are not missing.
    still = pending.filter(pk__in=missing).count() if missing else 0
    return RedisStatus(True, True, "", tuple(queues), len(rows), still)


def _missing(engine: Any, rows: Sequence[tuple[Any, ...]], using: str, now: datetime) -> list[int]:
    """Return the ids that are not among the first entries of their line; none of a line with too many entries.

    Also those that were due a lease ago and that no worker would get now, if there are more than workers have.
    """
    lines = {(queue, engine.shard_of(id), label) for id, queue, label, _ in rows}
    first = {line: dict(engine.queue(*line[:2]).peek(PEEKED, line[2])) for line in lines}
    found = [(id, at, first[queue, engine.shard_of(id), label]) for id, queue, label, at in rows]
    lost = [id for id, _, entries in found if len(entries) < PEEKED and id not in entries]
    hidden = [id for id, at, entries in found if at + get_settings().lease <= now and entries.get(id, 0) > to_ms(now)]
    return lost + hidden if hidden and len(hidden) > sum(worker.held for worker in workers_alive(using)) else lost
