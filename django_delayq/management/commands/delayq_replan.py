"""`manage.py delayq_replan`: another delay for a policy, and what it means for what is pending."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_delayq.exceptions import DelayqError
from django_delayq.ledger.controls import policy_state
from django_delayq.ledger.locking import database_of
from django_delayq.ledger.search import Count
from django_delayq.management.moments import length
from django_delayq.management.operating import OperatorCommand, actor
from django_delayq.management.selecting import policy_named
from django_delayq.operations import change_delay, preview_delay
from django_delayq.operations.delay import MODES


class Command(OperatorCommand):
    """Changes the delay in force, or plans anew with the one that is."""

    help = (
        "Puts another delay in force for a policy, or, without --after, plans pending deadlines anew with the present."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("label", nargs="?", metavar="LABEL", help="the policy")
        parser.add_argument("--policy", metavar="LABEL", help="the same as LABEL")
        delay = parser.add_mutually_exclusive_group()
        delay.add_argument("--after", type=length, metavar="LENGTH", help="the new delay: 45m, 1h30m, 2d")
        delay.add_argument("--declared", action="store_true", help="the delay of the declaration holds again")
        parser.add_argument(
            "--mode", choices=MODES, required=True,
            help="pending deadlines: keep them, recompute them from what they count from, shift them by the difference",
        )  # fmt: skip
        super().add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        labels = {options["label"], options["policy"]} - {None}
        if len(labels) != 1:
            raise CommandError("Which policy? Give one label, such as shop.order.cancel_unpaid.")
        policy, mode = policy_named(labels.pop()), options["mode"]
        after = options["after"]
        if after is None and not options["declared"]:
            if mode != "recompute":
                raise CommandError("--mode keep and shift need another delay: --after, or --declared.")
            after = policy_state(policy, database_of(policy.concrete_model)).after
        try:
            seen = preview_delay(policy, after, mode)
            line = f"{policy.label}: from {seen.before or 'computed'} to {seen.after or 'computed'}; {seen.pending}"
            at_once = "an unknown number" if seen.overdue is None else seen.overdue
            self.stdout.write(f"{line}{'+' * seen.is_capped} pending, of which {at_once} would be due at once")
            if options["dry_run"]:
                return self.say("not changed", options)
            if mode != "keep":
                self.ask(mode, Count(seen.pending, seen.is_capped), options)
            change = change_delay(policy, after, mode=mode, by=actor(), reason=options["reason"])
        except (DelayqError, ValueError) as error:
            raise CommandError(str(error)) from error
        self.say(f"changed; {change.moved} moved, {change.unmoved} left as they are", options)
        return None
