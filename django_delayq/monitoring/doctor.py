"""Examine an installation: what is wrong, and what to do about it.

The findings are Django's `CheckMessage`s. `Error`: timeouts are late, will be late, or never fire. `Warning`: an
operator should check. `Info`: nothing is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

import django
from django.core.checks import CheckMessage, Error, Info, Warning
from django.db import connections, router
from django.db.migrations.loader import MigrationLoader
from django.db.models import Max, Min
from django.utils import timezone

import django_delayq
from django_delayq.arming.sync import count_too_old
from django_delayq.clock import database_now, to_ms
from django_delayq.conf import get_settings
from django_delayq.delays import signed
from django_delayq.engine.faults import translated
from django_delayq.exceptions import EngineError
from django_delayq.ledger.controls import policy_states
from django_delayq.ledger.db_connections import pool_limit, server_limit
from django_delayq.ledger.locking import database_of
from django_delayq.ledger.search import NOTHING, count_each, in_state
from django_delayq.models import PolicyChange, Timeout
from django_delayq.monitoring.snapshot import OVERDUE, policy_statuses, redis_status, workers_alive
from django_delayq.operations.replan import unfinished
from django_delayq.policies import declared_queues, get_policies
from django_delayq.redis_clients import get_engine

SKEW_WARNING_SECONDS: Final = 1.0
SKEW_ERROR_SECONDS: Final = 30.0
"""Below this nothing fires early, but deadlines that application code computes are wrong by the skew."""
STUCK_SECONDS: Final = 30.0
MAX_OVERDUE_ROWS: Final = 1_000
SAMPLE: Final = 100
"""How many pending timeouts of a policy are compared with its delay, at each end."""
OVERDUE_ERROR: Final = timedelta(minutes=10)
STOPPED_WARNING: Final = timedelta(days=1)
UNFINISHED_ERROR: Final = timedelta(minutes=2)
MIN_REDIS: Final = (6, 2)
MEMORY_WARNING: Final = 0.9
CAPACITY: Final = {
    "firings_per_second_two_processes": 2500,
    "ledger_bytes_per_row": 450,
    "redis_bytes_per_pending": 102,
    "connections_per_worker": 7,  # of which four are those of its handler threads
}
"""Constants of `make bench`: see docs/benchmarks.md, Capacity. A test compares them with the latest run."""


def examine(using: str | None = None, *, quick: bool = False) -> list[CheckMessage]:
    """Run all checks and return their findings, the most serious first. Changes nothing and raises nothing.

    `quick`: skip what reads whole tables, for a probe that runs every few seconds.
    """
    using = using or router.db_for_write(Timeout)
    found: list[CheckMessage] = []
    for name, check in (QUICK if quick else QUICK | SLOW).items():
        try:
            found += check(using)
        except Exception as error:  # noqa: BLE001 - a check that fails is a finding, and the others still run
            found.append(Error(f"The check failed: {type(error).__name__}: {error}", id=name))
    return sorted(found, key=lambda finding: -finding.level)


def versions(using: str) -> Iterator[CheckMessage]:
    """Report the versions of this package, Django and the database."""
    connection = connections[using]
    version = ".".join(str(part) for part in connection.get_database_version())
    words = f"django-delayq {django_delayq.__version__}, Django {django.get_version()}"
    yield Info(f"{words}, {connection.display_name} {version}", id="versions")


def migrations(using: str) -> Iterator[CheckMessage]:
    """Find migrations that are not applied."""
    loader = MigrationLoader(connections[using])
    own = {node for node in loader.graph.nodes if node[0] == "django_delayq"}
    missing = sorted(name for _, name in own - set(loader.applied_migrations))
    if missing:
        yield Error(f"Not applied: {', '.join(missing)}.", hint="Run manage.py migrate django_delayq.", id="migrations")
    else:
        yield Info("All migrations are applied.", id="migrations")


def indexes(using: str) -> Iterator[CheckMessage]:
    """Find missing indexes. Without one, a query of milliseconds takes minutes with a million rows."""
    connection = connections[using]
    missing: list[str] = []
    for model in (Timeout, PolicyChange):
        with connection.cursor() as cursor:
            existing = connection.introspection.get_constraints(cursor, model._meta.db_table)
        missing += [each.name for each in (*model._meta.indexes, *model._meta.constraints) if each.name not in existing]
    if missing:
        hint = "They were dropped. Create them again: manage.py sqlmigrate django_delayq 0001 shows the statements."
        yield Error(f"Missing: {', '.join(missing)}.", hint=hint, id="indexes")
    else:
        yield Info("All indexes exist.", id="indexes")


def machine_clock(using: str) -> Iterator[CheckMessage]:
    """Compare this machine's clock, which computes deadlines, with the database's, which decides which rows are due."""
    yield skew("clock", "This machine's clock", (to_ms(timezone.now()) - to_ms(database_now(using))) / 1000)


def connection_limit(using: str) -> Iterator[CheckMessage]:
    """Find a limit that does not allow a worker as many connections as it needs."""
    limit = pool_limit(using) or server_limit(using)
    settings = get_settings()
    shortage = limit and limit.shortage(0 if settings.executor else settings.concurrency)
    if shortage:
        yield Warning(shortage, hint="Raise the limit. Until then workers run fewer threads.", id="connections")
    else:
        yield Info("A worker may open as many connections as it needs.", id="connections")


def redis(using: str) -> Iterator[CheckMessage]:
    """Check that Redis is reachable, on time and in step with the ledger, and examine each of its servers."""
    engine = get_engine()
    if engine is None:
        yield Info("No Redis is configured: workers poll the ledger once a second.", id="redis")
        return
    try:
        engine.ping()
        stats = engine.queue("default", 0).stats()
    except EngineError as error:
        hint = "Start it, and try redis-cli ping. Meanwhile workers poll the ledger: timeouts are up to a second late."
        yield Error(str(error), hint=hint, id="redis")
        return
    yield Info("Redis answers.", id="redis")
    # Redis's clock wakes workers. They correct a small skew.
    yield skew("redis.clock", "Redis's clock", (stats.now_ms - to_ms(database_now(using))) / 1000)
    status = redis_status(using, database_now(using))
    text = f"Redis has {status.compared - status.missing} of the {status.compared} timeouts that are due next."
    if status.missing:
        hint = "If a worker is running, its sweep adds them within seconds."
        yield Warning(text, hint=hint, id="redis.in_step")
    elif status.is_reachable:
        yield Info(text, id="redis.in_step")
    try:
        with translated(engine.client):
            info = engine.client.info()
    except EngineError as error:
        # Only this report needs INFO, so the ACL user that the docs recommend may not run it.
        text = f"Redis refused INFO, so version, memory and persistence are unknown. {error}"
        yield Warning(text, hint="To check them, allow the user INFO: ACL SETUSER ... +info", id="redis.info")
        return
    for server in redis_servers(info):
        yield from examine_redis_server(server)


def redis_servers(info: Any) -> list[dict[str, Any]]:
    """Split the answer to INFO by server: a cluster answers for each node."""
    nodes = [value for value in info.values() if isinstance(value, dict) and "redis_version" in value]
    return nodes or [info]


def examine_redis_server(info: dict[str, Any]) -> Iterator[CheckMessage]:
    """Check what one server answers to INFO."""
    version = str(info.get("redis_version", "0"))
    if tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) < MIN_REDIS:
        yield Error(f"Redis {version} is too old.", hint="Use Redis 6.2 or newer, or Valkey.", id="redis.version")
    else:
        yield Info(f"Redis {info.get('valkey_version') or version}.", id="redis.version")
    policy = str(info.get("maxmemory_policy", ""))
    if policy.startswith("allkeys"):
        text = f"maxmemory-policy is {policy}: when memory is short, Redis evicts due times."
        hint = "CONFIG SET maxmemory-policy noeviction, or use a Redis that is not a cache."
        yield Error(text, hint=hint, id="redis.eviction")
    elif policy:
        yield Info(f"maxmemory-policy is {policy}: Redis evicts no due times.", id="redis.eviction")
    limit, used = int(info.get("maxmemory", 0) or 0), int(info.get("used_memory", 0) or 0)
    if limit and used > MEMORY_WARNING * limit:
        hint = "Add memory, or shorten HORIZON. The ledger keeps the timeouts that Redis refuses."
        yield Warning(f"{used / limit:.0%} of maxmemory are used.", hint=hint, id="redis.memory")
    # INFO reports snapshots unreliably: without a snapshot, "last save" is the start of the server.
    state = "on" if info.get("aof_enabled") else "off"
    text = f"Its append-only file is {state}; either is fine: the sweep refills an empty Redis."
    yield Info(text, id="redis.persistence")


def skew(name: str, clock: str, ahead: float) -> CheckMessage:
    """Return the finding for a clock that is `ahead` seconds ahead of the database's."""
    seconds = abs(ahead)
    if seconds < SKEW_WARNING_SECONDS:
        return Info(f"{clock} agrees with the database's.", id=name)
    kind = Error if seconds >= SKEW_ERROR_SECONDS else Warning
    text = f"{clock} is {seconds:.1f} s {'ahead of' if ahead > 0 else 'behind'} the database's."
    return kind(text, hint="Synchronize both machines by NTP, such as timedatectl set-ntp true.", id=name)


