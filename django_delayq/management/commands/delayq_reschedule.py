"""`manage.py delayq_reschedule`: change the deadlines of timeouts."""

from typing import Any

from django.core.management.base import CommandParser

from django_delayq.management.operating import TimeoutCommand
from django_delayq.management.options import duration, moment
from django_delayq.operations import Result


class Command(TimeoutCommand):
    """Changes deadlines of pending timeouts, earlier or later. One in the past becomes now: --dry-run counts those."""

    examples = ("--id 17 --to 2026-03-01T18:00", "--policy shop.order.cancel_unpaid --by=-198d --dry-run")
    name, done = "reschedule", "changed"

    def add_arguments(self, parser: CommandParser) -> None:
        how = parser.add_mutually_exclusive_group(required=True)
        how.add_argument("--by", metavar="DURATION", help="later by this: 45m, 1h30m, 2d; earlier: --by=-2h")
        how.add_argument("--to", metavar="WHEN", help="due then: now, 2h, 2026-03-01T18:00")
        super().add_arguments(parser)

    def parameters(self, options: dict[str, Any]) -> dict[str, Any]:
        if options["by"] is not None:
            return {"shift": duration("--by", options["by"], may_be_negative=True)}
        return {"at": moment("--to", options["to"])}

    def summary(self, result: Result) -> str:
        due = f", {result.due_at_once} of them due at once" if result.due_at_once else ""
        return f"{super().summary(result)}{due}"
