"""Fire timeouts in one transaction: lock, check, mark, call the handler, commit.

Everything else is built on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from django.db import connections

from django_delayq.arming.sync import sync_timeouts
from django_delayq.firing import rails, steps
from django_delayq.firing.asking import ask
from django_delayq.firing.handler import call_handler, checkpoint, firing_transaction, raised_by
from django_delayq.firing.judge import Case, LostRace, judge_of
from django_delayq.firing.leftovers import StatementMonitor, is_changed
from django_delayq.firing.members import Member, counted_from_resume
from django_delayq.firing.report import SLOT_OVER, ReportBuilder, longest_wait
from django_delayq.firing.settling import keep, log, log_undone, reason_to_repeat, settle
from django_delayq.firing.state import firing_state
from django_delayq.firing.works import Call, Candidate, RunningWork
from django_delayq.ledger import marking
from django_delayq.ledger.controls import Guards, stop_cache
from django_delayq.ledger.locking import begin_now
from django_delayq.ledger.marking import can_mark_at_once
from django_delayq.ledger.outbox import record_settled
from django_delayq.models import Timeout
from django_delayq.policy.outcomes import Fired, Outcome, returned_outcome
from django_delayq.rounds.after_attempt import Change
from django_delayq.sql.statements import PlanLost

State = Timeout.State


class SlotOver(Exception):
    """The slot of a policy with a rate was over before the handler could be called."""


class ChangedSession(Exception):
    """A handler changed the session of the connection, which the next handler of the transaction would inherit."""


class Gather(Protocol):
    """Return the candidates that take the place of the given ones, and lock their value, so that no others do.

    Without `lock` it can be called outside the transaction.
    """

    def __call__(self, *, lock: bool = True) -> Sequence[Candidate]: ...


@dataclass(slots=True)
class Attempt:
    """One transaction over one timeout; over several if the policy has `batch` or `together`.

    With `atomic=False` it marks its row `firing` only.

    Attributes:
        share: the value of all objects, with `batch_by`; None: it does not matter.
        gather: see `Gather`; None: the candidates are as given.
        report: the outcomes; they count only if the transaction committed.
        ready: the members whose handler runs, in due order; of a batch in the order of keys.
        kept: the outcomes that handlers have returned, each with its row, what it made of that, and its call.
        call: the last call of the handler.
        driver_connection: the connection of the database driver when the first handler began.
        monitor: what the handlers did to the connection; None: none has run.
        guards: the guard rails in force.
        is_committed: the transaction has committed.
    """

    running: RunningWork
    candidates: Sequence[Candidate]
    share: str | None = None
    gather: Gather | None = None
    report: ReportBuilder = field(default_factory=ReportBuilder)
    ready: list[Member] = field(default_factory=list)
    kept: list[tuple[Timeout, Outcome | Fired, Change, Call]] = field(default_factory=list)
    call: Call | None = None
    driver_connection: object = None
    monitor: StatementMonitor | None = None
    guards: Guards = field(default_factory=Guards)
    is_committed: bool = False

    def fire(self) -> bool:
        """Ask, run the transaction, and add the outcomes to the report of the work. Return False if there are none.

        A transient error releases all candidates and counts no attempt. Any other error, which also rolled everything
        back, is recorded as a failed attempt of one timeout. Of several none is reported: fire each of them alone.
        If the connection was lost during COMMIT, the outcome is unknown: the next attempt finds it in the row.
        """
        if self.running.policy.confirmation is not None:
            self.running.gathered = ()
            asked = self.candidates if self.gather is None else self.gather(lock=False)
            self.candidates = ask(self.running, asked)
            if not self.candidates:
                return True
        error = raised_by(self._run)
        if isinstance(error, PlanLost):  # by the first statement of the transaction: nothing has happened yet
            error = raised_by(self._run)
        try:
            if error is not None:
                self.report = ReportBuilder(now=firing_state.database_now())
                if not self._release_if_transient(error):
                    if len(self.candidates) > 1:
                        return False
                    self._record(error)
        finally:
            del error  # its traceback refers to this frame: the cycle would keep what handlers have read, and cursors
        self.running.report.add(self.report)
        return True

    def _run(self) -> None:
        running, policy, using = self.running, self.running.policy, self.running.using
        running.contexts.clear()
        self.guards = stop_cache.guards(policy, using)
        if not can_mark_at_once(policy, using):
            running.wait()
        with firing_transaction(using):
            checkpoint("begun")
            if self.gather is not None:
                self.candidates = running.gathered = self.gather()
            case = Case(policy, self.candidates, using, self.guards, running.work.suspect, self.share)
            if running.is_early:
                begin_now(using)
                running.wait()  # nothing is locked yet
            self.ready = judge_of(policy, using)(case, self.report)
            if self.report.now:
                firing_state.note_database(self.report.now)
            if resumed := counted_from_resume(self.ready, self.guards, self.report.current_time()):
                marking.count_from_resume(resumed, using)
            checkpoint("marked")
            if self.ready and not running.begin():
                raise SlotOver
            if self.ready and self.ready[0].row.state != State.FIRING:
                self._call()
                self.report.note_steps(self.ready, self.call)
                self.report.add_outcomes([each.row for each in self.ready if each.row.is_settled])
                self.report.again |= {each.row.pk: each.row.run_at for each in self.ready if not each.row.is_settled}
            record_settled([row for _, row in self.report.signals], using)
            running.committed = self.report  # counts once the transaction has run into its on_commit callbacks
        self.is_committed, running.committed = True, None
        checkpoint("committed")
        for row, outcome, change, call in self.kept:
            log(row, outcome, change, self.report.current_time(), call)
        rails.committed(policy, self.report, self.guards, using)

    def _call(self) -> None:
        """Call the handler for each ready member in due order, or once for a batch."""
        connection = connections[self.running.using]
        self.driver_connection, self.monitor = connection.connection, StatementMonitor(connection)
        with connection.execute_wrapper(self.monitor), self.monitor.noticing_end():
            if self.running.policy.batch:
                self._call_batch()
            for place, member in enumerate(() if self.running.policy.batch else self.ready):
                if place and is_changed(connection):
                    raise ChangedSession
                self._call_one([member], member.obj, member.timeout)
        checkpoint("handled")

    def _call_batch(self) -> None:
        """Call the handler once with `(queryset, timeouts)`, both in the order of keys. Then sync the objects.

        `QuerySet.update` sends no signals, so nothing else arms or cancels what follows from it. The sync is inside
        the transaction, so that it commits together with its cause.
        """
        objects = self.running.policy.model._base_manager.using(self.running.using)
        # Not `order_by`, which an UPDATE of the handler would contain: MariaDB would then wait for every row it scans.
        queryset = objects.filter(pk__in=[member.obj.pk for member in self.ready]).extra(order_by=["pk"])
        self._call_one(self.ready, queryset, [member.row for member in self.ready])
        sync_timeouts(queryset.all())

    def _call_one(self, members: Sequence[Member], target: Any, timeouts: Timeout | list[Timeout]) -> None:
        """Call the handler and check that its work can be committed."""
        assert self.monitor is not None
        row, given = members[0].row, members[0].given
        before = members[0].timeout
        seen = {"state": State.PENDING, "attempts": before.attempts - 1, "step": before.step}
        seen |= {"run_at": before.run_at, "idempotency_key": row.idempotency_key}
        self.call = Call(tuple([member.row.pk for member in members]), seen)
        self.call.obj, self.call.could_begin_at = members[0].obj, before.could_fire_at()
        function = steps.function_of(self.running.policy, given) if given else None
        result = call_handler(self.running, target, timeouts, self.call, function)
        self.report.note_call(self.call)
        self.monitor.check_unbroken(lambda: marking.is_marked(row.pk, self.running.using, given))
        if (outcome := returned_outcome(result)) is not None:
            for member in members:
                if change := keep(self.running.policy, member, outcome, self.report.current_time(), self.call):
                    self.kept.append((member.row, outcome, change, self.call))

    def _release_if_transient(self, error: BaseException) -> bool:
        """Release all candidates and return True if `error` is transient, or the slot is over."""
        report, ids = self.report, [candidate.id for candidate in self.candidates]
        if isinstance(error, SlotOver):
            report.release_rest(ids, report.current_time(), SLOT_OVER)
            report.missed = True
            return True
        if isinstance(error, LostRace):
            report.release(ids, self.running.using, str(error))
            return True
        if isinstance(error, Outcome | ChangedSession):
            return False
        errors = self.monitor.errors if self.monitor else ()
        reason = reason_to_repeat(error, self.running.using, self.call, self.driver_connection, errors)
        if reason is not None:
            report.release(ids, self.running.using, reason, longest_wait(error))
        return reason is not None

    def _record(self, error: BaseException) -> None:
        """Record the failed attempt of the only candidate. An error here must not keep others from being reported."""
        [candidate], policy, using = self.candidates, self.running.policy, self.running.using
        call = self.call or Call((candidate.id,))
        try:
            found = settle(policy, error, using, call)
        except Exception as failure:  # noqa: BLE001 - see above
            self.report.release_unknown(policy.label, [candidate.id], failure, using)
        else:
            self.report.add(found)
        if isinstance(error, Outcome) and self.monitor is not None and self.monitor.has_written:
            log_undone(policy, error)
