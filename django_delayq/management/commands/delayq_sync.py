"""`manage.py delayq_sync`: make the ledger fit the tables of automatic policies."""

from __future__ import annotations

import logging
import sys
from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_delayq.arming.sync import sync_policy
from django_delayq.exceptions import UnknownPolicy
from django_delayq.ledger.locking import database_of
from django_delayq.ledger.search import Count
from django_delayq.management.operating import AskingCommand, actor
from django_delayq.policies import TimeoutPolicy, get_policies, get_policy

logger = logging.getLogger("django_delayq.steering")


class Command(AskingCommand):
    """One line for each policy. Asks at a terminal only, before a backfill: the rest workers do by themselves."""

    help = "Arms, moves and cancels timeouts of automatic policies as saving each object would. Workers do so too."
    may_be_alone = True

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--policy", metavar="LABEL", help="only this one (default: all automatic policies)")
        parser.add_argument(
            "--backfill",
            action="store_true",
            help="with --policy: arm rounds however long overdue. They fire at once, so look with --dry-run first",
        )
        super().add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        if options["backfill"] and not options["policy"]:
            raise CommandError("--backfill needs --policy: it fires what is long overdue, one policy at a time.")
        for policy in _chosen(options["policy"]):
            using = database_of(policy.concrete_model)
            if options["backfill"] and sys.stdin.isatty() and not (options["yes"] or options["dry_run"]):
                seen = sync_policy(policy, using, backfill=True, dry_run=True)
                self.ask("arm, move or cancel", Count(seen.armed + seen.moved + seen.cancelled), options)
            done = sync_policy(policy, using, backfill=options["backfill"], dry_run=options["dry_run"])
            line = f"{policy.label}: {done.armed} armed, {done.moved} moved, {done.cancelled} cancelled"
            if done.too_old:
                line += f", {done.too_old} too long overdue (--policy {policy.label} --backfill arms them)"
            if not options["dry_run"]:
                logger.info(
                    "%s, by %s", line, actor(), extra={"event": "synced", "policy": policy.label, "by": actor()}
                )
            self.stdout.write(f"{line} (dry run: nothing was changed)" if options["dry_run"] else line)


def _chosen(label: str | None) -> list[TimeoutPolicy[Any]]:
    if label is None:
        return [policy for policy in get_policies() if policy.is_automatic]
    try:
        policy = get_policy(label)
    except UnknownPolicy as error:
        raise CommandError(str(error)) from error
    if not policy.is_automatic:
        raise CommandError(f"{label} is not automatic: it is scheduled by hand, so there is nothing to sync.")
    return [policy]
