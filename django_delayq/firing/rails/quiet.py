"""Let a timeout that is due outside of the opening hours of its policy wait for the next opening."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from django_delayq.firing.rails.rail import Rail
from django_delayq.ledger import settling
from django_delayq.models import Timeout

if TYPE_CHECKING:
    from django_delayq.firing.members import Member
    from django_delayq.firing.works import Candidate
    from django_delayq.ledger.controls import Guards


class QuietRail(Rail):
    """Moves the next attempt into the opening hours of `within=`, unless an operator has asked to fire it.

    Also of a retry, and of what an outage has delayed: no customer gets an SMS at night. No attempt is counted.
    """

    def admitted(self, candidates: Sequence[Candidate], guards: Guards) -> Sequence[Candidate]:
        return [] if guards.quiet else candidates

    def settle(self, members: Sequence[Member], guards: Guards, now: datetime, using: str) -> list[Timeout]:
        policy, waiting = guards.quiet, list[Timeout]()
        if policy is None:
            return waiting
        for row, obj in [(each.row, each.obj) for each in members if not each.row.is_requested]:
            opens_at = policy.opening(now, obj)
            if opens_at > now:
                waiting.append(row)
            else:  # lateness counts from the opening after the deadline, also if no worker has stored it before
                opens_at = policy.opening(row.run_at, obj)
            if opens_at > row.run_at:
                settling.defer(row, opens_at, using)
        return waiting
