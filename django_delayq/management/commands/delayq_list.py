"""`manage.py delayq_list`: timeouts, the next that fall due first."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_delayq.management.arguments import TypedCommand
from django_delayq.management.selecting import add_selection, first_of, selected
from django_delayq.management.showing import as_json, local, table
from django_delayq.models import Timeout

COLUMNS = ("id", "policy", "object_id", "key", "state", "due_at", "run_at", "attempts", "reason")


class Command(TypedCommand):
    """Reads only."""

    help = "Lists timeouts by the moment of their next attempt, which for settled ones is that of the last."

    def add_arguments(self, parser: CommandParser) -> None:
        add_selection(parser, states=tuple(Timeout.State.values), default=("pending", "firing"))
        parser.set_defaults(all=True)  # it only reads, and no more than the limit
        parser.add_argument("--limit", type=int, default=50, metavar="N", help="no more than this (default: 50)")
        parser.add_argument("--json", action="store_true", help="for programs")

    def handle(self, *args: Any, **options: Any) -> None:
        limit = max(0, options["limit"])
        found = first_of(selected(options), options, limit + 1)
        rows = [{name: getattr(row, name) for name in COLUMNS} for row in found]
        if options["json"]:
            self.stdout.write(as_json(rows[:limit]))
            return
        shown = [[local(row[name]) if name.endswith("_at") else row[name] for name in COLUMNS] for row in rows[:limit]]
        for line in table(COLUMNS, shown):
            self.stdout.write(line)
        if len(rows) > limit:
            self.stdout.write(f"... and more: --limit {limit * 10 or 10}, or narrow it down")
