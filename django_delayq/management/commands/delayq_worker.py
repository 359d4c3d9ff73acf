"""`manage.py delayq_worker`: fire due timeouts until it is stopped."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from django.core.management.base import BaseCommand, CommandError, CommandParser

from django_delayq.conf import MAX_CONCURRENCY, ConfigError
from django_delayq.exceptions import WrongInstallation
from django_delayq.firing.state import firing_state
from django_delayq.management.options import each, number
from django_delayq.worker import WRONG_INSTALLATION, Supervisor, Worker

MAX_PROCESSES: Final = 256
SWITCH_INTERVAL_SECONDS: Final = 0.0005


class Command(BaseCommand):
    """Run a `Worker`."""

    help = (
        "Fires due timeouts until SIGTERM or SIGINT. Then running handlers are completed, the remaining timeouts are "
        "released to other workers at once, and the exit code is 0. A second signal aborts running handlers: their "
        "transactions roll back, the timeouts are retried, and the exit code is 1. With --processes, all of them do "
        "so, and a process that dies is started again."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--queue",
            action="extend",
            nargs="+",
            metavar="Q",
            help="serve only these queues; may be repeated (default: all queues)",
        )
        parser.add_argument(
            "--concurrency", metavar="N", help="handlers that run at once (default: DELAYQ['CONCURRENCY'])"
        )
        parser.add_argument("--processes", metavar="N", help="worker processes under one supervisor (default: 1)")
        parser.add_argument("--burst", action="store_true", help="exit when no timeout is due")
        parser.add_argument(
            "--max-timeouts", metavar="N", help="exit after N timeouts; each process, which is then replaced"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        concurrency, limit, processes = options["concurrency"], options["max_timeouts"], options["processes"] or 1
        try:
            new_worker = partial(
                Worker,
                queues=each(options["queue"]) or None,
                concurrency=None if concurrency is None else number("--concurrency", concurrency, 1, MAX_CONCURRENCY),
                burst=options["burst"],
                max_timeouts=None if limit is None else number("--max-timeouts", limit, 1),
            )
            count = number("--processes", processes, 1, MAX_PROCESSES)
            worker = new_worker()  # also to find wrong settings before any process starts
            if options["verbosity"] > 0:
                prefix = f"{count} processes, each of which " if count > 1 else ""
                self.stdout.write(f"delayq_worker: {prefix}{worker}")
            # A thread that a deadline wakes would wait up to 5 ms, Python's default, until a sweep releases the GIL.
            sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
            if count > 1:
                self._supervise(count, new_worker, ends=options["burst"])
            else:
                worker.run()
        except ConfigError as error:
            raise CommandError(str(error)) from error
        except WrongInstallation as error:
            raise CommandError(str(error), returncode=WRONG_INSTALLATION) from error
        if worker.abandoned:
            self.stderr.write(f"delayq_worker: {worker.abandoned} timeouts were running; they are retried")
        if worker.abandoned or firing_state.stuck_threads:
            # Not sys.exit: it would wait for threads that handlers may have started.
            logging.shutdown()
            self.stdout.flush()
            os._exit(1 if worker.abandoned or worker.is_stuck else 0)
        if worker.is_stuck:  # the threads have ended meanwhile
            sys.exit(1)

    def _supervise(self, count: int, new_worker: Callable[[], Worker], *, ends: bool) -> None:
        if not hasattr(os, "fork"):
            raise CommandError("--processes needs a system with fork(). Start several commands without it instead.")
        if threading.current_thread() is not threading.main_thread():
            raise CommandError("--processes receives signals, so it needs the main thread of its process.")
        self.stdout.flush()
        self.stderr.flush()
        if code := Supervisor(count, new_worker, ends=ends).run():
            sys.exit(code)
