"""`manage.py delayq_resume`: let paused or held policies continue."""

from typing import Any

from django.core.management.base import CommandParser

from django_delayq.management.operating import PolicyCommand


class Command(PolicyCommand):
    """Lets policies continue. After a hold pending deadlines are moved first, page by page; may be repeated."""

    examples = ("shop.order.cancel_unpaid", "shop.order.cancel_unpaid --no-shift")
    name, done = "resume", "resumed"

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--no-shift", action="store_true", help="after a hold: leave deadlines where they are")

    def parameters(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"shift": not options["no_shift"]}