def workers(using: str) -> Iterator[CheckMessage]:
    """Check that workers run, that none hangs, and that every queue with overdue timeouts has one."""
    found = workers_alive(using)
    if not found:
        yield Error("No worker is running: nothing fires.", hint="Start one: manage.py delayq_worker.", id="workers")
        return
    releases = sorted({worker.version for worker in found})
    names = ", ".join(worker.name for worker in found)
    if len(releases) > 1:
        text = f"{len(found)} running, of versions {', '.join(releases)}: {names}."
        yield Warning(text, hint="Restart the older ones, unless a deployment is in progress.", id="workers")
    else:
        yield Info(f"{len(found)} running: {names}.", id="workers")
    for worker in found:
        if worker.stuck_seconds > STUCK_SECONDS:
            text = f"{worker.name} has not checked for due timeouts for {worker.stuck_seconds:.0f} s."
            hint = "Restart it. Its timeouts fire when their leases expire."
            yield Error(text, hint=hint, id="workers.stuck")
        if worker.stuck_threads:
            text = f"{worker.name} has {worker.stuck_threads} threads whose handlers do not end after their time limit."
            hint = "Give their sockets and calls timeouts of their own. See the log for TimeLimitExceeded."
            yield Warning(text, hint=hint, id="workers.stuck_threads")
    if any(worker.queues is None for worker in found):
        return
    served = {queue for worker in found for queue in worker.queues or ()}
    rows = Timeout.objects.using(using).pending().filter(run_at__lte=database_now(using) - OVERDUE)
    overdue = set(rows.order_by("run_at", "id").values_list("queue", flat=True)[:MAX_OVERDUE_ROWS])
    for queue in sorted({*declared_queues(), *overdue} - served):
        text = f"No worker serves the queue {queue!r}"
        hint = f"Start delayq_worker --queue {queue}, or a worker without --queue."
        if queue in overdue:
            yield Error(f"{text}, and timeouts in it are overdue.", hint=hint, id="workers.queues")
        else:
            yield Warning(f"{text}, which policies name.", hint=hint, id="workers.queues")


