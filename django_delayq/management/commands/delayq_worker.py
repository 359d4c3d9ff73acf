"""`manage.py delayq_worker`: fire due timeouts until it is stopped."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import django
from django.core.management.base import CommandError, CommandParser
from django.db import Error as DatabaseError
from django.db import connections
from django.utils import autoreload

from django_delayq import __version__
from django_delayq.conf import MAX_CONCURRENCY, get_settings
from django_delayq.exceptions import DelayqError, NotMigrated, PolicyError, WrongInstallation
from django_delayq.firing.state import firing_state
from django_delayq.ledger.db_connections import Limit, how_to_migrate, pool_limit, unapplied_migrations
from django_delayq.logs import shown
from django_delayq.management.operating import DelayqCommand
from django_delayq.management.options import add_repeated, number, values_of
from django_delayq.policy.policies import TimeoutPolicy, declared_queues, get_policies
from django_delayq.signals import worker_started
from django_delayq.sql.dialects import dialect_of
from django_delayq.times.lengths import delay_text, length_text
from django_delayq.worker.loop import Worker, signal_handlers
from django_delayq.worker.supervisor import NUMBER_VARIABLE, REFUSED, Supervisor, default_count
from django_delayq.worker.watchdog import exit_at_once

logger = logging.getLogger("django_delayq.worker")

MAX_PROCESSES: Final = 256
"""More are a typing error, and would leave no memory for other programs."""
MAX_POLICIES: Final = 30
"""So many policies are listed at the start."""
SWITCH_INTERVAL_SECONDS: Final = 0.0005
"""A thread that a deadline wakes would wait up to 5 ms, Python's default, until a sweep releases the GIL."""
EXIT_SECONDS: Final = 5.0
"""How long a process that is reloaded waits for running handlers."""
POLL_SECONDS: Final = 1.0
"""How often the code is checked after it could not be loaded; as often as Django's reloader does."""
LEVELS: Final = ("debug", "info", "warning", "error", "critical")


