"""`manage.py delayq_fire`: have timeouts fired now, by a worker."""

from __future__ import annotations

from typing import Any

from django_delayq.management.operating import VerbCommand
from django_delayq.models import TimeoutQuerySet
from django_delayq.operations import Result, fire_now


class Command(VerbCommand):
    """Makes them due; a worker fires them as always."""

    help = "Makes timeouts due now. A worker fires them, if their condition still holds."
    verb, done = "fire", "due now"

    def steer(self, rows: TimeoutQuerySet, options: dict[str, Any], **common: Any) -> Result:
        return fire_now(rows, **common)
