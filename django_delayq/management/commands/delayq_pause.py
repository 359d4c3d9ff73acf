"""`manage.py delayq_pause`: nothing of some policies fires."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_delayq.management.moments import moment
from django_delayq.management.stopping import PolicyCommand
from django_delayq.models import PolicyChange
from django_delayq.policies import TimeoutPolicy
from django_delayq.steering import pause


class Command(PolicyCommand):
    """What falls due meanwhile fires when it is over."""

    help = "Stops policies until they are resumed, or until a moment. What falls due meanwhile fires then."
    done = "paused"

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--until", type=moment, metavar="WHEN", help="goes on by itself then: 2h, a date")

    def change(self, policy: TimeoutPolicy[Any], options: dict[str, Any], **common: Any) -> PolicyChange | None:
        return pause(policy, until=options["until"], **common)
