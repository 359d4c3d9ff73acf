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
    from django_delayq.firing.work import Candidate
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
        for member in members:
            opens_at = now if member.row.is_requested else policy.opening(now, member.obj)
            if opens_at > now:
                settling.defer(member.row, opens_at, using)
                waiting.append(member.row)
        return waiting
