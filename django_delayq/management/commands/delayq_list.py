"""`manage.py delayq_list`: list timeouts."""

from typing import Any

from django.core.management.base import CommandParser

from django_delayq.management.operating import ReportCommand, local, table
from django_delayq.management.options import Selection, add_selection, number
from django_delayq.models import Timeout

COLUMNS = ("id", "policy", "object_id", "key", "state", "due_at", "run_at", "attempts", "reason")


class Command(ReportCommand):
    """Lists timeouts by the time of their next attempt; settled ones by that of the last."""

    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        add_selection(parser, tuple(Timeout.State.values), default=("pending", "firing"))
        parser.set_defaults(all=True)  # needs no restriction: it reads at most as many rows as the limit
        parser.add_argument("--limit", default=50, metavar="N", help="at most this many (default: 50)")
        super().add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        limit = number("--limit", options["limit"])
        found = Selection.of(options).first(limit + 1)
        rows = [{name: getattr(row, name) for name in COLUMNS} for row in found[:limit]]
        shown = [[local(row[name]) if name.endswith("_at") else row[name] for name in COLUMNS] for row in rows]
        more = [f"... and more: raise --limit, now {limit}, or select fewer"] if len(found) > limit else []
        self.print(rows, table(COLUMNS, shown) + more, options)
