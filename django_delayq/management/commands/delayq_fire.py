"""`manage.py delayq_fire`: make a worker fire timeouts now."""

from __future__ import annotations

from django_delayq.management.operating import TimeoutCommand
from django_delayq.operations.registry import OPERATIONS


class Command(TimeoutCommand):
    """Make them due; a worker fires them."""

    help = "Makes timeouts due now. A worker fires them if their condition still holds."
    operation = OPERATIONS["fire"]
    done = "due now"
