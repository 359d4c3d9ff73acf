"""Gather the due timeouts of one value, for policies with `batch_by`, such as those of all invoices of a customer.

A worker has leased only some of them, and other workers have the rest. So a work only names the value: the firing reads
the others in the ledger. It locks the value first, without waiting, so that a second worker leaves them alone until the
first one has committed, and then finds them settled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from django.db import Error

from django_delayq.conf import get_settings
from django_delayq.firing import rails, steps
from django_delayq.firing.handler import checkpoint, firing_transaction
from django_delayq.firing.judge import ROW_LOCKED, LostRace
from django_delayq.firing.log_lines import log_suspect
from django_delayq.firing.planning import plan
from django_delayq.firing.settling import SETTLE_PAUSES_SECONDS, change_of, tell, write
from django_delayq.firing.works import Call, Candidate, RunningWork, Work
from django_delayq.ledger import marking
from django_delayq.ledger.controls import stop_cache
from django_delayq.ledger.outbox import record_settled
from django_delayq.ledger.shares import due_of_share, lock_share, provide_lock
from django_delayq.models import Timeout
from django_delayq.policy.policies import TimeoutPolicy
from django_delayq.rounds.after_attempt import WorkerDied
from django_delayq.rounds.memory import DIED


def next_part(running: RunningWork, ids: Sequence[int]) -> Work | None:
    """Read the rows `ids` of a work again, and return those of the first value that are due; report all that are not.

    Mostly another worker has fired them meanwhile, together with those that it had leased.
    """
    work, using, report = running.work, running.using, running.report
    works, found = plan(dict.fromkeys(ids, 1), using)
    report.done += found.done
    report.before += found.done
    report.again |= found.again
    report.uncounted |= set(found.untried)
    report.now = found.now or report.now
    parts = list[Work]()
    for each in works:
        if each.policy == work.policy and not each.suspect and (each.share or not work.suspect):
            parts.append(replace(each, suspect=work.suspect, only=work.only))
        else:
            report.release(each.ids, using, "its process has died, or the work is stale or forged")
    return parts[0] if parts else None


@dataclass(slots=True)
class Gathering:
    """The due timeouts of the value of `part`. None of those of `running` that were tried already."""

    running: RunningWork
    part: Work
    noted: Sequence[int] = ()
    """Of these it is noted that the process may die of them. See `count_first`."""

    def provide_lock(self) -> None:
        """Prepare what `gather` locks. Call it outside the transaction of `gather`."""
        if not self.part.only:
            provide_lock(self.running.policy, self.part.share, self.running.using)

    def gather(self, *, lock: bool = True) -> list[Candidate]:
        """Lock the value, and return its due timeouts. For the transaction that fires them.

        Without `lock` only return them, such as to ask about each before. Raises LostRace: another transaction has
        locked the value.
        """
        running, part, policy, using = self.running, self.part, self.running.policy, self.running.using
        if lock and not part.only and not lock_share(policy, part.share, using):
            raise LostRace("another worker fires timeouts of the same value")
        due = due_of_share(policy, part.share, using)
        due = due.filter(pk__in=self.noted) if self.noted else due.filter(suspected_at__isnull=True, deaths=0)
        due = due.filter(pk__in=part.ids) if part.only else due
        due = due.exclude(pk__in=list(running.report.again)) if running.report.again else due
        size = min(policy.transaction_size, rails.room(policy, stop_cache.guards(policy, using)))
        by_object: dict[str, int] = {}  # no object twice: the first timeout of it would change it for the second one
        for object_id, timeout_id in due.values_list("object_id", "id")[:size]:
            by_object.setdefault(object_id, timeout_id)
        return [Candidate(timeout_id, object_id) for object_id, timeout_id in by_object.items()]


def count_first(
    running: RunningWork, ids: Sequence[int], gather: Callable[[], Sequence[Candidate]]
) -> Sequence[int] | None:
    """Commit that this process may die of the timeouts that `gather` returns, before they run, alone in it.

    Two deliveries make a suspect: of a hundred timeouts that a dying process held, one may have killed it. If the
    process dies again, it is known of which, and each of them is fired alone from then on. Deaths are counted apart
    from attempts: at `MAX_DEATHS` a timeout is `dead`.

    Return of which it is noted; of the others the attempt reports why not. None: none can run, and `ids` are reported.
    """
    policy, using, report, died = running.policy, running.using, running.report, WorkerDied(DIED)
    try:
        with firing_transaction(using):
            found = gather()
            locked, now, _ = marking.lock_rows([each.id for each in found], using, history=len(found) == 1)
            report.now = now
            if len(locked) < len(found):
                raise LostRace(ROW_LOCKED if running.policy.batch_by else "another transaction has locked its row")
            rows = [locked[each.id] for each in found if _may_begin(policy, locked[each.id], each, now)]
            # One that began less than a lease ago, with unknown outcome, may be about to run. Redis gives an entry to
            # one worker at a time, but a forged entry can reach several, each as a suspect.
            if any(row.suspected_at is not None and row.suspected_at + get_settings().lease > now for row in rows):
                raise LostRace("another worker has just claimed it")
            died_again = [(row, change_of(policy, row, died, now, Call((row.pk,)))) for row in rows if row.suspected_at]
            if first := [row for row in rows if row.suspected_at is None]:
                marking.write_pending(first, using, suspected_at=now)
            changed = [(row, change) for row, change in died_again if write(row, change, now)]
            record_settled([row for row, _ in changed], using)
    except LostRace as error:
        report.release(ids, using, str(error))
        return None
    dead = [(row, change) for row, change in changed if change.error is not None]
    for row, change in dead:
        tell(report, row, died, change, Call((row.pk,)))
    if dead:
        return None
    noted = [*first, *(row for row, _ in changed)]
    for row in noted:
        log_suspect(row)  # before it runs: this process may be the next to die
    checkpoint("noted")
    return [row.pk for row in noted]


def _may_begin(policy: TimeoutPolicy[Any], row: Timeout, candidate: Candidate, now: datetime) -> bool:
    is_due = row.state == Timeout.State.PENDING and row.run_at <= now
    is_meant = row.policy in policy.labels and row.object_id == candidate.object_id
    return is_due and is_meant and steps.runs_inside(policy, row)


def forget(running: RunningWork, ids: Sequence[int]) -> None:
    """Undo the note about those of `ids` that did not run, or were rolled back for a reason outside of them."""
    known = {*running.report.done, *(running.report.again.keys() - running.report.uncounted)}
    untried = [each for each in ids if each not in known]
    with suppress(Error):  # then it counts as a death, of which one is not enough
        # A worker that claims or releases a row has locked it only briefly, and each of them would fire alone.
        for pause in SETTLE_PAUSES_SECONDS:
            untried = marking.forget_suspicion(untried, running.using) if untried else []
            if not untried or pause >= 1:
                break
            time.sleep(pause)
