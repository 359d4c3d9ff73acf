"""`manage.py delayq_replan`: change the delay of a policy, and choose what happens to pending timeouts."""

from typing import Any

from django.core.management.base import CommandError
from django.utils import translation

from django_delayq.ledger.controls import policy_state
from django_delayq.ledger.routing import database_of
from django_delayq.management.operating import PolicyCommand
from django_delayq.monitoring.reports import MAX_READ
from django_delayq.monitoring.whatif import sentences, what_if
from django_delayq.operations.registry import OPERATIONS
from django_delayq.times.clock import plural


class Command(PolicyCommand, name="delay", arguments="LABEL"):
    """Changes the delay of a policy. Without --after and --declared, applies the present one to pending deadlines.

    Examples:
      manage.py delayq_replan shop.order.cancel_unpaid --after 45m --mode keep --dry-run
      manage.py delayq_replan shop.order.cancel_unpaid --mode recompute
    """

    def handle(self, *args: Any, **options: Any) -> None:
        policies, mode = self.policies(options), options["mode"]
        if len(policies) != 1:
            raise CommandError("Which policy? Give one label, such as shop.order.cancel_unpaid.")
        policy = policies[0]
        if options["after"] is None and not options["declared"]:
            if mode != "recompute":
                raise CommandError("--mode keep and shift need another delay: --after, or --declared.")
            options["after"] = policy_state(policy, database_of(policy.concrete_model)).after
            options["declared"] = options["after"] is None
        given = self.parameters(options)
        preview = OPERATIONS[self.name].preview(policy, **given)
        past = what_if(policy, given["after"], limit=MAX_READ)
        with translation.override("en"):
            said = [*preview.sentences(), *(sentences(past) if past.rounds else ())]
        self.stdout.write("\n".join([f"{policy.label}:", *said]))
        if options["dry_run"]:
            self.report(f"would {mode} {plural(preview.changed, 'pending deadline')}", options)
            return
        if mode != "keep":
            self.ask(mode, preview.changed, options)
        done = self.run_operation(policy, options)
        self.stdout.write(f"changed; {done.moved} moved, {done.unmoved} left unchanged")
