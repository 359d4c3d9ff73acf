"""`manage.py delayq_prune`: delete timeouts that were settled long ago."""

import logging
from typing import Any

from django.db import router

from django_delayq.clock import counted
from django_delayq.conf import get_settings
from django_delayq.management.operating import AskingCommand, actor, has_terminal
from django_delayq.models import Timeout
from django_delayq.worker.sweep import count_old, prune

logger = logging.getLogger("django_delayq.steering")


class Command(AskingCommand):
    """Deletes the timeouts whose settling and deadline are both older than DELAYQ['RETENTION']. Workers do too."""

    examples = ("--dry-run", "--yes")

    def handle(self, *args: Any, **options: Any) -> None:
        using = router.db_for_write(Timeout)
        settled = f"settled more than {counted(get_settings().retention.days, 'day')} ago"
        old = count_old(using)
        if options["dry_run"]:
            self.report(f"{counted(old, 'timeout')} {settled}", options)
            return
        if has_terminal():  # without a terminal it proceeds: workers do the same
            self.ask("delete", old, options)
        deleted = prune(using)
        words = counted(deleted, f"timeout {settled} was deleted", f"timeouts {settled} were deleted")
        logger.info("%s, by %s", words, actor(), extra={"event": "pruned", "by": actor()})
        self.stdout.write(words)
