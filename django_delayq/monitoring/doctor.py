"""Examine an installation: what is wrong, and what to do about it.

The findings are Django's `CheckMessage`s. `Error`: timeouts are late, will be late, or never fire. `Warning`: an
operator should check. `Info`: nothing is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any, Final, TypeAlias

import django
from django.core.checks import INFO, CheckMessage, Error, Info, Warning
from django.db import DatabaseError, connections, router
from django.db.models import Max, Min
from django.utils import timezone
from django.utils.version import get_version_tuple

import django_delayq
from django_delayq.arming.sync import automatic_policies, count_too_old
from django_delayq.conf import get_settings
from django_delayq.engine.scripts import translated
from django_delayq.exceptions import EngineError
from django_delayq.ledger import advances
from django_delayq.ledger.db_connections import (
    LedgerLocked,
    how_to_migrate,
    limited_waits,
    pool_limit,
    server_limit,
    unapplied_migrations,
)
from django_delayq.ledger.declarations import wrong_names
from django_delayq.ledger.installation import ledger_name
from django_delayq.ledger.rollups import OVERDUE
from django_delayq.ledger.search import MAX_COUNT, NOTHING, count_each, in_state, known_labels
from django_delayq.models import ClockAdvance, PolicyChange, Timeout, TimeoutQuerySet, WorkerSeen
from django_delayq.monitoring.misfits import delays, matching_again, moved_models
from django_delayq.monitoring.snapshot import PolicyStatus, obstacles, policy_statuses, redis_status, workers_alive
from django_delayq.operations.changes import unfinished
from django_delayq.policy.policies import declared_queues
from django_delayq.redis_clients import get_engine
from django_delayq.sql.now import database_now
from django_delayq.times.clock import brief, duration_text, plural, to_ms
from django_delayq.worker.servers import REDIS_AWAY

SKEW_WARNING_SECONDS: Final = 1.0
"""NTP keeps clocks within milliseconds. An answer may be late by some hundred."""
SKEW_ERROR_SECONDS: Final = 30.0
"""Below this nothing fires early, but deadlines that application code computes are wrong by the skew."""
MIN_REDIS: Final = (6, 2)
"""The scripts need ZMSCORE, which is new in it."""
MEMORY_WARNING: Final = 0.9
"""Redis needs some memory to answer; when it is full, timeouts are read from the database."""
STUCK_SECONDS: Final = 30.0
"""A main loop passes each second, and may wait for a lock or a connection of the database for some."""
OVERDUE_ERROR: Final = timedelta(minutes=10)
"""The backlog of a peak is gone by then. A longer one needs an operator."""
FAILURES_WARNING: Final = 3
"""A third attempt comes minutes after the deadline by default. Earlier failures are often transient."""
ALL_FAIL_ERROR: Final = timedelta(minutes=10)
"""For so long a service that handlers call may be restarted without waking an operator."""
MAX_FAILING: Final = 20
"""How many failing and how many dead timeouts of a policy are read with their histories, which may be long."""
STOPPED_WARNING: Final = timedelta(days=1)
"""A stop for an incident ends within hours: a longer one was most likely forgotten."""
UNFINISHED_ERROR: Final = timedelta(minutes=2)
"""A worker continues an abandoned change within a minute. After this, none does."""
CAPACITY: Final = {
    "firings_per_second_two_processes": 880,
    "ledger_bytes_per_row": 450,
    "redis_bytes_per_pending": 102,
    "connections_per_worker": 7,  # of which four are those of its handler threads
}
"""Constants of `make bench`: see docs/benchmarks.md, Capacity. A test compares them with the latest run."""


def examine(*, quick: bool = False) -> list[CheckMessage]:
    """Run all checks and return their findings, the most serious first. Changes nothing and raises nothing.

    `quick`: skip what reads whole tables, for a probe that runs every few seconds.
    """
    using = router.db_for_write(Timeout)
    found: list[CheckMessage] = []
    for check in QUICK if quick else QUICK + SLOW:
        try:
            with limited_waits(using):
                found += check(using)
        except LedgerLocked as error:
            hint = "On PostgreSQL see pg_locks and pg_stat_activity, on MySQL and MariaDB SHOW FULL PROCESSLIST."
            found.append(Error(f"{error}. Other checks were left out.", hint=hint, id="ledger.locked"))
            break  # they would wait, too
        except Exception as error:  # noqa: BLE001 - a check that fails is a finding, and the others still run
            is_unmigrated = any(finding.id == "migrations" and finding.level > INFO for finding in found)
            if is_unmigrated and isinstance(error, DatabaseError):
                continue  # a table or column does not exist yet, which is a finding already
            found.append(Error(f"The check failed: {type(error).__name__}: {error}", id=check.__name__))
    return sorted(found, key=lambda finding: -finding.level)


def versions(using: str) -> Iterator[CheckMessage]:
    """Report the versions of this package, Django and the database."""
    connection = connections[using]
    version = ".".join(str(part) for part in connection.get_database_version())
    words = f"django-delayq {django_delayq.__version__}, Django {django.get_version()}"
    yield Info(f"{words}, {connection.display_name} {version}", id="versions")


def migrations(using: str) -> Iterator[CheckMessage]:
    """Find migrations that are not applied."""
    if django_delayq.__name__ in unapplied_migrations(using):
        advice = how_to_migrate(using)
        hint = f"{advice[0].upper()}{advice[1:]}."
        yield Error("Migrations of django_delayq are not applied.", hint=hint, id="migrations")
    else:
        yield Info("All migrations are applied.", id="migrations")


def indexes(using: str) -> Iterator[CheckMessage]:
    """Find missing indexes. Without one, a query of milliseconds takes minutes with a million rows."""
    connection = connections[using]
    missing: list[str] = []
    for model in (Timeout, PolicyChange):
        with connection.cursor() as cursor:
            if model._meta.db_table not in connection.introspection.table_names(cursor):
                return  # it is not migrated yet
            existing = connection.introspection.get_constraints(cursor, model._meta.db_table)
        missing += [each.name for each in (*model._meta.indexes, *model._meta.constraints) if each.name not in existing]
    if missing:
        hint = "They were dropped. Create them again: manage.py sqlmigrate django_delayq 0001_initial shows how."
        yield Error(f"Missing: {', '.join(missing)}.", hint=hint, id="indexes")
    else:
        yield Info("All indexes exist.", id="indexes")


def installation(using: str) -> Iterator[CheckMessage]:
    """Compare the name of this installation with the one that the ledger remembers."""
    name, known = get_settings().installation, ledger_name(using)
    if known in (None, name):
        unnamed = "DELAYQ['INSTALLATION'] is not set: workers accept every copy of this database."
        yield Info(f"The installation is {name!r}." if name else unnamed, id="installation")
    elif name is None:
        text = f"The database belongs to the installation {known!r}, and DELAYQ['INSTALLATION'] is not set here."
        hint = "Set it in every environment. If this database is a copy, its timeouts fire twice."
        yield Warning(text, hint=hint, id="installation")
    else:
        text = f"The database belongs to the installation {known!r}, and DELAYQ['INSTALLATION'] is {name!r}."
        hint = "No worker starts. If it is a copy, run manage.py delayq_adopt; otherwise correct the setting."
        yield Error(text, hint=hint, id="installation")


def machine_clock(using: str) -> Iterator[CheckMessage]:
    """Compare this machine's clock, which computes deadlines, with the database's, which decides which rows are due."""
    yield skew("clock", "This machine's clock", (to_ms(timezone.now()) - to_ms(database_now(using))) / 1000)


def advanced_clock(using: str) -> Iterator[CheckMessage]:
    """Report that the clock of a staging installation was advanced, or that of a database of production."""
    if ahead := advances.total(using):
        text = f"The clock of this installation was advanced by {duration_text(ahead)}."
        yield Info(text, hint="manage.py delayq_clock --reset forgets that.", id="clock.advanced")
    elif found := list(ClockAdvance.objects.using(using).order_by("at")):
        ahead, last = sum((each.length for each in found), timedelta(0)), found[-1]
        text = f"The clock of this database was advanced {plural(len(found), 'time')}, by {duration_text(ahead)}, "
        text += f"last by {last.by} on {last.at:%Y-%m-%d %H:%M}: timeouts that were pending then are due earlier by it."
        hint = "See the settings with which delayq_clock was run. This remains until these rows of ClockAdvance go."
        yield Warning(text, hint=hint, id="clock.advanced")


def connection_limit(using: str) -> Iterator[CheckMessage]:
    """Find a limit that does not allow a worker as many connections as it needs."""
    limit = pool_limit(using) or server_limit(using)
    settings = get_settings()
    shortage = limit and limit.shortage(0 if settings.executor else settings.concurrency)
    if shortage:
        yield Warning(shortage, hint="Raise the limit. Until then workers run fewer threads.", id="connections")
    else:
        yield Info("A worker may open as many connections as it needs.", id="connections")


def workers(using: str) -> Iterator[CheckMessage]:
    """Check that workers run and use Redis, that none hangs, and that every queue with overdue timeouts has one."""
    found = workers_alive(using)
    if not found:
        for obstacle in obstacles(using, ()):
            yield Error(obstacle.english(), hint=f"Start one: {obstacle.command}", id="workers")
        # Raises, for `examine`, where workers run and cannot write their heartbeats, as in a read-only database.
        WorkerSeen.objects.using(using).filter(pk="").update(held=0)
        return
    yield Info(f"{len(found)} running: {', '.join(worker.name for worker in found)}.", id="workers")
    if others := sorted({worker.version for worker in found} - {django_delayq.__version__}):
        text = f"Workers of version {', '.join(others)} are running; this process has {django_delayq.__version__}."
        yield Warning(text, hint="Restart the older ones, unless a deployment is in progress.", id="workers")
    for worker in found:
        if not worker.uses_redis and get_settings().redis is not None:
            text = f"{worker.name} does not use Redis: it reads due timeouts from the database once a second."
            hint = f'Its log names the reason, in the last line that ends with "{REDIS_AWAY}".'
            yield Warning(text, hint=hint, id="workers.redis")
        if worker.stuck_seconds > STUCK_SECONDS:
            text = f"{worker.name} has not checked for due timeouts for {brief(worker.stuck_seconds)}."
            hint = "Restart it. Its timeouts fire when their leases expire."
            yield Error(text, hint=hint, id="workers.stuck")
        if worker.stuck_threads:
            text = plural(worker.stuck_threads, "thread whose handler does not", "threads whose handlers do not")
            text = f"{worker.name} has {text} end after the time limit."
            hint = "Give their sockets and calls timeouts of their own. See the log for TimeLimitExceeded."
            yield Warning(text, hint=hint, id="workers.stuck_threads")
    if any(worker.queues is None for worker in found):
        return
    rows = Timeout.objects.using(using).pending().filter(run_at__lte=database_now(using) - OVERDUE)
    overdue = set(rows.order_by("run_at", "id").values_list("queue", flat=True)[:MAX_COUNT])
    for obstacle in obstacles(using, (), {*declared_queues(), *overdue}):
        is_overdue = obstacle.queue in overdue
        kind, why = (Error, "and timeouts in it are overdue") if is_overdue else (Warning, "which policies name")
        hint = f"Start {obstacle.command}, or a worker without --queue."
        yield kind(f"{obstacle.english().rstrip('.')}, {why}.", hint=hint, id="workers.queues")


def policies(using: str) -> Iterator[CheckMessage]:
    """Find timeouts that are overdue, dead, or of no policy, and policies that are stopped or not synced."""
    now = database_now(using)
    statuses = policy_statuses(using, hours=False)
    overdue = [_overdue(policy) for policy in statuses if policy.urgency == "overdue"]
    yield from overdue or [Info("No timeout that may fire has been overdue for longer than a minute.", id="overdue")]
    for policy in statuses:
        yield from _failing(policy, now, using)
        yield from _notable(policy, now)


def _overdue(policy: PolicyStatus) -> CheckMessage:
    oldest = duration_text(waited := timedelta(seconds=policy.waited_seconds or 0), is_exact=False)
    one = f"of {policy.label} is overdue, for {oldest}."
    many = f"of {policy.label} are overdue, the oldest for {oldest}."
    hint = "Too few workers, a slow handler, a low rate, or objects that are locked elsewhere: see delayq_status."
    kind = Error if waited > OVERDUE_ERROR else Warning
    return kind(plural(policy.overdue, one, many), hint=hint, id="overdue")


def _failing(policy: PolicyStatus, now: datetime, using: str) -> Iterator[CheckMessage]:
    """Report failing timeouts: a warning from the third failure of one on, an error if all attempts of a policy fail.

    All attempts fail if a timeout has failed since the last success, and neither its first failure nor that success is
    less than ten minutes ago. A success is a timeout that fired; the failures are those of the timeouts with the most
    attempts, and of the last dead ones, which also show a policy without retries. An error ends when a timeout fires,
    when no timeout is failing and none has failed for ten minutes, or when the policy is stopped.
    """
    if not policy.failing.value and not policy.dead.value:
        return
    rows = _failed_rows(policy, using)
    failed = [row for row in rows if row.last_failed_at is not None]
    if fired_at := policy.last_fired_at:
        failed = [row for row in failed if row.last_failed_at > fired_at]
    first_failures = [max(row.first_failed_at, fired_at or row.first_failed_at) for row in failed]
    is_going_on = bool(policy.failing.value) or any(row.last_failed_at > now - ALL_FAIL_ERROR for row in failed)
    count = plural(policy.failing, "is failing", "are failing")
    worst = max(rows, key=lambda row: (row.state == Timeout.State.PENDING, row.attempts), default=None)
    if worst is None:
        return
    # No error if its handler gave up, or if its condition came back: the row before has the errors.
    last = worst.last_error or worst.reason or "see its story"
    text = f"Timeout {worst.pk} has failed {plural(worst.attempts, 'time')}, last: {last}."
    hint = f"manage.py delayq_explain --id {worst.pk}, and the log of the workers. After the cause is fixed, the next "
    hint += f"attempt fires; manage.py delayq_fire --policy {policy.label} makes it now."
    failing_for = now - min(first_failures, default=now)
    if is_going_on and failing_for >= ALL_FAIL_ERROR and not policy.is_stopped:
        since = duration_text(failing_for, is_exact=False)
        text = f"No attempt of {policy.label} has succeeded for {since}: {count}, and {policy.dead} dead. {text}"
        yield Error(text, hint=hint, id="failing")
    elif worst.state == Timeout.State.PENDING and worst.attempts >= FAILURES_WARNING:
        count = plural(policy.failing, f"of {policy.label} is failing.", f"of {policy.label} are failing.")
        yield Warning(f"{count} {text}", hint=hint, id="failing")


def _failed_rows(policy: PolicyStatus, using: str) -> list[Timeout]:
    """Return the failing rows of a policy with the most attempts, and its last dead ones, by their indexes."""
    labels = [policy.label] if policy.state is None else policy.state.policy.labels
    found: list[Timeout] = []
    for label in labels:
        rows: TimeoutQuerySet = Timeout.objects.using(using).filter(policy=label).defer("payload")
        failing = rows.failing().order_by("policy", "state", "attempts", "id").reverse()
        dead = rows.filter(state=Timeout.State.DEAD).order_by("policy", "state", "run_at", "id").reverse()
        found += [*failing[:MAX_FAILING], *dead[:MAX_FAILING]]
    return [row for row in found if row.cause in ("", Timeout.Cause.RETRIES)]


def _notable(policy: PolicyStatus, now: datetime) -> Iterator[CheckMessage]:
    """Report what an operator should know about a policy, beside overdue timeouts."""
    label, state, counts = policy.label, policy.state, (policy.pending, policy.firing, policy.dead)
    if state is None and any(count.value for count in counts):
        text = "{} is not declared, but has timeouts: {} pending, {} firing, {} dead.".format(label, *counts)
        hint = "If it was renamed, name it in aliases= of its successor, or the next save schedules a second timeout."
        yield Warning(text, hint=f"{hint} If it was removed: delayq_retire {label}.", id="unknown_policy")
    if policy.dead.value:
        hint = f"delayq_list --policy {label} --state dead, and then delayq_retry or delayq_cancel."
        if state is None:
            hint = f"Nothing can retry them until it is declared: delayq_cancel --policy {label} --state dead"
        yield Warning(plural(policy.dead, f"of {label} is dead.", f"of {label} are dead."), hint=hint, id="dead")
    if state is not None and state.is_stopped and state.stopped_at is not None:
        since, waited = now - state.stopped_at, timedelta(seconds=policy.waited_seconds or 0)
        words = [f"{label} is {state.stop} for {duration_text(since, is_exact=False)}, by {state.by}", state.reason]
        words += [f"{policy.due} due, the oldest for {duration_text(waited, is_exact=False)}"] * bool(waited)
        is_waited_for = state.until is None and waited >= timedelta(hours=1)
        kind: Any = Error if state.is_braked else Warning if is_waited_for or since > STOPPED_WARNING else Info
        resume = f"delayq_resume {label} --dry-run shows what would fire." if kind is not Info else None
        yield kind(f"{'. '.join(each.rstrip('.') for each in words if each)}.", hint=resume, id="stopped")
    if policy.sync is not None and policy.sync.failed:
        one = f"object of {label} is not synced: its deadline cannot be computed."
        many = f"objects of {label} are not synced: their deadlines cannot be computed."
        hint = f"since= or after= raises: delayq_sync --policy {label} --dry-run names an object and the error."
        yield Warning(plural(policy.sync.failed, one, many), hint=hint, id="sync")


def unfinished_changes(using: str) -> Iterator[CheckMessage]:
    """Find changes of policies that have stopped moving rows before their end."""
    for change in unfinished(using).filter(touched_at__lt=database_now(using) - UNFINISHED_ERROR):
        text = f"The change {change.what} of {change.policy} has moved {plural(change.moved, 'row')} and stopped."
        hint = "A worker continues it: start one (manage.py delayq_worker)."
        if change.what == PolicyChange.What.RESUMED:  # only then does the command end nothing but what it shall end
            hint = f"A worker continues it. Without a worker, run delayq_resume {change.policy}."
        yield Error(text, hint=hint, id="changes")


def too_old_to_arm(using: str) -> Iterator[CheckMessage]:
    """Find objects whose deadlines had passed long ago when their policy was declared. Only a backfill arms them."""
    for policy in automatic_policies(using):
        count = count_too_old(policy, using)
        if count.value:
            one = f"object matches {policy.label}, but its deadline passed too long ago to arm it."
            many = f"objects match {policy.label}, but their deadlines passed too long ago to arm them."
            hint = f"delayq_sync --policy {policy.label} --backfill --dry-run"
            yield Warning(plural(count, one, many), hint=hint, id="too_old")


def names(using: str) -> Iterator[CheckMessage]:
    """Find policies whose oldest name is not the one by which the ledger has their timeouts."""
    for text, hint in wrong_names(using):
        yield Error(text, hint=hint, id="names")


def capacity(using: str) -> Iterator[CheckMessage]:
    """Estimate what the next hour needs, from the constants of the benchmark. Counts 10,000 timeouts a minute at most.

    A handler that costs more than the benchmark's, which saves its object, makes it slower; `batch=` much faster.
    """
    now, minute, found = database_now(using), timedelta(minutes=1), workers_alive(using)
    pending = in_state(Timeout.objects.using(using).all(), Timeout.State.PENDING)
    starts = [now + number * minute for number in range(60)]
    counts = count_each({at: pending.filter(run_at__gt=at, run_at__lte=at + minute) for at in starts}, using)
    due, busiest = sum(counts.values(), NOTHING), max(counts.values())
    text = f"{plural(due, 'timeout is', 'timeouts are')} due in the next hour, at most {busiest} in a minute."
    if found:
        rate = len(found) * CAPACITY["firings_per_second_two_processes"] / 2
        opened = sum(worker.concurrency + CAPACITY["connections_per_worker"] - 4 for worker in found)
        text += (
            f" The {plural(len(found), 'running process fires', 'running processes fire')} about {rate:.0f} a second, "
            f"so that minute takes {brief(busiest.value / rate)} and the hour {brief(due.value / rate)}. "
            f"This needs up to {opened} database connections."
        )
    yield Info(text, id="capacity")
    rows = Timeout.objects.using(using).aggregate(span=Max("id") - Min("id") + 1)["span"] or 0
    ledger, redis_hour = rows * CAPACITY["ledger_bytes_per_row"], due.value * CAPACITY["redis_bytes_per_pending"]
    text = f"The ledger has at most {plural(rows, 'row')}, about {ledger / 1e6:,.1f} MB. "
    text += f"Redis needs about {redis_hour / 1e6:,.1f} MB for the next hour."
    yield Info(text, id="capacity.storage")


def skew(name: str, clock: str, ahead: float) -> CheckMessage:
    """Return the finding for a clock that is `ahead` seconds ahead of the database's."""
    seconds = abs(ahead)
    if seconds < SKEW_WARNING_SECONDS:
        return Info(f"{clock} agrees with the database's.", id=name)
    kind = Error if seconds >= SKEW_ERROR_SECONDS else Warning
    text = f"{clock} is {brief(seconds)} {'ahead of' if ahead > 0 else 'behind'} the database's."
    return kind(text, hint="Synchronize both machines by NTP, such as timedatectl set-ntp true.", id=name)


