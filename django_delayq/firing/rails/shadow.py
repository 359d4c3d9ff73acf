"""Settle the timeouts of objects in shadow mode: everything happens to them except the call of the handler."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from django_delayq.firing import steps
from django_delayq.firing.rails.rail import Rail
from django_delayq.ledger import settling
from django_delayq.models import Timeout
from django_delayq.steps import SHADOWED

if TYPE_CHECKING:
    from django_delayq.firing.members import Member
    from django_delayq.firing.works import Candidate
    from django_delayq.ledger.controls import Guards


class ShadowRail(Rail):
    """Settles the timeouts of objects in shadow mode as skipped: `guards.shadow` percent of all, 0: none.

    A step in shadow mode is noted and not called, and the timeout continues.
    """

    def admitted(self, candidates: Sequence[Candidate], guards: Guards) -> Sequence[Candidate]:
        if not guards.shadow:
            return candidates
        return [each for each in candidates if not is_in_shadow(each.object_id, guards.shadow)]

    def settle(self, members: Sequence[Member], guards: Guards, now: datetime, using: str) -> list[Timeout]:
        shadowed = [each for each in members if guards.shadow and is_in_shadow(each.row.object_id, guards.shadow)]
        withheld = list[Timeout]()
        for member in shadowed:
            if member.row.step:
                steps.end(member, SHADOWED, now, using)
            else:
                withheld.append(member.row)
        if withheld:
            settling.mark_settled(withheld, Timeout.Cause.SHADOW, now, using)
        return [each.row for each in shadowed]


def is_in_shadow(object_id: str, percent: int) -> bool:
    """Return whether an object is among the `percent` of all objects that are in shadow mode.

    By a hash of its key, so that each worker, process and database gives the same answer, and a larger share contains
    a smaller one.
    """
    digest = hashlib.blake2b(object_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) % 100 < percent
