"""`manage.py delayq_resume`: let paused or held policies continue."""

from typing import Any

from django.core.management.base import CommandParser

from django_delayq.ledger.controls import PolicyState
from django_delayq.management.operating import PolicyCommand


class Command(PolicyCommand):
    """Lets policies continue. After a hold pending deadlines are moved first, page by page; may be repeated."""

    examples = ("shop.order.cancel_unpaid", "shop.order.cancel_unpaid --no-shift", "--all --dry-run")
    name, done = "resume", "resumed"
    all_help = "all policies that are stopped, for any reason: --dry-run shows the reasons"

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--no-shift", action="store_true", help="after a hold: leave deadlines where they are")

    def left_alone(self, state: PolicyState, options: dict[str, Any]) -> str:
        return "" if state.is_stopped else "nothing to change"

    def parameters(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"shift": not options["no_shift"]}
