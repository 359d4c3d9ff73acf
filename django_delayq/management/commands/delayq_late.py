"""`manage.py delayq_late`: limit how late timeouts of a policy may fire."""

from typing import Any, get_args

from django.core.management.base import CommandError, CommandParser

from django_delayq.management.operating import GuardCommand
from django_delayq.management.options import duration
from django_delayq.policy_options import Then


class Command(GuardCommand):
    """Limits the lateness: timeouts whose first attempt would begin later than that are skipped, or dead."""

    arguments = "LABEL DURATION|off|declared"
    examples = ("shop.order.cancel_unpaid 6h --then dead", "shop.order.cancel_unpaid off")
    name = "late"

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("after", metavar="DURATION|off|declared", help="6h, 2d; off; declared: as in the code")
        parser.add_argument("--then", choices=get_args(Then), help="default: skip")

    def parameters(self, options: dict[str, Any]) -> dict[str, Any]:
        after = options["after"]
        if after in {"off", "declared"}:
            if options["then"] is not None:
                raise CommandError(f"--then goes with a duration, and not with `{after}`.")
            return {"off": after == "off"}
        return {"after": duration("DURATION", after), "then": options["then"] or "skip"}