class Command(DelayqCommand):
    """Fires due timeouts until SIGTERM or SIGINT.

    Then running handlers are completed, the remaining timeouts are released to other workers at once, and the exit code
    is 0. A second signal aborts running handlers: their transactions roll back, the timeouts are retried, and the exit
    code is 1, as it is if the database has not answered for a minute. All processes do so, and one that dies is started
    again. A worker whose database belongs to another installation, or whose policies
    lack an alias by which the database has timeouts, changes nothing, and exits with 3.
    """

    def add_arguments(self, parser: CommandParser) -> None:
        add = parser.add_argument
        add_repeated(parser, "--queue", "Q", "serve only these queues; may be repeated (default: all queues)")
        add("--concurrency", metavar="N", help="handlers that run at once (default: DELAYQ['CONCURRENCY'])")
        add("--processes", metavar="N", help="processes under one supervisor (default: one for each core, at most 4)")
        add("--burst", action="store_true", help="sync, fire due timeouts, and exit when none is due")
        add("--max-timeouts", metavar="N", help="exit after N timeouts; with --processes, each one is then replaced")
        add("--log-level", choices=LEVELS, help="the least level that is logged (default: info, or as LOGGING has it)")
        words = "lines or JSON objects (default: plain, or as in LOGGING)"
        add("--log-format", choices=("plain", "json"), help=words)
        add("--autoreload", action="store_true", help="start again when the code changes, for development")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["autoreload"] and options["processes"]:
            raise CommandError("--autoreload restarts one process. Omit --processes.")
        level = options["log_level"] or {0: "warning", 1: None}.get(options["verbosity"], "debug")
        form = options["log_format"]
        has_colors = self.stderr.isatty() and not options["no_color"]
        colors = {logging.WARNING: self.style.WARNING, logging.ERROR: self.style.ERROR} if has_colors else None
        with shown(level and level.upper(), as_json=None if form is None else form == "json", colors=colors):
            if not options["autoreload"]:
                self._run(options)
            elif os.environ.get(autoreload.DJANGO_AUTORELOAD_ENV) != "true":
                self._restart_after_changes()
            else:
                self._run_with_reloader(options)

    def _restart_after_changes(self) -> None:
        """Run the worker in a process of its own, and start it again whenever the code changes.

        Django's loop would end with a process that fails to load the code. This one waits for the next change.
        """
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        with suppress(KeyboardInterrupt):
            while True:
                # The terminal sends Ctrl-C to the worker, too. An exception here would kill it after 0.25 s.
                with signal_handlers({signal.SIGINT: lambda *_: None}):
                    code = autoreload.restart_with_reloader()
                if code <= 0:
                    sys.exit(code)
                broken = _code()
                self.stderr.write(f"delayq_worker: exit code {code}; it starts again when the code changes")
                while _code() == broken:
                    time.sleep(POLL_SECONDS)

    def _run_with_reloader(self, options: dict[str, Any]) -> None:
        """Run in a thread of Django's reloader, whose process exits when the code changes, and is then started again.

        At its end, the worker releases what it has leased. A lease lasts longer than a developer waits.
        """
        begun: list[tuple[Worker, threading.Thread]] = []

        def run() -> None:
            try:
                self._run(options, began=lambda worker: begun.append((worker, threading.current_thread())))
            except CommandError as error:  # the reloader waits for a change of the code
                self.stderr.write(str(error))

        try:
            autoreload.run_with_reloader(run)
        finally:
            for worker, thread in begun:
                worker.stop()
                thread.join(EXIT_SECONDS)

    def _run(self, options: dict[str, Any], began: Callable[[Worker], None] = lambda _: None) -> None:
        concurrency, limit = options["concurrency"], options["max_timeouts"]
        count = options["processes"] and number("--processes", options["processes"], 1, MAX_PROCESSES)
        greet = partial(self._greet, options)
        try:
            new_worker = partial(
                Worker,
                queues=values_of(options["queue"]) or None,
                concurrency=None if concurrency is None else number("--concurrency", concurrency, 1, MAX_CONCURRENCY),
                burst=options["burst"],
                max_timeouts=None if limit is None else number("--max-timeouts", limit, 1),
            )
            worker = new_worker()  # also to find wrong settings before any process starts
            began(worker)
            sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
            worker_started.connect(greet)
            if (count := count or count_by_default(options, worker)) > 1:
                self._supervise(count, new_worker, ends=options["burst"])
            else:
                worker.exits = None if options["autoreload"] else exit_at_once  # the reloader has its own end
                worker.run()
        except (NotMigrated, PolicyError, WrongInstallation) as error:
            raise CommandError(str(error), returncode=REFUSED) from error
        except DelayqError as error:
            raise CommandError(str(error)) from error
        finally:
            worker_started.disconnect(greet)
        if worker.counts.get("aborted") or firing_state.stuck_threads:
            # Not sys.exit: it would wait for threads that handlers may have started.
            logging.shutdown()
            self.stdout.flush()
            os._exit(int(worker.has_failed))
        if worker.has_failed:
            sys.exit(1)

    def _greet(self, options: dict[str, Any], *, worker: Worker, **_: Any) -> None:
        """Show the first screen, because the worker, or one of several, begins. Only the first one shows it."""
        if os.environ.get(NUMBER_VARIABLE, "1") != "1":
            return
        with suppress(DatabaseError):
            if apps := unapplied_migrations(worker.using):
                words = "Migrations of %s are not applied: %s"
                advice = how_to_migrate(worker.using)
                logger.warning(words, ", ".join(apps), advice, extra={"event": "migrations_missing", "apps": apps})
        if options["verbosity"] > 0 and options["log_format"] != "json":
            self.stdout.write("\n".join(first_screen(worker)) + "\n\n")  # the log follows
            self.stdout.flush()

    def _supervise(self, count: int, new_worker: Callable[[], Worker], *, ends: bool) -> None:
        if not hasattr(os, "fork") or threading.current_thread() is not threading.main_thread():
            raise CommandError("--processes needs fork() and the main thread. Start several commands instead.")
        self.stdout.flush()
        self.stderr.flush()
        if code := Supervisor(count, new_worker, ends=ends).run():
            sys.exit(code)


def _code() -> dict[Path, float]:
    """Return when each Python file in the folders of loaded modules was changed. New files are among them."""
    reloader = autoreload.StatReloader()
    for file in autoreload.iter_all_python_module_files():
        reloader.watch_dir(file.parent, "*.py")
    return dict(reloader.snapshot_files())