def policies(using: str) -> Iterator[CheckMessage]:
    """Find timeouts that are overdue, dead, or name a policy that is not declared."""
    now = database_now(using)
    statuses = policy_statuses(using, hours=False)
    is_late = False
    for policy in statuses:
        if policy.state is None or policy.is_stopped or policy.oldest_due_at is None:
            continue
        waited = now - policy.oldest_due_at
        if waited > OVERDUE:
            is_late = True
            text = f"{policy.overdue} of {policy.label} are overdue, the oldest for {_duration(waited)}."
            hint = "Too few workers, a slow handler, or an object that another transaction locks: see delayq_status."
            yield (Error if waited > OVERDUE_ERROR else Warning)(text, hint=hint, id="overdue")
    if not is_late:
        yield Info("No timeout that may fire has been overdue for longer than a minute.", id="overdue")
    for policy in statuses:
        counts = (policy.pending, policy.firing, policy.dead)
        if policy.state is None and any(count.value for count in counts):
            text = "{} is not declared, but has {} pending, {} firing and {} dead timeouts.".format(
                policy.label, *counts
            )
            hint = f"Declare it, name it in aliases= of its successor, or run delayq_retire {policy.label}."
            yield Warning(text, hint=hint, id="unknown_policy")
        if policy.dead.value and policy.state is None:
            hint = f"Nothing can retry them until it is declared: delayq_cancel --policy {policy.label} --state dead"
            yield Warning(f"{policy.dead} of {policy.label} are dead.", hint=hint, id="dead")
        elif policy.dead.value:
            hint = f"delayq_list --policy {policy.label} --state dead, and then delayq_retry or delayq_cancel."
            yield Warning(f"{policy.dead} of {policy.label} are dead.", hint=hint, id="dead")


