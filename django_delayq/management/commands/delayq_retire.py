"""`manage.py delayq_retire`: cancel the pending timeouts of a policy that is not declared any more."""

from functools import partial
from typing import Any

from django.core.management.base import CommandParser

from django_delayq.ledger.routing import database_of
from django_delayq.ledger.search import count
from django_delayq.management.operating import OperatorCommand
from django_delayq.models import Timeout
from django_delayq.operations import retire


class Command(OperatorCommand):
    """Cancels the pending timeouts of a policy that is not declared any more. Dead ones stay.

    Examples:
      manage.py delayq_retire shop.order.cancel_unpaid --dry-run
    """

    arguments = "LABEL"

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("label", metavar="LABEL", help="the label of the policy, such as shop.order.cancel_unpaid")
        super().add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        label = options["label"]
        self.ask("cancel", count(Timeout.objects.using(database_of(Timeout)).waiting().of_labels([label])), options)
        result = self.call(partial(retire, label), options, dry_run=options["dry_run"])
        self.report(f"{label}: {result.changed} cancelled", options)
