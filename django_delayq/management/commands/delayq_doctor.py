"""`manage.py delayq_doctor`: what is wrong, and how to fix it."""

import socket
import sys
from collections.abc import Iterator
from typing import Any

from django.core.checks import ERROR, INFO, WARNING, CheckMessage, Error, Info, Warning
from django.core.management.base import CommandParser
from django.db import Error as DatabaseFailure

from django_delayq.ledger.routing import database_of
from django_delayq.management.operating import ReportCommand
from django_delayq.management.output import Painted
from django_delayq.models import Timeout
from django_delayq.monitoring.doctor import STUCK_SECONDS, examine
from django_delayq.monitoring.snapshot import workers_alive
from django_delayq.times.clock import brief

LEVELS = {INFO: ("ok", "SUCCESS"), WARNING: ("warning", "WARNING"), ERROR: ("error", "ERROR")}
"""The word for each level, and the style of its colour."""


class Command(ReportCommand):
    """Examines the database, Redis, clocks, workers and pending timeouts. Changes nothing.

    The exit code is 1 if an error is found (timeouts are late, or will be), with --strict also for warnings, else 0.

    Examples:
      manage.py delayq_doctor
      manage.py delayq_doctor --quick --json
      manage.py delayq_doctor --here
      manage.py delayq_doctor --strict
    """

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--quick", action="store_true", help="skip what reads whole tables: for probes")
        words = "check the worker of this machine alone: for probes that restart it"
        parser.add_argument("--here", action="store_true", help=words)
        parser.add_argument("--strict", action="store_true", help="exit with 1 for warnings, too")

    def handle(self, *args: Any, **options: Any) -> None:
        findings = list(workers_here()) if options["here"] else examine(quick=options["quick"])
        rows, lines = [], []
        for each in findings:
            (level, style), hint = LEVELS[each.level], each.hint or ""
            rows.append({"name": each.id, "level": level, "text": each.msg, "hint": hint})
            if each.level > INFO or options["verbosity"] > 0:
                label = Painted(f"{level.upper() if level == 'error' else level:8}", getattr(self.style, style))
                lines += self.wrapped(f"{each.id}: {each.msg}", label=label)
            if each.level > INFO and hint:
                lines += self.wrapped(hint, label=Painted(" " * 8))
        self.print(rows, lines, options)
        if max(each.level for each in findings) >= (WARNING if options["strict"] else ERROR):
            sys.exit(1)


def workers_here() -> Iterator[CheckMessage]:
    """Check that a worker runs on this machine, or in this container, and that its main loop does not hang.

    A database that is away is a warning, and Redis is not checked: restarting the worker would not help.
    """
    host = socket.gethostname()[:100]
    try:
        found = [worker for worker in workers_alive(database_of(Timeout)) if worker.name.rpartition(":")[0] == host]
    except DatabaseFailure as error:
        text = f"The database does not answer ({type(error).__name__}), so the state of the worker is unknown."
        yield Warning(text, hint="Workers reconnect on their own: do not restart them.", id="workers.here")
        return
    if not found:
        hint = "Start one: manage.py delayq_worker. It writes its first heartbeat within seconds."
        yield Error(f"No worker is running on {host}.", hint=hint, id="workers.here")
    for worker in found:
        kind = Error if worker.stuck_seconds > STUCK_SECONDS else Info
        yield kind(f"{worker.name} checked for due timeouts {brief(worker.stuck_seconds)} ago.", id="workers.here")
