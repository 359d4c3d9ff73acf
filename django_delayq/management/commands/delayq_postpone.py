"""`manage.py delayq_postpone`: give timeouts later deadlines."""

from typing import Any

from django.core.management.base import CommandParser

from django_delayq.management.operating import TimeoutCommand
from django_delayq.management.options import duration, moment


class Command(TimeoutCommand):
    """Gives timeouts a later deadline; never an earlier one."""

    examples = ("--policy shop.order.cancel_unpaid --due-before 3h --by 2h --dry-run", "--id 17 --to 2026-03-01T18:00")
    name, done = "postpone", "postponed"

    def add_arguments(self, parser: CommandParser) -> None:
        how = parser.add_mutually_exclusive_group(required=True)
        how.add_argument("--by", metavar="DURATION", help="later by this: 45m, 1h30m, 2d")
        how.add_argument("--to", metavar="WHEN", help="due then: 2h, 2026-03-01T18:00")
        super().add_arguments(parser)

    def parameters(self, options: dict[str, Any]) -> dict[str, Any]:
        if options["by"] is not None:
            return {"after": duration("--by", options["by"])}
        return {"at": moment("--to", options["to"])}
