"""`manage.py delayq_adopt`: make a copied database this installation's own."""

from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_delayq.conf import get_settings
from django_delayq.ledger import installation
from django_delayq.ledger.routing import database_of
from django_delayq.ledger.search import count
from django_delayq.management.operating import OperatorCommand
from django_delayq.models import Timeout
from django_delayq.monitoring.snapshot import ALIVE, workers_alive
from django_delayq.operations import adopt
from django_delayq.times.clock import plural


class Command(OperatorCommand):
    """Makes a copied database this installation's own, so that its workers start. DELAYQ['INSTALLATION'] names it.

    Examples:
      manage.py delayq_adopt --cancel-pending --dry-run
      manage.py delayq_adopt --cancel-pending --reason 'restored into staging'
    """

    def add_arguments(self, parser: CommandParser) -> None:
        pending = parser.add_mutually_exclusive_group()
        pending.add_argument("--cancel-pending", action="store_true", help="cancel all pending timeouts")
        words = "fire them here too, with new idempotency keys"
        pending.add_argument("--keep-pending", action="store_true", help=words)
        super().add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        using = database_of(Timeout)
        pending: Any = "cancel" if options["cancel_pending"] else "keep" if options["keep_pending"] else None
        is_own = installation.ledger_name(using) == get_settings().installation
        alive = len(workers_alive(using))
        if alive and not (is_own or options["yes"] or options["dry_run"]):
            used = f"{plural(alive, 'worker has', 'workers have')} used this database"
            advice = "If it is not a copy, stop every worker first. If it is one, wait, or give --yes."
            raise CommandError(f"{used} within the last {ALIVE.seconds} seconds. {advice}")
        if pending is not None and not is_own:
            self.ask(pending, count(Timeout.objects.using(using).unsettled()), options)
        done = self.call(adopt, options, using=using, pending=pending, dry_run=options["dry_run"])
        if done.before == done.name:
            self.stdout.write(f"This database belongs to {done.name} already: no timeout was changed")
            return
        counts = f"{plural(done.cancelled, 'timeout')} cancelled, {plural(done.renewed, 'idempotency key')} renewed"
        self.report(f"{done.name} adopted the database of {done.before or 'no installation'}: {counts}", options)
