"""`manage.py delayq_postpone`: give timeouts later deadlines."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_delayq.management.moments import length, moment
from django_delayq.management.operating import VerbCommand
from django_delayq.models import TimeoutQuerySet
from django_delayq.operations import Result, postpone


class Command(VerbCommand):
    """By a length of time, or to a moment."""

    help = "Gives timeouts a later deadline; never an earlier one."
    verb, done = "postpone", "postponed"

    def add_arguments(self, parser: CommandParser) -> None:
        how = parser.add_mutually_exclusive_group(required=True)
        how.add_argument("--by", type=length, metavar="LENGTH", help="later by this: 45m, 1h30m, 2d")
        how.add_argument("--to", type=moment, metavar="WHEN", help="due then: 2h, 2026-03-01T18:00")
        super().add_arguments(parser)

    def steer(self, rows: TimeoutQuerySet, options: dict[str, Any], **common: Any) -> Result:
        if options["by"] is not None:
            return postpone(rows, after=options["by"], **common)
        return postpone(rows, at=options["to"], **common)
