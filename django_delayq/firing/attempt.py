"""One transaction that fires: begin, lock, check, compare-and-set, handler, commit. The heart of this package."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from django_delayq import signals
from django_delayq.firing.calling import call, firing_transaction
from django_delayq.firing.checkpoints import reach
from django_delayq.firing.reach import Reach
from django_delayq.firing.report import Candidate, Findings
from django_delayq.firing.taking import Member, Taken, take
from django_delayq.firing.watching import Watch
from django_delayq.ledger import settling
from django_delayq.ledger.db_errors import link_of
from django_delayq.models import Timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from django_delayq.policies import TimeoutPolicy

Cause = Timeout.Cause


class LostRace(Exception):
    """The compare-and-set found fewer rows than were locked: one of them is not due after all."""


class Overlap(Exception):
    """A handler wrote what another member of its group had read before."""


@dataclass(slots=True)
class Attempt:
    """One transaction over one or several timeouts of one policy. What it found counts only if it committed.

    Attributes:
        charged: the attempt has been counted already, by an earlier transaction.
        ready: the members whose handler is or was to run.
        turn: the member whose handler ran last.
        link: the driver's connection that the handlers had.
        watch: what the handlers did to the connection; None: none has run.
        seconds: how long the handlers took.
    """

    policy: TimeoutPolicy[Any]
    candidates: Sequence[Candidate]
    using: str
    charged: bool = False
    findings: Findings = field(default_factory=Findings)
    ready: list[Member] = field(default_factory=list)
    turn: Member | None = None
    watch: Watch | None = None
    link: object = None
    expired: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def run(self, handle: Callable[[Attempt], None]) -> None:
        """Fire; `handle` calls the handlers. Whatever is raised: nothing is written, or the database is lost.

        With a connection lost in COMMIT nobody knows which of the two; the next look at the row tells.
        """
        with firing_transaction(self.using):
            reach("begun")
            taken = take(self.policy, self.candidates, self.using, self.findings)
            self._settle_the_rest(taken)
            self._mark(taken)
            reach("marked")
            if self.ready:
                self._handle(handle)
        reach("committed")

    def handle_one(self, member: Member, *arguments: Any) -> None:
        """Call the handler in the turn of `member` and make sure that its work can be committed."""
        assert self.watch is not None
        self.turn, self.link = member, self.link or link_of(self.using)
        self.watch.turn_of(member)
        began = time.monotonic()
        try:
            call(self.policy, *arguments)
        finally:
            self.seconds += time.monotonic() - began
        self.watch.check_unbroken(member.row.pk)

    def _settle_the_rest(self, taken: Taken) -> None:
        for rows, cause in ((taken.gone, Cause.GONE), (taken.unmet, Cause.CONDITION)):
            if rows:
                settling.mark_skipped(rows, cause, taken.now, self.using)
                self.findings.done += [row.pk for row in rows]
                self.findings.news += [(signals.timeout_skipped, row) for row in rows]
        self.expired = taken.expired

    def _mark(self, taken: Taken) -> None:
        rows = [member.row for member in taken.ready]
        self.ready = taken.ready
        if rows and not settling.mark_fired(rows, taken.now, self.using, counted=self.charged):
            raise LostRace
        self.findings.done += [row.pk for row in rows]
        self.findings.fired += [row.pk for row in rows]
        self.findings.news += [(signals.timeout_fired, row) for row in rows]

    def _handle(self, handle: Callable[[Attempt], None]) -> None:
        is_group = len(self.ready) > 1 and self.policy.batch is None
        self.watch = Watch(self.using, Reach(self.policy, self.ready, self.using) if is_group else None)
        with self.watch.looking():
            handle(self)
        reach("handled")


def handle_each(attempt: Attempt) -> None:
    """Call the handler for each member, in due order.

    Raises:
        Overlap: one of them reached beyond its own object while another one had yet to come.
    """
    assert attempt.watch is not None
    for member in attempt.ready:
        if attempt.watch.overlaps:
            raise Overlap
        attempt.handle_one(member, member.obj, member.row)
