"""`manage.py delayq_clock`: let time pass in a staging installation."""

from typing import Any

from django.core.management.base import CommandParser

from django_delayq.conf import get_settings
from django_delayq.ledger import advances
from django_delayq.ledger.routing import database_of
from django_delayq.ledger.search import count
from django_delayq.management.operating import AskingCommand, actor
from django_delayq.management.options import duration, moment
from django_delayq.management.output import local
from django_delayq.models import Timeout
from django_delayq.operations import Passed, advance_clock, reset_clock, set_clock
from django_delayq.sql.now import database_now
from django_delayq.times.clock import duration_text, plural


class Command(AskingCommand):
    """Lets time pass for all timeouts of a staging installation, or shows by how much it has been advanced.

    What would happen within the duration happens now, in order: trials end, reminders go out. It needs running workers.
    Refused in the installation that DELAYQ['PRODUCTION'] names, and where it is not certain that this is another one.

    Examples:
      manage.py delayq_clock
      manage.py delayq_clock --advance 3d
      manage.py delayq_clock --set 2026-12-24T08:00
      manage.py delayq_clock --reset
    """

    def add_arguments(self, parser: CommandParser) -> None:
        how: Any = parser.add_mutually_exclusive_group()
        how.add_argument("--advance", metavar="DURATION", help="let so much time pass: 45m, 3d, 1d12h")
        how.add_argument("--set", metavar="WHEN", help="let time pass until then: a date and time")
        how.add_argument("--reset", action="store_true", help="forget this; deadlines that have moved stay")
        parser.add_argument("--reason", default="", help="stored, for people")
        parser.add_argument("--yes", action="store_true", help="do not ask, however many timeouts come closer")

    def handle(self, *args: Any, **options: Any) -> None:
        using, who = database_of(Timeout), {"actor": actor(), "reason": options["reason"]}
        if options["advance"] is not None or options["set"] is not None:
            name = get_settings().installation or "this database"
            self.ask(f"advance the clock of {name} for", count(Timeout.objects.using(using).waiting()), options)
        if options["advance"] is not None:
            self._report(advance_clock(duration("--advance", options["advance"]), using=using, **who))
        elif options["set"] is not None:
            self._report(set_clock(moment("--set", options["set"]), using=using, **who))  # type: ignore[arg-type]
        elif options["reset"]:
            self.stdout.write(f"The clock was {duration_text(reset_clock(using=using, **who))} ahead")
        if ahead := advances.total(using):
            then = local(database_now(using) + ahead)
            self.stdout.write(f"The clock of this installation is {duration_text(ahead)} ahead: it is {then}")
        else:
            self.stdout.write("The clock of this installation is not advanced")

    def _report(self, passed: Passed) -> None:
        self.stdout.write(f"{plural(passed.due, 'timeout')} became due, in {plural(passed.steps, 'step')}")
        if not passed.is_complete:
            words = "Nothing was fired for 15 seconds, so the rest was one step. Is a worker running?"
            self.stderr.write(f"{words} See manage.py delayq_status.")
