"""`manage.py delayq_brake`: set after how many firings a policy pauses itself."""

from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_delayq.management.operating import GuardCommand
from django_delayq.management.options import duration, number


class Command(GuardCommand):
    """Sets the brake: the policy pauses itself when more than MOST of its timeouts fire within a period."""

    arguments = "LABEL MOST|off|declared"
    examples = (
        "shop.order.cancel_unpaid 500 --per 10m",
        "shop.order.cancel_unpaid off --reason 'a campaign ends tonight'",
    )
    name = "brake"

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("most", metavar="MOST|off|declared", help="a number; off; declared: as in the code")
        parser.add_argument("--per", metavar="DURATION", help="the period: 10m, 1h")

    def parameters(self, options: dict[str, Any]) -> dict[str, Any]:
        most, per = options["most"], options["per"]
        if most in {"off", "declared"}:
            if per is not None:
                raise CommandError(f"--per is the period of a number, and does not go with `{most}`.")
            return {"off": most == "off"}
        if per is None:
            raise CommandError("A brake needs a period: --per 10m.")
        return {"most": number("MOST", most, minimum=1), "per": duration("--per", per)}
