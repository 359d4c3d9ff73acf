"""`manage.py delayq_cancel`: cancel timeouts."""

from __future__ import annotations

from django_delayq.management.operating import TimeoutCommand
from django_delayq.operations.registry import OPERATIONS


class Command(TimeoutCommand):
    """Cancel by hand, so that no save arms the round again."""

    help = "Cancels timeouts. Their rounds are closed: saving their objects does not arm them again."
    operation = OPERATIONS["cancel"]
    done = "cancelled"
