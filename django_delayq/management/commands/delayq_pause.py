"""`manage.py delayq_pause`: stop policies."""

from typing import Any

from django.core.management.base import CommandParser

from django_delayq.management.operating import PolicyCommand
from django_delayq.management.options import moment


class Command(PolicyCommand):
    """Stops policies until they are resumed, or until a time. Timeouts that become due meanwhile fire then.

    A policy that is already paused keeps its end and reason unless given.
    """

    examples = (
        "shop.order.cancel_unpaid --until 2h --reason 'wrong price list'",
        "shop.order.cancel_unpaid --until never",
    )
    name, done = "pause", "paused"

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        words = "ends by itself then: 2h, a date and time; never: until it is resumed (default: unchanged, or never)"
        parser.add_argument("--until", metavar="WHEN", default="keep", help=words)

    def parameters(self, options: dict[str, Any]) -> dict[str, Any]:
        until = options["until"]
        if until is None or str(until).strip().lower() == "never":
            return {"until": None}
        return {} if until == "keep" else {"until": moment("--until", until)}
