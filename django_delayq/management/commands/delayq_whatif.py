"""`manage.py delayq_whatif`: compute what another delay of a policy would have done."""

from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.utils import translation

from django_delayq.exceptions import DelayqError
from django_delayq.management.operating import ReportCommand
from django_delayq.management.options import add_repeated, duration, values_of, wrong_value
from django_delayq.monitoring.whatif import LAST, sentences, what_if
from django_delayq.times.lengths import length_text
from django_delayq.times.spans import Length


class Command(ReportCommand):
    """Computes from past rounds what another delay would have done: how many would have fired before their event.

    It is exact for a shorter delay. For a longer one it prints between which numbers the answer is. Changes nothing.

    Examples:
      manage.py delayq_whatif shop.order.cancel_unpaid --after 20m
      manage.py delayq_whatif shop.order.cancel_unpaid --after 45m --last 7d --where channel__merchant=7
    """

    arguments = "LABEL"

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("label", metavar="LABEL", help="the policy")
        group = parser.add_mutually_exclusive_group(required=True)
        group.add_argument("--after", metavar="DURATION", help="the other delay: 20m; earlier than since: --after=-2h")
        group.add_argument("--declared", action="store_true", help="the declared delay, if another is in force")
        parser.add_argument("--last", metavar="DURATION", help="rounds that were settled in the last time: 7d (30d)")
        words = "only of objects with this value: channel__merchant=7; may be repeated"
        add_repeated(parser, "--where", "PATH=VALUE", words)
        super().add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        given = options["after"]
        if given is None and not options["declared"]:  # call_command without either
            raise CommandError("Which delay? Give --after or --declared.")
        after = None if given is None else duration("--after", given, may_be_negative=True)
        last = LAST if options["last"] is None else duration("--last", options["last"])
        try:
            found = what_if(options["label"], after, last=last, where=values_of(options["where"]))
        except DelayqError:
            raise
        except ValueError as error:
            raise wrong_value("--where", " ".join(values_of(options["where"])), str(error)) from error
        with translation.override("en"):
            title = f"{found.policy}: {_shown(found.after)} instead of {_shown(found.before)}"
            self.print(found, [title, *sentences(found)], options)


def _shown(delay: Length | None) -> str:
    return "computed" if delay is None else length_text(delay)
