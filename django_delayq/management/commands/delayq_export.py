"""`manage.py delayq_export`: print all that the ledger has of timeouts."""

import json
from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_delayq.management.operating import DelayqCommand
from django_delayq.management.options import Selection, add_selection
from django_delayq.models import Timeout
from django_delayq.operations import export


class Command(DelayqCommand):
    """Prints all that the ledger has of timeouts in any state, as JSON: one line for each of them.

    For a person who asks what is stored about them: select by --related what belongs to them.

    Examples:
      manage.py delayq_export --related shop.customer:7
      manage.py delayq_export --related shop.customer:7 --json
    """

    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        every = tuple(Timeout.State.values)
        add_selection(parser, every, default=every)
        parser.add_argument("--json", action="store_true", help="print one JSON array")

    def handle(self, *args: Any, **options: Any) -> None:
        selection = Selection.of(options)
        absent = selection.absent()
        lines = (json.dumps(each) for each in export(selection.rows))
        if options["json"]:
            self.stdout.write(f"[{', '.join(lines)}]")
        else:
            for line in lines:
                self.stdout.write(line)
        if absent:
            raise CommandError(f"{len(absent)} not found: {', '.join(map(str, absent))}")