def stopped(using: str) -> Iterator[CheckMessage]:
    """Report policies that operators have paused or put on hold, so that they are not forgotten."""
    now = database_now(using)
    for state in policy_states(using):
        if state.is_stopped and state.stopped_at is not None:
            since = now - state.stopped_at
            text = f"{state.label} is {state.stop} for {_duration(since)}, by {state.by}. {state.reason}".strip()
            if since > STOPPED_WARNING:
                yield Warning(text, hint=f"delayq_resume {state.label}", id="stopped")
            else:
                yield Info(text, id="stopped")


def unfinished_changes(using: str) -> Iterator[CheckMessage]:
    """Find changes of policies that have stopped moving rows before their end."""
    for change in unfinished(using).filter(touched_at__lt=database_now(using) - UNFINISHED_ERROR):
        text = f"The change {change.what} of {change.policy} has moved {change.moved} rows and stopped."
        hint = f"A worker continues it. Without a worker, run delayq_resume {change.policy}."
        yield Error(text, hint=hint, id="changes")


def too_old_to_arm(using: str) -> Iterator[CheckMessage]:
    """Find objects whose deadlines had passed long ago when their policy was declared. Only a backfill arms them."""
    for policy in get_policies():
        if policy.is_automatic and database_of(policy.concrete_model) == using:
            count = count_too_old(policy, using, get_settings().sync_interval * 2)
            if count.value:
                text = f"{count} objects match {policy.label}, but their deadlines passed too long ago to arm them."
                hint = f"delayq_sync --policy {policy.label} --backfill --dry-run"
                yield Warning(text, hint=hint, id="too_old")


def delays(using: str) -> Iterator[CheckMessage]:
    """Find policies whose `after` was changed in the code, and whose pending deadlines still have the former one."""
    is_wrong = False
    for state in policy_states(using):
        policy, delay = state.policy, state.delay
        if delay is None or policy.since is None or database_of(policy.concrete_model) != using:
            continue
        rows = _sample(policy.labels, using)
        # A row that was extended or moved, or that a change of the delay has kept, has its deadline on purpose.
        changes = PolicyChange.objects.using(using).filter(policy__in=policy.labels, what=PolicyChange.What.DELAY)
        decided_at = changes.order_by("-id").values_list("at", flat=True).first()
        armed = [row for row in rows if row.since_at and row.due_at == row.first_due_at and not row.extensions]
        found = Counter(row.due_at - row.since_at for row in armed if not decided_at or row.created_at > decided_at)
        # Without fractions of a second, which a timeout has that was scheduled with a delay of its own.
        former = Counter({each: found[each] for each in found if each != delay and not each.microseconds})
        for distance, count in former.most_common(1):
            is_wrong = True
            text = f"Of {len(rows)} pending timeouts of {policy.label} that were checked, {count} are due"
            text += f" {signed(distance)} after the time they count from, but its delay is {signed(delay)} now."
            hint = f"After a change of after= in the code: delayq_replan {policy.label} --mode recompute --dry-run"
            yield Warning(text, hint=hint, id="delays")
    if not is_wrong:
        yield Info("Pending timeouts have the delays of their policies.", id="delays")


