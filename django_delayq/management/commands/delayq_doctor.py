"""`manage.py delayq_doctor`: what is wrong, and what to do about it."""

from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from django_delayq.management.output import as_json
from django_delayq.monitoring.doctor import Level, examine

WORDS = {Level.OK: "ok", Level.WARNING: "warning", Level.ERROR: "ERROR"}


class Command(BaseCommand):
    """Reads only."""

    help = (
        "Examines database, Redis, clocks, workers and what waits. The exit code is 0 if nothing is wrong that makes "
        "timeouts late, 1 if something does, and with --strict 1 for warnings too."
    )
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--json", action="store_true", help="for programs")
        parser.add_argument("--quick", action="store_true", help="nothing that reads whole tables: for probes")
        parser.add_argument("--strict", action="store_true", help="warnings count, too")

    def handle(self, *args: Any, **options: Any) -> None:
        findings = examine(quick=options["quick"])
        if options["json"]:
            self.stdout.write(as_json(findings))
        else:
            for finding in findings:
                if finding.level or options["verbosity"] > 0:
                    self.stdout.write(f"{WORDS[finding.level]:8}{finding.name}: {finding.text}")
                    if finding.level and finding.hint:
                        self.stdout.write(f"{'':8}{finding.hint}")
        if max(finding.level for finding in findings) >= (Level.WARNING if options["strict"] else Level.ERROR):
            sys.exit(1)
