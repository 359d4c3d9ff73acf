"""`manage.py delayq_resume`: policies that were paused or held go on."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_delayq.management.stopping import PolicyCommand
from django_delayq.models import PolicyChange
from django_delayq.operations import resume
from django_delayq.policies import TimeoutPolicy


class Command(PolicyCommand):
    """After a hold, the deadlines are moved first."""

    help = "Lets policies go on. After a hold all that is pending is moved first, page by page; may be repeated."
    done = "goes on"
    moves = True

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--no-shift", action="store_true", help="after a hold: deadlines stay where they are")

    def change(self, policy: TimeoutPolicy[Any], options: dict[str, Any], **common: Any) -> PolicyChange | None:
        return resume(policy, shift=not options["no_shift"], progress=self.tell_progress, **common)
