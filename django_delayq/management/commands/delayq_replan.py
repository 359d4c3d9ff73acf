"""`manage.py delayq_replan`: change the delay of a policy, and choose what happens to pending timeouts."""

from datetime import timedelta
from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_delayq.clock import duration_text, plural
from django_delayq.ledger.controls import policy_state
from django_delayq.ledger.routing import database_of
from django_delayq.ledger.search import Count
from django_delayq.management.operating import PolicyCommand
from django_delayq.management.options import duration
from django_delayq.operations import preview_delay
from django_delayq.operations.policies import MODES


class Command(PolicyCommand):
    """Changes the delay of a policy. Without --after and --declared, applies the present one to pending deadlines."""

    arguments = "LABEL"
    examples = (
        "shop.order.cancel_unpaid --after 45m --mode keep --dry-run",
        "shop.order.cancel_unpaid --mode recompute",
    )
    name = "delay"

    def add_arguments(self, parser: CommandParser) -> None:
        delay = parser.add_mutually_exclusive_group()
        delay.add_argument("--after", metavar="DURATION", help="the new delay: 45m, 1h30m, 2d; before: --after=-1h")
        delay.add_argument("--declared", action="store_true", help="the declared delay applies again")
        words = "pending deadlines: keep them, recompute them with the delay, or shift them by the difference"
        parser.add_argument("--mode", choices=MODES, required=True, help=words)
        super().add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        policies, mode = self.policies(options), options["mode"]
        if len(policies) != 1:
            raise CommandError("Which policy? Give one label, such as shop.order.cancel_unpaid.")
        policy = policies[0]
        after = None
        if options["after"] is not None:
            after = duration("--after", options["after"], may_be_negative=True)
        elif not options["declared"]:
            if mode != "recompute":
                raise CommandError("--mode keep and shift need another delay: --after, or --declared.")
            after = policy_state(policy, database_of(policy.concrete_model)).after
        seen = preview_delay(policy, after, mode)
        pending = Count(seen.pending, seen.is_capped)
        overdue = "an unknown number" if seen.overdue is None else seen.overdue
        change = f"{policy.label}: from {_shown(seen.before)} to {_shown(seen.after)}"
        self.stdout.write(f"{change}; {pending} pending, of which {overdue} would be due at once")
        if options["dry_run"]:
            self.report(f"would {mode} {plural(pending, 'pending deadline')}", options)
            return
        if mode != "keep":
            self.ask(mode, pending, options)
        done = self.run_operation(policy, options, after=after, mode=mode)
        self.stdout.write(f"changed; {done.moved} moved, {done.unmoved} left unchanged")


def _shown(delay: timedelta | None) -> str:
    return "computed" if delay is None else duration_text(delay)
