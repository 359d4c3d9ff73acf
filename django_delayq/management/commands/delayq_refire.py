"""`manage.py delayq_refire`: repeat settled timeouts."""

from typing import Any

from django.core.management.base import CommandParser

from django_delayq.management.operating import TimeoutCommand
from django_delayq.management.options import moment


class Command(TimeoutCommand):
    """Gives settled timeouts a new round with the same payload. A worker fires it if its condition holds."""

    examples = ("--policy shop.order.cancel_unpaid --state dead --dry-run", "--id 17 --at 2h")
    name, done = "refire", "scheduled again"

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--at", metavar="WHEN", help="due then: 2h, 2026-03-01T18:00 (default: now)")
        super().add_arguments(parser)

    def parameters(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"at": moment("--at", options["at"])}
