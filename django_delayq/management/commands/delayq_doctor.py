"""`manage.py delayq_doctor`: what is wrong, and how to fix it."""

import sys
from typing import Any

from django.core.checks import ERROR, INFO, WARNING
from django.core.management.base import CommandParser

from django_delayq.management.operating import ReportCommand
from django_delayq.monitoring.doctor import examine

LEVELS = {INFO: "ok", WARNING: "warning", ERROR: "error"}


class Command(ReportCommand):
    """Examines the database, Redis, clocks, workers and pending timeouts. Changes nothing.

    The exit code is 1 if an error is found (timeouts are late, or will be), with --strict also for warnings, else 0.
    """

    help = __doc__
    examples = ("", "--quick --json", "--strict")

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--quick", action="store_true", help="skip what reads whole tables: for probes")
        parser.add_argument("--strict", action="store_true", help="exit with 1 for warnings, too")

    def handle(self, *args: Any, **options: Any) -> None:
        findings, rows, lines = examine(quick=options["quick"]), [], []
        paint = {INFO: self.style.SUCCESS, WARNING: self.style.WARNING, ERROR: self.style.ERROR}
        for each in findings:
            level, hint, is_ok = LEVELS[each.level], each.hint or "", each.level == INFO
            rows.append({"name": each.id, "level": level, "text": each.msg, "hint": hint})
            if not is_ok or options["verbosity"] > 0:
                name = "ERROR" if level == "error" else level
                first, *others = self.wrapped(f"{name:8}{each.id}: {each.msg}", before=0, indent=8)
                lines += [paint[each.level](first[:8]) + first[8:], *others]
                lines += self.wrapped(hint, before=8, indent=8) if hint and not is_ok else []
        self.print(rows, lines, options)
        if max(each.level for each in findings) >= (WARNING if options["strict"] else ERROR):
            sys.exit(1)
