"""What the commands that change something share: who does it, asking first, and saying what came of it."""

from __future__ import annotations

import os
import pwd
import sys
from abc import abstractmethod
from typing import Any, ClassVar, Final

from django.core.management.base import CommandError, CommandParser

from django_delayq.exceptions import DelayqError
from django_delayq.ledger.search import Count, count
from django_delayq.management.arguments import TypedCommand
from django_delayq.management.selecting import add_selection, selected
from django_delayq.models import TimeoutQuerySet
from django_delayq.operations import Refusal, Result

MANY: Final = 10
"""Up to so many are changed without asking."""


def actor() -> str:
    """`cli:` and the user whom the operating system runs this process for; not what an environment variable claims."""
    try:
        return f"cli:{pwd.getpwuid(os.getuid()).pw_name}"
    except KeyError:
        return f"cli:{os.getuid()}"


class AskingCommand(TypedCommand):
    """Changes something, and so asks before it changes much."""

    may_be_alone: ClassVar[bool] = False
    """Whether it goes on where there is nobody to ask: what workers do by themselves, scripts may do too."""

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--dry-run", action="store_true", help="change nothing, only count")
        parser.add_argument("--yes", action="store_true", help="do not ask, however much it is")

    def ask(self, what: str, number: Count, options: dict[str, Any]) -> None:
        """Returns if `what` may be done to so many. Raises CommandError if not, or if there is nobody to ask."""
        if options["yes"] or options["dry_run"] or (number.value <= MANY and not number.is_capped):
            return
        if not sys.stdin.isatty():
            if self.may_be_alone:
                return
            raise CommandError(
                f"That would {what} {number} timeouts. Nobody is there to ask: give --yes, or --dry-run."
            )
        self.stdout.write(f"{what} {number} timeouts? [y/N] ", ending="")
        self.stdout.flush()
        if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
            raise CommandError("Nothing was changed.")

    def say(self, line: str, options: dict[str, Any]) -> None:
        """`line`, and that nothing was changed if so."""
        self.stdout.write(f"{line} (dry run: nothing was changed)" if options["dry_run"] else line)


class OperatorCommand(AskingCommand):
    """Is steered by a person, and so keeps who did it and why."""

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--reason", default="", help="kept with what is changed, for people")
        super().add_arguments(parser)


class VerbCommand(OperatorCommand):
    """One verb on the timeouts that the options choose."""

    verb: ClassVar[str]
    done: ClassVar[str]
    states: ClassVar[tuple[str, ...]] = ("pending",)
    default_states: ClassVar[tuple[str, ...]] = ("pending",)

    def add_arguments(self, parser: CommandParser) -> None:
        add_selection(parser, states=self.states, default=self.default_states)
        super().add_arguments(parser)

    @abstractmethod
    def steer(self, rows: TimeoutQuerySet, options: dict[str, Any], **common: Any) -> Result:
        """The verb is done to `rows`."""

    def handle(self, *args: Any, **options: Any) -> None:
        rows = selected(options)
        self.ask(self.verb, count(rows), options)
        looked = 0

        def tell(page: Result) -> None:
            nonlocal looked
            looked += page.changed + page.unchanged
            if options["verbosity"] > 0 and sys.stderr.isatty():
                self.stderr.write(f"  {looked} looked at", ending="\r")

        common = {"by": actor(), "reason": options["reason"], "dry_run": options["dry_run"], "progress": tell}
        try:
            result = self.steer(rows, options, **common)
        except (DelayqError, ValueError) as error:
            raise CommandError(str(error)) from error
        self.report(result, options)

    def report(self, result: Result, options: dict[str, Any]) -> None:
        """How many changed, and why the others did not."""
        for why, number in result.refused.items():
            ids = ", ".join(str(row_id) for row_id, its_why in result.refusals[:50] if its_why is why)
            self.stderr.write(f"{number} left as they are: {Refusal(why).label} ({ids})" if ids else f"{number}: {why}")
        self.say(f"{result.changed} {self.done}", options)
