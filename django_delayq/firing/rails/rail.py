"""What a guard rail may do in a firing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Final

if TYPE_CHECKING:
    from django_delayq.firing.members import Member
    from django_delayq.firing.report import ReportBuilder
    from django_delayq.firing.works import Candidate
    from django_delayq.ledger.controls import Guards
    from django_delayq.policy.policies import TimeoutPolicy

UNLIMITED: Final = sys.maxsize
"""The room that a rail leaves which is not in force."""


class Rail:
    """A guard rail, by what it does in a firing. Each method does nothing unless the rail overrides it.

    `guards` has what is in force for the policy, by its declaration, the settings and operators. No method is called
    unless the rail is: its attribute `guard` of that has a value.
    """

    guard: ClassVar[str]

    def room(self, policy: TimeoutPolicy[Any], guards: Guards) -> int:
        """Return how many timeouts of `policy` may share a transaction."""
        return UNLIMITED

    def admitted(self, candidates: Sequence[Candidate], guards: Guards) -> Sequence[Candidate]:
        """Return those of `candidates` that one statement may lock, check and mark. `settle` decides about the rest."""
        return candidates

    def withholds(self, member: Member, guards: Guards, now: datetime) -> bool:
        """Return whether `settle` does not let `member` fire at `now`, so that `confirm` need not be asked."""
        return False

    def settle(self, members: Sequence[Member], guards: Guards, now: datetime, using: str) -> list[Member]:
        """Settle or move the rows of those due, locked `members` whose handler must not be called now; return them."""
        return []

    def committed(self, policy: TimeoutPolicy[Any], report: ReportBuilder, guards: Guards, using: str) -> None:
        """Do what follows from `report`, whose transaction has committed. Raises nothing."""
