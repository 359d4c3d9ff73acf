"""`manage.py delayq_retry`: give dead timeouts all their attempts again."""

from __future__ import annotations

from django_delayq.management.operating import TimeoutCommand
from django_delayq.operations.registry import OPERATIONS


class Command(TimeoutCommand):
    """Retry dead timeouts, after the cause of their failures is fixed."""

    help = "Makes dead timeouts pending and due now, with all their attempts."
    operation = OPERATIONS["retry"]
    done = "pending again"