def _sample(labels: Sequence[str], using: str) -> list[Any]:
    """Return the pending rows that are due first and last, at most `SAMPLE` each of every label, by the index."""
    columns = ("id", "due_at", "since_at", "first_due_at", "extensions", "created_at")
    found: dict[int, Any] = {}
    for label in labels:
        rows = Timeout.objects.using(using).filter(policy=label, state=Timeout.State.PENDING)
        for sign in ("", "-"):
            ends = rows.order_by(*(f"{sign}{name}" for name in ("policy", "state", "run_at", "id")))
            found |= {row.id: row for row in ends.values_list(*columns, named=True)[:SAMPLE]}
    return list(found.values())


def capacity(using: str) -> Iterator[CheckMessage]:
    """Estimate what the next hour needs, from the constants of the benchmark. Counts 10,000 timeouts a minute at most.

    A handler that costs more than the benchmark's, which saves its object, makes it slower; `batch=` much faster.
    """
    now, minute, found = database_now(using), timedelta(minutes=1), workers_alive(using)
    pending = in_state(Timeout.objects.using(using).all(), Timeout.State.PENDING)
    starts = [now + number * minute for number in range(60)]
    counts = count_each({at: pending.filter(run_at__gt=at, run_at__lte=at + minute) for at in starts}, using)
    due, busiest = sum(counts.values(), NOTHING), max(counts.values())
    text = f"{due} timeouts are due in the next hour, at most {busiest} in a minute."
    if found:
        rate = len(found) * CAPACITY["firings_per_second_two_processes"] / 2
        opened = sum(worker.concurrency + CAPACITY["connections_per_worker"] - 4 for worker in found)
        text += (
            f" The running workers fire about {rate:.0f} a second, so that minute takes {busiest.value / rate:.0f} s "
            f"and the hour {due.value / rate / 60:.0f} minutes. They open up to {opened} database connections."
        )
    yield Info(text, id="capacity")
    ids = Timeout.objects.using(using).aggregate(first=Min("id"), last=Max("id"))
    rows = ids["last"] - ids["first"] + 1 if ids["last"] else 0
    sizes = [rows * CAPACITY["ledger_bytes_per_row"], due.value * CAPACITY["redis_bytes_per_pending"]]
    ledger, redis_hour = (f"{size / 1e6:,.1f} MB" for size in sizes)
    text = f"The ledger has at most {rows} rows, about {ledger}. Redis needs about {redis_hour} for the next hour."
    yield Info(text, id="capacity.storage")


def _duration(value: timedelta) -> str:
    seconds = int(value.total_seconds())
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} seconds"


Check = Callable[[str], Iterator[CheckMessage]]

QUICK: dict[str, Check] = {
    "databases.versions": versions,
    "databases.migrations": migrations,
    "databases.indexes": indexes,
    "databases.clock": machine_clock,
    "databases.room": connection_limit,
    "redis.server": redis,
    "workers.alive": workers,
    "rounds.waiting": policies,
    "rounds.stopped": stopped,
    "rounds.unfinished_changes": unfinished_changes,
}
"""The checks, by the id of the finding that one of them failed."""
SLOW: dict[str, Check] = {
    "rounds.too_old_to_arm": too_old_to_arm,
    "rounds.delays": delays,
    "rounds.capacity": capacity,
}
"""These read the tables of the policies, as a sync does, timeouts of each policy, or the timeouts of an hour."""
