"""`manage.py delayq_retry`: give dead timeouts all their attempts again."""

from __future__ import annotations

from typing import Any

from django_delayq.management.operating import VerbCommand
from django_delayq.models import TimeoutQuerySet
from django_delayq.operations import Result, retry


class Command(VerbCommand):
    """After what killed them has been mended."""

    help = "Makes dead timeouts pending and due now, with all their attempts before them."
    verb, done = "retry", "pending again"
    states = ("dead",)
    default_states = ("dead",)

    def steer(self, rows: TimeoutQuerySet, options: dict[str, Any], **common: Any) -> Result:
        return retry(rows, **common)
