"""Settle timeouts that would begin too late, or are in shadow mode; let them wait for opening hours."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from django_delayq.firing import steps
from django_delayq.firing.rails.rail import Rail
from django_delayq.ledger import marking
from django_delayq.models import Timeout
from django_delayq.policy.steps import LATE, SHADOWED
from django_delayq.times.clock import plural
from django_delayq.times.lengths import end_of, length_text

if TYPE_CHECKING:
    from django_delayq.firing.members import Member
    from django_delayq.firing.report import ReportBuilder
    from django_delayq.firing.works import Candidate
    from django_delayq.ledger.controls import Guards
    from django_delayq.policy.policies import TimeoutPolicy


logger = logging.getLogger("django_delayq.firing")
State, Cause = Timeout.State, Timeout.Cause


class LateRail(Rail):
    """Settles what is later than `Late(after=...)` as skipped or dead, unless an operator has asked to fire it.

    A step that is later than that is passed, and the timeout continues.

    The statement that locks, checks and marks knows the limit, and leaves what is too late to `settle`.
    """

    guard = "late"

    def admitted(self, candidates: Sequence[Candidate], guards: Guards) -> Sequence[Candidate]:
        """Return none of them if the limit is a span, which SQL cannot add."""
        return candidates if guards.late and isinstance(guards.late.after, timedelta) else []

    def withholds(self, member: Member, guards: Guards, now: datetime) -> bool:
        """Return whether its first attempt would begin too late after the time it was to begin.

        That is `run_at`, which is the deadline, or later, such as the end of a snooze. With `within=` it is the opening
        after that, also if no worker has stored it.
        """
        row, obj = member.row, member.obj
        assert guards.late is not None
        if row.attempts or (row.is_requested and not row.step):
            return False
        begins_at = row.run_at if guards.quiet is None else guards.quiet.opening(row.run_at, obj)
        latest = end_of(guards.late.after, begins_at, obj)
        return latest is not None and now > latest

    def settle(self, members: Sequence[Member], guards: Guards, now: datetime, using: str) -> list[Member]:
        late = guards.late
        assert late is not None
        found = [each for each in members if self.withholds(each, guards, now)]
        reason = f"It would have begun more than {length_text(late.after)} after its deadline."
        late_steps = [each for each in found if each.row.step]
        for member in late_steps:  # what follows may be in time
            steps.end(member, LATE, now, using, reason=reason.replace("deadline", "time"))
        if withheld := [each.row for each in found if not each.row.step]:
            state = State.DEAD if late.then == "dead" else State.SKIPPED
            marking.mark_settled(withheld, Cause.LATE, now, using, state=state, reason=reason)
        return found

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


class QuietRail(Rail):
    """Moves the next attempt into the opening hours of `within=`, unless an operator has asked to fire it.

    Also of a retry, and of what an outage has delayed: no customer gets an SMS at night. No attempt is counted.
    """

    guard = "quiet"

    def admitted(self, candidates: Sequence[Candidate], guards: Guards) -> Sequence[Candidate]:
        return []

    def withholds(self, member: Member, guards: Guards, now: datetime) -> bool:
        """Return whether `within=` is closed at `now`."""
        assert guards.quiet is not None
        return not member.row.is_requested and guards.quiet.opening(now, member.obj) > now

    def settle(self, members: Sequence[Member], guards: Guards, now: datetime, using: str) -> list[Member]:
        waiting = [each for each in members if self.withholds(each, guards, now)]
        for each in members:
            if guards.quiet and not each.row.is_requested:
                # lateness counts from the opening after the deadline, also if no worker has stored it before
                opens_at = guards.quiet.opening(now if each in waiting else each.row.run_at, each.obj)
                if opens_at > each.row.run_at:
                    marking.defer(each.row, opens_at, using)
        return waiting


class ShadowRail(Rail):
    """Settles the timeouts of objects in shadow mode as skipped: `guards.shadow` percent of all, 0: none.

    A step in shadow mode is noted and not called, and the timeout continues.
    """

    guard = "shadow"

    def admitted(self, candidates: Sequence[Candidate], guards: Guards) -> Sequence[Candidate]:
        return [each for each in candidates if not is_in_shadow(each.object_id, guards.shadow)]

    def settle(self, members: Sequence[Member], guards: Guards, now: datetime, using: str) -> list[Member]:
        shadowed = [each for each in members if is_in_shadow(each.row.object_id, guards.shadow)]
        withheld = list[Timeout]()
        for member in shadowed:
            if member.row.step:
                steps.end(member, SHADOWED, now, using)
            else:
                withheld.append(member.row)
        if withheld:
            marking.mark_settled(withheld, Timeout.Cause.SHADOW, now, using)
        return shadowed


def is_in_shadow(object_id: str, percent: int) -> bool:
    """Return whether an object is among the `percent` of all objects that are in shadow mode.

    By a hash of its key, so that each worker, process and database gives the same answer, and a larger share contains
    a smaller one.
    """
    digest = hashlib.blake2b(object_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) % 100 < percent
