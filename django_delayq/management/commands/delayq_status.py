"""`manage.py delayq_status`: show the state of workers, ledger and Redis."""

import time
from collections.abc import Iterator
from typing import Any

from django.core.management.base import CommandParser

from django_delayq.ledger.controls import GUARDS, PolicyState
from django_delayq.management.operating import ReportCommand, guard_of, local, seconds
from django_delayq.monitoring.snapshot import Snapshot, SyncStatus, snapshot

WATCH_SECONDS = 2.0


class Command(ReportCommand):
    """Shows workers, pending, overdue and dead timeouts, the lag of firing, stopped policies, guard rails and Redis."""

    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--watch", action="store_true", help="repeat every two seconds, until Ctrl-C")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            while True:
                seen = snapshot()
                self.print(seen, _lines(seen), options)
                if not options["watch"]:
                    return
                self.stdout.write("")
                self.stdout.flush()
                time.sleep(WATCH_SECONDS)
        except KeyboardInterrupt:
            return


def _lines(seen: Snapshot) -> Iterator[str]:
    yield f"{local(seen.at)} by the clock of database {seen.database!r}"
    threads, held, stuck = (
        sum(getattr(worker, name) for worker in seen.workers) for name in ("concurrency", "held", "stuck_threads")
    )
    words = f", {stuck} stuck threads" if stuck else ""
    yield f"workers   {len(seen.workers)} alive, {threads} threads, {held} under way{words}"
    yield f"pending   {seen.pending}, of which {seen.due} due, {seen.overdue} for more than a minute"
    yield f"oldest    due for {seconds(seen.oldest_overdue_seconds)}"
    yield f"firing    {seen.firing}"
    yield f"dead      {seen.dead}"
    yield f"lag       p50 {seconds(seen.lag_p50)}, p99 {seconds(seen.lag_p99)} (the worst policy's)"
    yield f"redis     {_redis(seen)}"
    for policy in seen.policies:
        if policy.sync is not None and (policy.sync.is_running or policy.sync.checked):
            yield f"sync      {policy.label}: {_progress(policy.sync)}"
        if policy.state is None:
            counts = f"{policy.pending} pending, {policy.firing} firing, {policy.dead} dead"
            yield f"unknown   {policy.label} is not declared: {counts}"
        elif policy.is_stopped:
            until = f" until {local(policy.state.until)}" if policy.state.until else ""
            why = f": {policy.state.reason}" if policy.state.reason else ""
            yield f"{policy.state.stop:9} {policy.label}{until} by {policy.state.by}{why}; {policy.due} due"
        if policy.state is not None and (guards := list(_guards(policy.state))):
            yield f"guards    {policy.label}: {', '.join(guards)}"


def _guards(state: PolicyState) -> Iterator[str]:
    """Yield the guard rails that operators have set, and shadow mode, in which the policy fires nothing."""
    for guard in GUARDS:
        if actor := state.set_by(guard):
            yield f"{guard} {guard_of(state, guard) or 'off'} by {actor}"
        elif guard == "shadow" and state.shadow:
            yield f"shadow {guard_of(state, guard)}"


def _progress(sync: SyncStatus) -> str:
    """Show the pass over a table of which objects are read, which may take longer than `SYNC_INTERVAL`."""
    about = f" of about {sync.total}" if sync.is_running and sync.total else ""
    ended = f"the last complete pass ended {local(sync.finished_at)}" if sync.finished_at else "no complete pass yet"
    return f"{sync.checked}{about} objects checked; {ended}"


def _redis(seen: Snapshot) -> str:
    if not seen.redis.is_configured:
        return "none: workers read the ledger once a second"
    if not seen.redis.is_reachable:
        return f"unreachable: {seen.redis.error}"
    entries, leased = (sum(getattr(each, name) for each in seen.redis.queues) for name in ("entries", "leased"))
    missing = f"{seen.redis.missing} of the next {seen.redis.compared} are missing" if seen.redis.missing else "in step"
    return f"{entries} entries, {leased} leased, {missing}"
