"""`manage.py delayq_pause`: nothing of some policies fires."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from django.core.management.base import CommandParser

from django_delayq.management.moments import moment
from django_delayq.management.stopping import PolicyCommand
from django_delayq.models import PolicyChange
from django_delayq.operations import pause
from django_delayq.policies import TimeoutPolicy


def _end(text: str) -> datetime | Literal["keep"] | None:
    words = text.strip().lower()
    if words == "keep":  # the default, which argparse reads as if it had been typed
        return "keep"
    return None if words == "never" else moment(text)


class Command(PolicyCommand):
    """What falls due meanwhile fires when it is over."""

    help = (
        "Stops policies until they are resumed, or until a moment. What falls due meanwhile fires then. "
        "Of a paused policy, end and reason are kept unless given."
    )
    done = "paused"

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--until",
            type=_end,
            metavar="WHEN",
            default="keep",
            help="ends by itself then: 2h, a date; never: until it is resumed (default: as it is paused, or never)",
        )

    def change(self, policy: TimeoutPolicy[Any], options: dict[str, Any], **common: Any) -> PolicyChange | None:
        return pause(policy, until=options["until"], **common)
