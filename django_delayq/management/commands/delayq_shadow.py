"""`manage.py delayq_shadow`: switch the shadow mode of a policy."""

from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_delayq.management.operating import GuardCommand
from django_delayq.management.options import number


class Command(GuardCommand):
    """Switches shadow mode: everything happens but the handler, and due timeouts are skipped, for good."""

    arguments = "LABEL on|off|declared"
    examples = ("shop.order.cancel_unpaid on --share 10", "shop.order.cancel_unpaid declared")
    name = "shadow"

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        modes, words = ("on", "off", "declared"), "declared: as in the code"
        parser.add_argument("mode", nargs="?", metavar="|".join(modes), choices=modes, help=words)
        parser.add_argument("--share", metavar="PERCENT", help="on for this percentage of the objects (default: 100)")

    def parameters(self, options: dict[str, Any]) -> dict[str, Any]:
        mode, share = options["mode"], options["share"]
        if mode is None and share is None:  # what is skipped in shadow mode never fires
            raise CommandError("Which mode? Give on, off or declared, or --share PERCENT.")
        if mode in {None, "on"}:
            return {"share": 100 if share is None else number("--share", share, maximum=100)}
        if share is not None:
            raise CommandError(f"--share is the percentage of `on`, and does not go with `{mode}`.")
        return {"share": 0 if mode == "off" else None}