def redis(using: str) -> Iterator[CheckMessage]:
    """Check that Redis is reachable, on time and in step with the ledger, and examine each of its servers."""
    engine = get_engine(using)
    if engine is None:
        yield Info("No Redis is configured: workers poll the database once a second.", id="redis")
        return
    status = redis_status(using, database_now(using))
    if not status.is_reachable:
        hint = "Start it, and try redis-cli ping. Meanwhile workers poll the database: timeouts are up to 1 s late."
        yield Error(status.error, hint=hint, id="redis")
        return
    yield Info("Redis answers.", id="redis")
    # Redis's clock wakes workers. They correct a small skew.
    now_ms = engine.queue("default", 0).stats().now_ms
    yield skew("redis.clock", "Redis's clock", (now_ms - to_ms(database_now(using))) / 1000)
    soon = f"due within {duration_text(get_settings().sweep_interval)}"
    count = plural(status.compared, f"timeout that is {soon}.", f"timeouts that are {soon}.")
    text = f"Redis has {status.compared - status.missing} of {count}"
    if not status.compared:
        text = f"No timeout is {soon}: there is nothing to compare with Redis."
    advice = "If a worker is running, its sweep adds them within seconds." if status.missing else None
    known = known_labels(using)
    if foreign := [name for each in engine.queues(declared_queues()) for name in each.foreign_heads(known)]:
        text += f" It has lines of no policy, such as {foreign[0][:100]!r}."
        advice = "Does another application write to it? A sweep removes them within a minute."
    yield (Warning if advice else Info)(text, hint=advice, id="redis.in_step")
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
    if get_version_tuple(version) < MIN_REDIS:
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


Check: TypeAlias = Callable[[str], Iterator[CheckMessage]]

QUICK: tuple[Check, ...] = (versions, migrations, indexes, installation, machine_clock, connection_limit, redis)
QUICK += (advanced_clock, workers, policies, names, unfinished_changes)
SLOW: tuple[Check, ...] = (too_old_to_arm, matching_again, moved_models, delays, capacity)
"""These read the tables of the policies, as a sync does, timeouts of each policy, or the timeouts of an hour."""
