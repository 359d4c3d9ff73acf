"""`manage.py delayq_prune`: delete rows that were settled long ago."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand
from django.db import router

from django_delayq.conf import get_settings
from django_delayq.models import Timeout
from django_delayq.recovery.prune import prune


class Command(BaseCommand):
    """Says how many were deleted."""

    help = "Deletes the timeouts whose settling and deadline are both older than DELAYQ['RETENTION']. Workers do too."

    def handle(self, *args: Any, **options: Any) -> None:
        deleted = prune(router.db_for_write(Timeout))
        self.stdout.write(f"{deleted} timeouts settled more than {get_settings().retention.days} days ago were deleted")
