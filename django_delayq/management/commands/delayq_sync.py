"""`manage.py delayq_sync`: synchronize the ledger with the tables of automatic policies."""

import logging
from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_delayq.arming.changes import Failures
from django_delayq.arming.sync import sync_policy
from django_delayq.ledger.controls import policy_state
from django_delayq.ledger.routing import database_of
from django_delayq.ledger.search import Count
from django_delayq.logs import one_line
from django_delayq.management.operating import AskingCommand, actor, has_terminal
from django_delayq.management.options import add_repeated, duration, values_of
from django_delayq.policy.policies import TimeoutPolicy, get_policies, get_policy
from django_delayq.times.lengths import length_text

logger = logging.getLogger("django_delayq.operations")


class Command(AskingCommand):
    """Arms, moves and cancels timeouts of automatic policies as saving each object would. Workers do so too.

    Examples:
      manage.py delayq_sync --dry-run
      manage.py delayq_sync --policy shop.order.cancel_unpaid --backfill --newer-than 90d --dry-run
    """

    def add_arguments(self, parser: CommandParser) -> None:
        add_repeated(parser, "--policy", "LABEL", "only this one; may be repeated (default: all automatic policies)")
        words = "with --policy: arm rounds however long overdue. They fire at once, so try --dry-run first"
        parser.add_argument("--backfill", action="store_true", help=words)
        words = "with --backfill: only rounds that are overdue by less than this: 90d"
        parser.add_argument("--newer-than", metavar="DURATION", help=words)
        super().add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        backfill, dry_run, age = options["backfill"], options["dry_run"], options["newer_than"]
        if age is not None and not backfill:
            raise CommandError("--newer-than limits --backfill: give both.")
        how = {"backfill": backfill, "newer_than": None if age is None else duration("--newer-than", age)}
        policies, failed = _policies(options), []
        for policy in policies:
            using = database_of(policy.concrete_model)
            late = policy_state(policy, using).late if backfill else None
            if late and late.then != "fire":  # before anything is armed: workers fire it at once
                words = "Those over %s late will not fire. If they should, switch that off first: delayq_late %s off"
                self.stderr.write(words % (length_text(late.after), policy.label))
            # Without a terminal, as by cron, it proceeds: workers do the same on their own.
            if backfill and has_terminal() and not (options["yes"] or dry_run):
                with self.progress(options) as add:
                    seen = sync_policy(policy, using, Failures(policy), dry_run=True, progress=add, **how)
                changed = seen.armed + seen.moved + seen.cancelled + seen.held + seen.resumed
                self.ask("arm, move or cancel", Count(changed), options)
            failures = Failures(policy)
            with self.progress(options) as add:
                done = sync_policy(policy, using, failures, dry_run=dry_run, progress=add, **how)
            line = f"{policy.label}: {done.armed} armed, {done.moved} moved, {done.cancelled} cancelled"
            if policy.hold_when is not None:
                line += f", {done.held} held, {done.resumed} resumed"
            if failures.count:
                failed.append(one_line(failures))
                line += f", {failures.count} failed"
            if done.too_old:
                line += f", {done.too_old} too long overdue (--policy {policy.label} --backfill arms them)"
            if not dry_run:
                by = actor()
                logger.info("%s, by %s", line, by, extra={"event": "synced", "policy": policy.label, "by": by})
            self.report(line, options)
        if failed:
            advice = "They stay as they are. Correct these objects, or since= or after= of the policy."
            raise CommandError("\n".join([*failed, advice]))


def _policies(options: dict[str, Any]) -> list[TimeoutPolicy[Any]]:
    """Return the named policies, or all automatic ones. Raises UnknownPolicy, and CommandError for the others."""
    if options["policy"] is None:
        if options["backfill"]:
            raise CommandError("--backfill needs --policy: long overdue timeouts fire at once.")
        return [policy for policy in get_policies() if policy.is_automatic]
    policies = [get_policy(label) for label in dict.fromkeys(values_of(options["policy"]))]
    for policy in policies:
        if not policy.is_automatic:
            words = f"{policy.label} is not automatic: it is scheduled by hand, so there is nothing to sync."
            raise CommandError(words)
    return policies
