"""`manage.py delayq_status`: show the state of workers, ledger and Redis."""

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from django.core.management.base import CommandParser
from django.db import InterfaceError, OperationalError, router

from django_delayq.conf import get_settings
from django_delayq.ledger.db_connections import check_connections, not_migrated
from django_delayq.ledger.rollups import BY_HOUR
from django_delayq.management.commands.delayq_policies import HEAD, OPTIONAL, row
from django_delayq.management.operating import ReportCommand
from django_delayq.management.output import Painted, Screen, local, seconds
from django_delayq.models import Timeout
from django_delayq.monitoring.snapshot import PolicyStatus, RedisStatus, Snapshot, SyncStatus, overview
from django_delayq.times.clock import brief, plural

WATCH_SECONDS = 2.0
"""More often, watching a big ledger would keep the database busy."""


class Command(ReportCommand):
    """Shows workers, Redis, counts of timeouts, the last 24 hours, and the policies, the burning ones first.

    Examples:
      manage.py delayq_status
      manage.py delayq_status --watch
      manage.py delayq_status --json
    """

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--watch", action="store_true", help="redraw every two seconds, until Ctrl-C")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["watch"]:
            with suppress(KeyboardInterrupt):
                self._watch(options)
        else:
            seen = overview()
            self.print(seen, self._lines(seen), options)

    def _watch(self, options: dict[str, Any]) -> None:
        """Draw a frame every two seconds. While the database is away, the last one remains, above the error."""
        screen, lines = Screen(self.stdout), ["no status yet"]
        while True:
            note = f"every {WATCH_SECONDS:g} s, until Ctrl-C"
            try:
                seen = overview()
                lines = list(self._lines(seen))
                if options["json"]:
                    self.print(seen, (), options)
            except (InterfaceError, OperationalError) as error:
                if not_migrated(error, router.db_for_write(Timeout)):
                    raise
                check_connections(error=error)
                why = " ".join(str(error).split())
                note = self.style.ERROR(f"The database does not answer, trying again {note}: {why}")
                if options["json"]:
                    self.stderr.write(note)
            if not options["json"]:
                screen.draw([note, *lines])  # the first lines of a frame are never cut off
            time.sleep(WATCH_SECONDS)

    def _lines(self, seen: Snapshot) -> Iterator[str]:
        yield self.style.MIGRATE_LABEL(f"{local(seen.at)} by the clock of database {seen.database!r}")
        paints = {"good": self.style.SUCCESS, "warning": self.style.WARNING, "bad": self.style.ERROR}
        for line in (*_totals(seen), *(line for policy in seen.policies for line in _lines_of(policy))):
            yield from self.wrapped(line.text, paints.get(line.level, str), label=Painted(f"{line.name:10}"))
        rows = [row(policy, self.style.WARNING) for policy in seen.policies]
        yield from self.table(HEAD, rows, *OPTIONAL)


class Line(NamedTuple):
    """A line of the status, and the level that decides about its colour."""

    name: str
    text: str
    level: Literal["", "good", "warning", "bad"] = ""


def _totals(seen: Snapshot) -> Iterator[Line]:
    """Yield what concerns all policies."""
    name = get_settings().installation
    if seen.installation:
        words = "" if name == seen.installation else f", but DELAYQ['INSTALLATION'] is {name!r} here"
        yield Line("belongs", f"to the installation {seen.installation!r}{words}", "bad" if words else "")
    if seen.clock_ahead_seconds:
        words = f"advanced by {brief(seen.clock_ahead_seconds)}: see delayq_clock"
        yield Line("clock", words, "warning")
    threads, held, stuck = (
        sum(getattr(worker, name) for worker in seen.workers) for name in ("concurrency", "held", "stuck_threads")
    )
    words = f", {plural(stuck, 'stuck thread')}" if stuck else ""
    text = f"{plural(len(seen.workers), 'process', 'processes')}, {plural(threads, 'thread')}, {held} under way{words}"
    versions = ", ".join(sorted({worker.version for worker in seen.workers}))
    level: Any = "bad" if not seen.workers else "warning" if stuck or "," in versions else "good"
    yield Line("workers", f"{text}, version {versions}" if versions else text, level)
    for obstacle in seen.obstacles:
        if not obstacle.policy:  # of a policy that is stopped, a line of its own shows more
            yield Line("", f"{obstacle.english()} Start one: {obstacle.command}", "bad")
    text = f"{seen.pending}, of which {seen.due} due, {seen.overdue} for more than a minute"
    yield Line("pending", text, "warning" if seen.overdue.value else "")
    none = "nothing due that may fire" if seen.due.value else "nothing due"
    waited = seen.oldest_overdue_seconds
    yield Line("oldest", f"due for {seconds(waited)}" if waited else none)
    yield Line("failing", str(seen.failing), "warning" if seen.failing.value else "")
    if seen.held.value:
        yield Line("held", f"{plural(seen.held, 'timeout')} on hold or paused")
    yield Line("firing", str(seen.firing))
    yield Line("dead", str(seen.dead), "warning" if seen.dead.value else "")
    lags = [(policy.lag_p99, policy.label) for policy in seen.policies if policy.lag_p99 is not None]
    worst = f" (the highest; p99 is that of {max(lags)[1]})" if lags else ""
    yield Line("lag", f"p50 {seconds(seen.lag_p50)}, p99 {seconds(seen.lag_p99)}{worst}")
    ended = {name: sum(getattr(hour, name) for hour in seen.hours) for name in BY_HOUR}
    until = f"; counted until {local(seen.counted_until)}" if seen.counted_until else ""
    yield Line("24 hours", "{in_time} in time, {fired} fired, {late} fired late, {dead} dead".format(**ended) + until)
    yield _redis(seen.redis)


def _redis(redis: RedisStatus) -> Line:
    if not redis.is_configured:
        return Line("redis", "none: workers read the database once a second")
    if not redis.is_reachable:
        return Line("redis", f"unreachable: {redis.error}", "bad")
    entries, leased = (sum(getattr(each, name) for each in redis.queues) for name in ("entries", "leased"))
    missing = f"{redis.missing} of the {redis.compared} due next missing" if redis.missing else "in step"
    text = f"{plural(entries, 'entry', 'entries')}, {leased} leased, {missing}"
    return Line("redis", text, "warning" if redis.missing else "good")


def _lines_of(policy: PolicyStatus) -> Iterator[Line]:
    """Yield what an operator should know about one policy; nothing if there is nothing special."""
    if policy.sync is not None and (policy.sync.is_running or policy.sync.checked or policy.sync.failed):
        yield Line("sync", f"{policy.label}: {_progress(policy.sync)}", "warning" if policy.sync.failed else "")
    if (state := policy.state) is None:
        return
    if policy.is_stopped:
        until = f" until {local(state.until)}" if state.until else ""
        why = f": {state.reason.rstrip('.')}" if state.reason else ""
        level: Any = "bad" if state.is_braked else "warning"
        yield Line(state.stop, f"{policy.label}{until} by {state.by}{why}; {policy.due} due", level)


def _progress(sync: SyncStatus) -> str:
    """Show the pass over a table of which objects are read, which may take longer than `SYNC_INTERVAL`."""
    about = f" of about {sync.total}" if sync.is_running and sync.total else ""
    ended = f"the last complete pass ended {local(sync.finished_at)}" if sync.finished_at else "no complete pass yet"
    failed = f", {sync.failed} failed" if sync.failed else ""
    return f"{plural(f'{sync.checked}{about}', 'object')} checked{failed}; {ended}"
