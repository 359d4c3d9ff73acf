"""`manage.py delayq_worker`: fire what falls due, until stopped."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import Any, Final

from django.core.management.base import CommandError, CommandParser

from django_delayq.conf import MAX_CONCURRENCY, ConfigError
from django_delayq.management.arguments import TypedCommand
from django_delayq.worker import Worker

SWITCH_SECONDS: Final = 0.0005


class Command(TypedCommand):
    """Arguments in, a `Worker` out."""

    help = (
        "Fires the timeouts that fall due, until SIGTERM or SIGINT: then what runs is finished, the rest is given "
        "back to other workers at once, and the exit code is 0. A second signal does not wait for what runs: its "
        "database work is undone, it comes again, and the exit code is 1."
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
            "--concurrency", type=_threads, metavar="N", help="handlers at once (default: DELAYQ['CONCURRENCY'])"
        )
        parser.add_argument("--burst", action="store_true", help="exit when nothing is due")
        parser.add_argument("--max-timeouts", type=_count, metavar="N", help="exit after N timeouts")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            worker = Worker(
                queues=options["queue"],
                concurrency=options["concurrency"],
                burst=options["burst"],
                max_timeouts=options["max_timeouts"],
            )
        except ConfigError as error:
            raise CommandError(str(error)) from error
        if options["verbosity"] > 0:
            self.stdout.write(f"delayq_worker: {worker}")
        # A thread that a deadline wakes must not wait 5 ms, Python's default, for a sweep to let go of the interpreter.
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            worker.run()
        except ConfigError as error:
            raise CommandError(str(error)) from error
        if worker.abandoned:
            self.stderr.write(f"delayq_worker: {worker.abandoned} timeouts were running; they come again")
            # Not sys.exit: it would wait for threads that handlers may have started.
            logging.shutdown()
            self.stdout.flush()
            os._exit(1)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no count of 1 or more")
    return int(text)


def _threads(text: str) -> int:
    if _count(text) > MAX_CONCURRENCY:
        raise argparse.ArgumentTypeError(f"no worker needs more than {MAX_CONCURRENCY} threads")
    return int(text)
