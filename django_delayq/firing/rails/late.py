"""Settle timeouts that would begin too late, and log how many these were."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from django_delayq.clock import plural
from django_delayq.firing import steps
from django_delayq.firing.rails.rail import Rail
from django_delayq.ledger import settling
from django_delayq.lengths import end_of, length_text
from django_delayq.models import Timeout
from django_delayq.steps import LATE

if TYPE_CHECKING:
    from django_delayq.firing.members import Member
    from django_delayq.firing.report import ReportBuilder
    from django_delayq.firing.works import Candidate
    from django_delayq.ledger.controls import Guards
    from django_delayq.policies import TimeoutPolicy

logger = logging.getLogger("django_delayq.firing")
State, Cause = Timeout.State, Timeout.Cause


class LateRail(Rail):
    """Settles what is later than `Late(after=...)` as skipped or dead, unless an operator has asked to fire it.

    A step that is later than that is passed, and the timeout continues.

    The statement that locks, checks and marks knows the limit, and leaves what is too late to `settle`.
    """

    def admitted(self, candidates: Sequence[Candidate], guards: Guards) -> Sequence[Candidate]:
        """Return none of them if the limit is a span, which SQL cannot add."""
        return candidates if guards.late is None or isinstance(guards.late.after, timedelta) else []

    def withholds(self, member: Member, guards: Guards, now: datetime) -> bool:
        """Return whether its first attempt would begin too late after the time it was to begin.

        That is `run_at`, which is the deadline, or later, such as the end of a snooze. With `within=` it is the opening
        after that, also if no worker has stored it.
        """
        row, obj = member.row, member.obj
        if guards.late is None or row.attempts or (row.is_requested and not row.step):
            return False
        begins_at = row.run_at if guards.quiet is None else guards.quiet.opening(row.run_at, obj)
        latest = end_of(guards.late.after, begins_at, obj)
        return latest is not None and now > latest

    def settle(self, members: Sequence[Member], guards: Guards, now: datetime, using: str) -> list[Timeout]:
        late = guards.late
        if late is None:
            return []
        found = [each for each in members if self.withholds(each, guards, now)]
        reason = f"It would have begun more than {length_text(late.after)} after its deadline."
        late_steps = [each for each in found if each.row.step]
        for member in late_steps:  # what follows may be in time
            steps.end(member, LATE, now, using, reason=reason.replace("deadline", "time"))
        if withheld := [each.row for each in found if not each.row.step]:
            state = State.DEAD if late.then == "dead" else State.SKIPPED
            settling.mark_settled(withheld, Cause.LATE, now, using, state=state, reason=reason)
        return [each.row for each in found]

    def committed(self, policy: TimeoutPolicy[Any], report: ReportBuilder, guards: Guards, using: str) -> None:
        late = [row for _, row in report.signals if row.cause == Cause.LATE]
        if late:
            label = policy.label
            words = plural(len(late), f"timeout of {label} was", f"timeouts of {label} were")
            logger.log(
                logging.ERROR if late[0].state == State.DEAD else logging.WARNING,
                "%s too late and %s, such as %s: %s",
                *(words, late[0].state, late[0].pk, late[0].reason),
                extra={"event": "timeouts_late", "policy": label, "count": len(late)},
            )
