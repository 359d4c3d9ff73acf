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

    def withholds(self, member: Member, guards: Guards, now: datetime) -> bool:
        """Return whether `within=` is closed at `now`."""
        return bool(guards.quiet and not member.row.is_requested and guards.quiet.opening(now, member.obj) > now)

    def settle(self, members: Sequence[Member], guards: Guards, now: datetime, using: str) -> list[Timeout]:
        waiting = [each for each in members if self.withholds(each, guards, now)]
        for each in members:
            if guards.quiet is not None and not each.row.is_requested:
                # lateness counts from the opening after the deadline, also if no worker has stored it before
                opens_at = guards.quiet.opening(now if each in waiting else each.row.run_at, each.obj)
                if opens_at > each.row.run_at:
                    settling.defer(each.row, opens_at, using)
        return [each.row for each in waiting]
