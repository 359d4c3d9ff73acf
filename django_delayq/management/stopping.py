"""What the commands that stop policies and let them go on share."""

from __future__ import annotations

import sys
from abc import abstractmethod
from typing import Any, ClassVar

from django.core.management.base import CommandError, CommandParser

from django_delayq.exceptions import DelayqError
from django_delayq.ledger.controls import PolicyState, policy_state
from django_delayq.ledger.locking import database_of
from django_delayq.ledger.search import count
from django_delayq.management.operating import OperatorCommand, actor
from django_delayq.management.selecting import policy_named
from django_delayq.management.showing import local
from django_delayq.models import PolicyChange, Timeout
from django_delayq.policies import TimeoutPolicy


def stop_words(state: PolicyState) -> str:
    """`paused until 2026-03-01 18:00:00: outage`, or `running`."""
    if not state.is_stopped:
        return "running"
    until = f" until {local(state.until)}" if state.until else ""
    return f"{state.stop}{until}{f': {state.reason}' if state.reason else ''}"


class PolicyCommand(OperatorCommand):
    """One change to each policy that is named."""

    done: ClassVar[str]
    moves: ClassVar[bool] = False
    """Whether it may move pending rows, which is worth asking for."""

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("label", nargs="*", metavar="LABEL", help="these policies")
        parser.add_argument("--policy", action="append", metavar="LABEL", help="the same as a LABEL; may be repeated")
        super().add_arguments(parser)

    @abstractmethod
    def change(self, policy: TimeoutPolicy[Any], options: dict[str, Any], **common: Any) -> PolicyChange | None:
        """The change is made; None: there was nothing to change."""

    def handle(self, *args: Any, **options: Any) -> None:
        labels = [*options["label"], *(options["policy"] or ())]
        if not labels:
            raise CommandError("Which policies? Give their labels, such as shop.order.cancel_unpaid.")
        # All are looked up before the first is changed: a wrong name changes nothing.
        for policy in [policy_named(label) for label in dict.fromkeys(labels)]:
            using = database_of(policy.concrete_model)
            before = policy_state(policy, using)
            waiting = count(Timeout.objects.using(using).pending().of_labels(policy.labels))
            if self.moves and before.stop in {"held", "releasing"} and not options.get("no_shift"):
                self.ask(f"move the deadlines of {policy.label}, which are", waiting, options)
            words = f"{policy.label} (was {stop_words(before)}; {waiting} pending)"
            if options["dry_run"]:
                self.say(f"{words}: would be: {self.done}", options)
                continue
            try:
                change = self.change(policy, options, by=actor(), reason=options["reason"])
            except (DelayqError, ValueError) as error:
                raise CommandError(str(error)) from error
            moved = f"; {change.moved} moved, {change.unmoved} left as they are" if change and change.moved else ""
            now = stop_words(policy_state(policy, using)) if change else "nothing to change"
            self.stdout.write(f"{words}: {now}{moved}")

    def tell_progress(self, looked: int) -> None:
        """So many more rows were looked at."""
        if sys.stderr.isatty():
            self.stderr.write(f"  {looked} more looked at", ending="\r")