def count_by_default(options: dict[str, Any], worker: Worker) -> int:
    """Return how many processes are started without --processes; one if several are of no use, or a surprise.

    SQLite has one writer, an executor has processes of its own, and a metrics page shows one process. A program that
    calls the command in a thread is not forked.
    """
    is_server = dialect_of(connections[worker.using]).server_time
    is_free = is_server and threading.current_thread() is threading.main_thread() and not get_settings().executor
    is_one = options["burst"] or options["max_timeouts"] or os.environ.get("DELAYQ_METRICS_ADDRESS")
    return default_count(worker) if is_free and not is_one else 1


def first_screen(worker: Worker) -> Iterator[str]:
    """Yield the lines that a worker shows when it begins. They contain no password."""
    several = f"{worker.processes} processes, each with " if worker.processes > 1 else ""
    yield f"django-delayq {__version__}, Django {django.get_version()}"
    yield f"  database  {_database(worker)}"
    yield f"  Redis     {_redis(worker)}"
    yield f"  threads   {several}{worker.concurrency}"
    if executor := get_settings().executor:
        yield f"  executor  {executor}: runs the handlers, and its processes log the firings"
    yield f"  queues    {', '.join(worker.queues)}{'' if worker.only else ' (all)'}"
    served = [policy for policy in get_policies() if worker.only is None or policy.queue in worker.only]
    width = max((len(policy.label) for policy in served[:MAX_POLICIES]), default=0)
    names = [f"{policy.label:{width}}  {_delay(policy)}" for policy in served[:MAX_POLICIES]]
    if len(served) > MAX_POLICIES:
        names.append(f"and {len(served) - MAX_POLICIES} more: manage.py delayq_policies")
    none = f"none in this queue; known queues: {', '.join(declared_queues())}"
    if not get_policies():
        none = "none: is there a timeouts.py in an installed app?"
    yield "  policies  " + "\n            ".join(names or [none])
    yield "  To stop, press Ctrl-C or send SIGTERM: running handlers are completed. A second signal aborts them."


def _database(worker: Worker) -> str:
    connection = connections[worker.using]
    where = connection.settings_dict
    server = f" at {where['HOST']}{':' * bool(where['PORT'])}{where['PORT']}" if where["HOST"] else ""
    name = connection.vendor
    with suppress(DatabaseError):  # MySQL and MariaDB are asked which of them they are
        name = connection.display_name
    limit = pool_limit(worker.using) or Limit(0, "")
    most = f", at most {worker.processes * (limit.size or worker.concurrency + limit.own)} connections"
    most *= bool(dialect_of(connection).server_time)
    return f"{name} {str(where['NAME'])!r}{server} (alias {worker.using!r}){most}"


def _redis(worker: Worker) -> str:
    """Describe Redis. Its address may contain a password, so only host, port and database are shown."""
    redis = worker.redis
    if redis.engine is None:
        return "none: due timeouts are read from the database once a second"
    if not redis.is_up:
        return "not usable now: until it is, due timeouts are read from the database once a second"
    pool: Any = getattr(redis.engine.client, "connection_pool", None)
    address = getattr(pool, "connection_kwargs", {})
    # A Sentinel's service is a host without a port.
    place = f" at {address['host']}:{address['port']}/{address.get('db') or 0}" if address.get("port") else ""
    # Of the main loop, the wake-ups, two threads that sweep, sync and schedule, and the handlers that schedule.
    most = f"{worker.processes * (worker.concurrency + 6)} connections{'' if place else ' to each node'}"
    return f"reached{place}, prefix {redis.engine.prefix!r}, at most {most}"


def _delay(policy: TimeoutPolicy[Any]) -> str:
    """Describe when timeouts of the policy are due, as declared."""
    after = policy.after
    if after is None:
        return "by hand, each with its own delay"
    length = policy.fixed_length
    words = "a computed delay" if length is None else length_text(length)
    if policy.since is not None:
        since = policy.since if isinstance(policy.since, str) else "a computed time"
        words = f"{words} after {since}" if length is None else delay_text(length, since)
    return words if policy.is_automatic else f"{words}, by hand"
