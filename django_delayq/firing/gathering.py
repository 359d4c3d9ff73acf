"""Gather the due timeouts of one value, for policies with `batch_by`, such as those of all invoices of a customer.

A worker has leased only some of them, and other workers have the rest. So a work only names the value: the firing reads
the others in the ledger. It locks the value first, without waiting, so that a second worker leaves them alone until the
first one has committed, and then finds them settled.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from django.db import Error

from django_delayq.firing import rails
from django_delayq.firing.handler import checkpoint, firing_transaction
from django_delayq.firing.judge import ROW_LOCKED, LostRace
from django_delayq.firing.log_lines import log_suspect
from django_delayq.firing.planning import plan
from django_delayq.firing.settling import SETTLE_PAUSES_SECONDS
from django_delayq.firing.works import Candidate, RunningWork, Work
from django_delayq.ledger import settling
from django_delayq.ledger.controls import stop_cache
from django_delayq.ledger.shares import due_of_share, lock_share, provide_lock


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
    _noted: Sequence[int] = ()
    """Of these it is noted that the process may die of them."""

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
        due = due.filter(pk__in=self._noted) if self._noted else due.filter(suspected_at__isnull=True, deaths=0)
        due = due.filter(pk__in=part.ids) if part.only else due
        due = due.exclude(pk__in=list(running.report.again)) if running.report.again else due
        size = min(policy.transaction_size, rails.room(policy, stop_cache.guards(policy, using)))
        by_object: dict[str, int] = {}  # no object twice: the first timeout of it would change it for the second one
        for object_id, timeout_id in due.values_list("object_id", "id")[:size]:
            by_object.setdefault(object_id, timeout_id)
        return [Candidate(timeout_id, object_id) for object_id, timeout_id in by_object.items()]

    def note(self) -> bool:
        """Commit that this process may die of them, before they run together, alone in it. Return False: none can run.

        If it does, each of them is fired alone from then on, as other suspects are.
        """
        try:
            with firing_transaction(self.running.using):
                found = self.gather()
                rows, now, _ = settling.lock_rows([each.id for each in found], self.running.using)
                if len(rows) < len(found):
                    raise LostRace(ROW_LOCKED)
                settling.note_suspicion(list(rows.values()), now, self.running.using)
        except LostRace as error:
            self.running.report.release(self.part.ids, self.running.using, str(error))
            return False
        for row in rows.values():
            log_suspect(row)
        checkpoint("noted")
        self._noted = list(rows)
        return bool(rows)

    def forget(self) -> None:
        """Undo the note about those that did not run, or were rolled back for a reason outside of them."""
        known = {*self.running.report.done, *(self.running.report.again.keys() - self.running.report.uncounted)}
        untried = [each for each in self._noted if each not in known]
        with suppress(Error):  # then it counts as a death, of which one is not enough
            # A worker that claims or releases a row has locked it only briefly, and each of them would fire alone.
            for pause in SETTLE_PAUSES_SECONDS:
                untried = settling.forget_suspicion(untried, self.running.using) if untried else []
                if not untried or pause >= 1:
                    break
                time.sleep(pause)
