"""`manage.py delayq_doctor`: what is wrong, and how to fix it."""

import sys
from typing import Any

from django.core.checks import ERROR, INFO, WARNING
from django.core.management.base import BaseCommand, CommandParser

from django_delayq.management.operating import as_json
from django_delayq.monitoring.doctor import examine

LEVELS = {INFO: "ok", WARNING: "warning", ERROR: "error"}


class Command(BaseCommand):
    """Examine this installation; changes nothing."""

    help = (
        "Examines the database, Redis, clocks, workers and pending timeouts. The exit code is 1 if an error is found "
        "(timeouts are late, or will be), with --strict also for warnings, and otherwise 0."
    )
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--json", action="store_true", help="print JSON")
        parser.add_argument("--quick", action="store_true", help="skip what reads whole tables: for probes")
        parser.add_argument("--strict", action="store_true", help="exit with 1 for warnings, too")

    def handle(self, *args: Any, **options: Any) -> None:
        findings = examine(quick=options["quick"])
        rows = [
            {"name": each.id, "level": LEVELS[each.level], "text": each.msg, "hint": each.hint or ""}
            for each in findings
        ]
        if options["json"]:
            self.stdout.write(as_json(rows))
        else:
            for row in rows:
                is_ok = row["level"] == "ok"
                if not is_ok or options["verbosity"] > 0:
                    level = "ERROR" if row["level"] == "error" else row["level"]
                    self.stdout.write(f"{level:8}{row['name']}: {row['text']}")
                    if not is_ok and row["hint"]:
                        self.stdout.write(f"{'':8}{row['hint']}")
        if max(each.level for each in findings) >= (WARNING if options["strict"] else ERROR):
            sys.exit(1)
