"""`manage.py delayq_prune`: delete timeouts that were settled long ago."""

import logging
from collections.abc import Collection
from datetime import timedelta
from typing import Any

from django.core.management.base import CommandParser
from django.db import router

from django_delayq.conf import get_settings
from django_delayq.management.operating import AskingCommand, actor, has_terminal
from django_delayq.management.options import add_repeated, duration, labels_of_policies, wrong_value
from django_delayq.models import Timeout
from django_delayq.policy.policies import get_policies
from django_delayq.times.clock import duration_text, plural
from django_delayq.worker.sweep import count_old, least_age, prune, retention_of

logger = logging.getLogger("django_delayq.operations")


class Command(AskingCommand):
    """Deletes timeouts that were settled, and due, longer ago than their policy retains them. Workers do too.

    Examples:
      manage.py delayq_prune --dry-run
      manage.py delayq_prune --yes
      manage.py delayq_prune --policy shop.cart.remind --older-than 20d
    """

    def add_arguments(self, parser: CommandParser) -> None:
        add_repeated(parser, "--policy", "LABEL", "only of this policy, declared or not; may be repeated")
        words = "in place of RETENTION, and with --policy of the retention of these policies: 60d; at least half of it"
        parser.add_argument("--older-than", metavar="DURATION", help=words)
        super().add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        using = router.db_for_write(Timeout)
        labels, age = labels_of_policies(options["policy"], using), None
        if options["older_than"] is not None:
            age = duration("--older-than", options["older_than"])
            if age < (least := least_age(labels)):
                kept = "the longest retention of these policies" if labels else "RETENTION"
                rule = f"is less than half of {kept} ({duration_text(least)}): rounds could fire again"
                raise wrong_value("--older-than", options["older_than"], rule)
        of_policies = f" of {', '.join(labels)}" if labels else ""
        settled = f"{of_policies} settled {_how_long_ago(labels, age)}".strip()
        old = count_old(using, labels, age)
        if options["dry_run"]:
            self.report(f"{plural(old, 'timeout')} {settled}", options)
            return
        if has_terminal():  # without a terminal it proceeds: workers do the same
            self.ask("delete", old, options)
        with self.progress(options) as add:
            deleted = prune(using, labels=labels, age=age, progress=add)
        words = plural(deleted, f"timeout {settled} was deleted", f"timeouts {settled} were deleted")
        logger.info("%s, by %s", words, actor(), extra={"event": "pruned", "by": actor()})
        self.stdout.write(words)


def _how_long_ago(labels: Collection[str], age: timedelta | None) -> str:
    """Return `more than 30 days ago`, or that policies have retentions of their own."""
    own = [policy.retention for policy in get_policies() if policy.retention is not None]
    length, *others = {age or retention_of(label) for label in labels} or {age or get_settings().retention, *own}
    if others:
        return "longer ago than their policies retain them"
    return f"more than {plural(length.days, 'day') if not length % timedelta(days=1) else duration_text(length)} ago"
