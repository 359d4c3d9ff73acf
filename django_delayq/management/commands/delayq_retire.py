"""`manage.py delayq_retire`: cancel the pending timeouts of a policy that is not declared any more."""

from typing import Any

from django.core.management.base import CommandParser

from django_delayq.ledger.routing import database_of
from django_delayq.ledger.search import count
from django_delayq.management.operating import OperatorCommand, actor
from django_delayq.models import Timeout
from django_delayq.operations import retire


class Command(OperatorCommand):
    """Cancels the pending timeouts of a policy that is not declared any more. Dead ones stay."""

    arguments = "LABEL"
    examples = ("shop.order.cancel_unpaid --dry-run",)

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("label", metavar="LABEL", help="the label of the policy, such as shop.order.cancel_unpaid")
        super().add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        label = options["label"]
        self.ask("cancel", count(Timeout.objects.using(database_of(Timeout)).waiting().of_labels([label])), options)
        how = {"by": actor(), "reason": options["reason"], "dry_run": options["dry_run"]}
        with self.progress(options) as add:
            result = retire(label, progress=add, **how)
        self.report(f"{label}: {result.changed} cancelled", options)
