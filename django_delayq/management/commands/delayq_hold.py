"""`manage.py delayq_hold`: stop the clock of some policies."""

from __future__ import annotations

from typing import Any

from django_delayq.management.stopping import PolicyCommand
from django_delayq.models import PolicyChange
from django_delayq.operations import hold
from django_delayq.policies import TimeoutPolicy


class Command(PolicyCommand):
    """For an outage that is nobody's fault."""

    help = "Stops policies until they are resumed. Then all their pending deadlines lie later by as long. Ends a pause."
    done = "held"

    def change(self, policy: TimeoutPolicy[Any], options: dict[str, Any], **common: Any) -> PolicyChange | None:
        return hold(policy, **common)
