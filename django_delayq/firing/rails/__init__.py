"""Apply guard rails in a firing: settle what is too late or in shadow mode; pause a policy beyond its brake.

A firing knows only this list, and the hooks of `Rail`. The fourth rail, the rate, acts before a firing: a worker
claims timeouts of such a policy together with the slots in which they may begin (`ledger/claiming.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from django_delayq.firing.rails.brake import BrakeRail
from django_delayq.firing.rails.rail import UNLIMITED, Rail
from django_delayq.firing.rails.withheld import LateRail, QuietRail, ShadowRail

if TYPE_CHECKING:
    from django_delayq.firing.members import Member
    from django_delayq.firing.report import ReportBuilder
    from django_delayq.firing.works import Candidate
    from django_delayq.ledger.controls import Guards
    from django_delayq.policy.policies import TimeoutPolicy

RAILS: Final[Sequence[Rail]] = (LateRail(), QuietRail(), ShadowRail(), BrakeRail())
"""In this order: what is too late does not wait for opening hours to be in time, and is not in shadow mode."""


def _in_force(guards: Guards) -> list[Rail]:
    return [rail for rail in RAILS if getattr(guards, rail.guard)]


def room(policy: TimeoutPolicy[Any], guards: Guards) -> int:
    """Return how many timeouts of `policy` may share a transaction."""
    return min([UNLIMITED, *(rail.room(policy, guards) for rail in _in_force(guards))])


def admitted(candidates: Sequence[Candidate], guards: Guards) -> Sequence[Candidate]:
    """Return those of `candidates` that one statement may lock, check and mark."""
    for rail in _in_force(guards):
        candidates = rail.admitted(candidates, guards)
    return candidates


def withhold(member: Member, guards: Guards, now: datetime) -> bool:
    """Return whether `settle` would not let `member` fire, for which no answer of `confirm` matters."""
    return any(rail.withholds(member, guards, now) for rail in _in_force(guards))


def settle(members: Sequence[Member], guards: Guards, now: datetime, using: str) -> list[Member]:
    """Settle the rows of those due, locked `members` whose handler must not be called now, or move them; return them.

    Those that it has moved are pending, and run later.
    """
    stopped: list[Member] = []
    for rail in _in_force(guards):
        stopped += rail.settle([each for each in members if each not in stopped], guards, now, using)
    return stopped


def committed(policy: TimeoutPolicy[Any], report: ReportBuilder, guards: Guards, using: str) -> None:
    """Do what follows from `report`, whose transaction has committed: log, count, pause the policy. Raises nothing."""
    for rail in _in_force(guards):
        rail.committed(policy, report, guards, using)
