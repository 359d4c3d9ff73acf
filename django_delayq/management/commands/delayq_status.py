"""`manage.py delayq_status`: show the state of workers, ledger and Redis."""

import time
from collections.abc import Iterator
from typing import Any

from django.core.management.base import CommandParser

from django_delayq.conf import get_settings
from django_delayq.ledger.controls import GUARDS, PolicyState
from django_delayq.management.operating import ReportCommand
from django_delayq.management.output import Paint, Screen, guard_of, local, rate_text, seconds
from django_delayq.monitoring.snapshot import PolicyStatus, Snapshot, SyncStatus, snapshot

WATCH_SECONDS = 2.0


class Command(ReportCommand):
    """Shows workers, pending, overdue and dead timeouts, the lag of firing, stopped policies, guard rails and Redis."""

    help = __doc__
    examples = ("", "--watch", "--json")

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--watch", action="store_true", help="redraw every two seconds, until Ctrl-C")

    def handle(self, *args: Any, **options: Any) -> None:
        if not options["watch"]:
            seen = snapshot()
            self.print(seen, self._lines(seen), options)
            return
        screen = Screen(self.stdout)
        try:
            while True:
                seen = snapshot()
                if options["json"]:
                    self.print(seen, (), options)
                else:
                    screen.draw([*self._lines(seen), "", f"every {WATCH_SECONDS:g} s, until Ctrl-C"])
                time.sleep(WATCH_SECONDS)
        except KeyboardInterrupt:
            return

    def _lines(self, seen: Snapshot) -> Iterator[str]:
        good, warn, bad = self.style.SUCCESS, self.style.WARNING, self.style.ERROR
        yield self.style.MIGRATE_LABEL(f"{local(seen.at)} by the clock of database {seen.database!r}")
        name = get_settings().installation
        if seen.installation:
            words = "" if name == seen.installation else bad(f", but DELAYQ['INSTALLATION'] is {name!r} here")
            yield f"belongs   to the installation {seen.installation!r}{words}"
        threads, held, stuck = (
            sum(getattr(worker, name) for worker in seen.workers) for name in ("concurrency", "held", "stuck_threads")
        )
        alive = (good if seen.workers else bad)(f"{len(seen.workers)} alive")
        words = warn(f", {stuck} stuck threads") if stuck else ""
        yield f"workers   {alive}, {threads} threads, {held} under way{words}"
        late = (warn if seen.overdue.value else str)(f"{seen.overdue} for more than a minute")
        yield f"pending   {seen.pending}, of which {seen.due} due, {late}"
        yield f"oldest    due for {seconds(seen.oldest_overdue_seconds)}"
        yield f"firing    {seen.firing}"
        yield f"dead      {(warn if seen.dead.value else str)(str(seen.dead))}"
        yield f"lag       p50 {seconds(seen.lag_p50)}, p99 {seconds(seen.lag_p99)} (the worst policy's)"
        yield f"redis     {_redis(seen, good, warn, bad)}"
        for policy in seen.policies:
            yield from _lines_of(policy, warn)


def _lines_of(policy: PolicyStatus, warn: Paint) -> Iterator[str]:
    """Yield what an operator should know about one policy; nothing if there is nothing special."""
    if policy.sync is not None and (policy.sync.is_running or policy.sync.checked):
        yield f"sync      {policy.label}: {_progress(policy.sync)}"
    if (state := policy.state) is None:
        counts = f"{policy.pending} pending, {policy.firing} firing, {policy.dead} dead"
        yield f"{warn('unknown')}   {policy.label} is not declared: {counts}"
        return
    if policy.is_stopped:
        until = f" until {local(state.until)}" if state.until else ""
        why = f": {state.reason}" if state.reason else ""
        yield f"{warn(f'{state.stop:9}')} {policy.label}{until} by {state.by}{why}; {policy.due} due"
    if guards := list(_guards(state)):
        yield f"guards    {policy.label}: {', '.join(guards)}"
    if state.policy.rate:
        yield f"rate      {policy.label}: at most {rate_text(state.policy.rate)}; {policy.due} due"


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


def _redis(seen: Snapshot, good: Paint, warn: Paint, bad: Paint) -> str:
    if not seen.redis.is_configured:
        return "none: workers read the ledger once a second"
    if not seen.redis.is_reachable:
        return bad(f"unreachable: {seen.redis.error}")
    entries, leased = (sum(getattr(each, name) for each in seen.redis.queues) for name in ("entries", "leased"))
    missing = warn(f"{seen.redis.missing} of the next {seen.redis.compared} are missing")
    return f"{entries} entries, {leased} leased, {missing if seen.redis.missing else good('in step')}"
