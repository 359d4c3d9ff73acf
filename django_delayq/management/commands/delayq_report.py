"""`manage.py delayq_report`: report how the rounds of policies have ended."""

import csv
import io
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import router

from django_delayq.ledger.rollups import day_of
from django_delayq.management.operating import ReportCommand
from django_delayq.management.options import duration
from django_delayq.management.output import local, seconds
from django_delayq.models import Timeout
from django_delayq.monitoring.reports import Figures, csv_rows, policy_report
from django_delayq.sql.now import database_now

HEAD = (
    *("rounds", "in time", "share", "ended late", "fired", "shadow", "skipped", "cancelled", "dead"),
    *("late p50", "p99", "time to event"),
)


class Command(ReportCommand):
    """Reports how the rounds of a policy have ended: how many in time, how many fired, how late.

    By day, by month, by policy, or by a field of the objects. Days and months remain after old rows are pruned.

    Examples:
      manage.py delayq_report
      manage.py delayq_report shop.order.cancel_unpaid --last 7d
      manage.py delayq_report shop.order.cancel_unpaid --by month --csv
      manage.py delayq_report shop.order.cancel_unpaid --by channel__region
    """

    arguments = "[LABEL]"

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("label", nargs="?", metavar="LABEL", help="this policy (default: all)")
        words = "day, month, policy, or a field of the objects, such as channel__region (default: day; policy for all)"
        parser.add_argument("--by", metavar="WHAT", help=words)
        words = "how many days until today: 7d (default: 30d; with --by month, 12 months)"
        parser.add_argument("--last", metavar="DURATION", help=words)
        parser.add_argument("--csv", action="store_true", help="print CSV, with durations in seconds")
        super().add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        if options["csv"] and options["json"]:
            raise CommandError("Give only one of --csv and --json.")
        by = options["by"] or ("day" if options["label"] else "policy")
        last, now = options["last"], database_now(router.db_for_write(Timeout))
        first = None if last is None else day_of(now - duration("--last", last))
        found = policy_report(options["label"], by=by, first=first)
        if options["csv"]:
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows(csv_rows(found))
            self.stdout.write(text.getvalue(), ending="")
            return
        rows = [_cells(line) for line in (*found.lines, found.total)]
        title = f"{found.policy or 'All policies'}, {found.first} to {found.last}"
        table = self.table((by, *HEAD), rows, "shadow", "skipped", "p99", "ended late", "dead", "cancelled")
        note = [] if found.counted_until is None else [f"Counted until {local(found.counted_until)}"]
        self.print(found, [title, *table, *note], options)


def _cells(line: Figures) -> tuple[object, ...]:
    return (
        line.name, line.rounds, line.in_time, "-" if line.share is None else f"{line.share:.1%}", line.ended_late,
        line.fired, line.shadow, line.skipped, line.cancelled, line.dead,
        seconds(line.late_p50), seconds(line.late_p99), seconds(line.time_to_event),
    )  # fmt: skip
