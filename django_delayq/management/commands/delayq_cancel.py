"""`manage.py delayq_cancel`: see to it that timeouts do not happen."""

from __future__ import annotations

from typing import Any

from django_delayq.management.operating import VerbCommand
from django_delayq.models import TimeoutQuerySet
from django_delayq.operations import Result, cancel


class Command(VerbCommand):
    """Cancels by hand, so that nothing arms the round again."""

    help = "Cancels timeouts. Their rounds are closed: saving their objects does not arm them again."
    verb, done = "cancel", "cancelled"
    states = ("pending", "firing", "dead")

    def steer(self, rows: TimeoutQuerySet, options: dict[str, Any], **common: Any) -> Result:
        return cancel(rows, **common)
