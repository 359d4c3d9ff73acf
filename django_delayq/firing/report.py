"""Collect the outcomes of a firing.

`ReportBuilder.publish` logs them, and sends their signals.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Final

from django.dispatch import Signal

from django_delayq import signals
from django_delayq.firing.handler import raised_by
from django_delayq.firing.leftovers import SessionCheck
from django_delayq.firing.log_lines import STOPPED, log_settled, log_step, log_waiting
from django_delayq.firing.members import Member
from django_delayq.firing.state import LOCKED_MAX_SECONDS, MISFIT_MAX_SECONDS, TRANSIENT_MAX_SECONDS, firing_state
from django_delayq.firing.works import Call, Report
from django_delayq.ledger import marking
from django_delayq.ledger.controls import CACHE_SECONDS
from django_delayq.ledger.db_connections import DISK_FULL, error_code, is_missing, transient_reason
from django_delayq.ledger.error_texts import message_of, shown
from django_delayq.ledger.outbox import announce
from django_delayq.models import Timeout
from django_delayq.policy.steps import Ended

logger = logging.getLogger("django_delayq.firing")

SLOT_OVER: Final = "its slot, by the rate of its policy, has passed"

_SIGNALS: Final[dict[str, Signal]] = {
    Timeout.State.PENDING: signals.timeout_failed,
    Timeout.State.HELD: signals.timeout_held,
    Timeout.State.FIRED: signals.timeout_fired,
    Timeout.State.SKIPPED: signals.timeout_skipped,
    Timeout.State.CANCELLED: signals.timeout_cancelled,
    Timeout.State.DEAD: signals.timeout_dead,
}
"""What is sent for a row that an attempt has left in this state."""


def longest_wait(error: BaseException) -> float:
    """Return for how long at most a timeout waits that `error` has prevented from firing here.

    If the code of this process does not fit the tables, that of another worker may: it must get the timeout soon.
    """
    if error_code(error) in DISK_FULL and firing_state.is_time_to_log(("disk_full",)):
        logger.error("The database has no room left: %s", message_of(error), extra={"event": "database_full"})
    return MISFIT_MAX_SECONDS if is_missing(error) else TRANSIENT_MAX_SECONDS


@dataclass(slots=True)
class ReportBuilder:
    """Collect the outcomes of timeouts; `report` returns them."""

    done: list[int] = field(default_factory=list)
    again: dict[int, datetime] = field(default_factory=dict)
    fired: list[int] = field(default_factory=list)
    uncounted: set[int] = field(default_factory=set)
    """Those of `again` that could not be fired for a reason outside the handler: no attempt is counted."""
    signals: list[tuple[Signal, Timeout]] = field(default_factory=list)
    """To be sent after commit."""
    errors: dict[int, BaseException] = field(default_factory=dict)
    now: datetime | None = None
    before: list[int] = field(default_factory=list)
    """Those of `done` that were settled before."""
    missed: bool = False
    """The slot of the work was over before it could begin."""
    steps: list[tuple[Timeout, Ended, Call | None, BaseException | None]] = field(default_factory=list)
    """For the log: rows of which a step has ended, how, its call, and what it raised."""
    calls: list[Call] = field(default_factory=list)
    """For the log: the calls of handlers that returned or raised."""

    @property
    def is_quiet(self) -> bool:
        """Return whether all is settled, and no receiver waits for its signals."""
        return not self.again and not self.errors and not any(signal.receivers for signal, _ in self.signals)

    def current_time(self) -> datetime:
        """Return the time of the database clock, or an estimate if the database has not answered."""
        return self.now or firing_state.database_now()

    def add_row(self, row: Timeout) -> None:
        """Report `row` as done if it is settled or its clock is stopped, else have it checked again when it is due."""
        if row.is_settled or row.state == Timeout.State.HELD:  # when its clock runs, it gets a new entry
            self.done.append(row.pk)
        else:
            self.again[row.pk] = row.run_at

    def add_outcomes(self, rows: Iterable[Timeout]) -> None:
        """Report `rows`, which attempts have just written, and the signals for that."""
        for row in rows:
            if row.state == Timeout.State.FIRED:
                self.done.append(row.pk)
                self.fired.append(row.pk)
            else:
                self.add_row(row)
            self.signals.append((_SIGNALS[row.state], row))

    def lock_or_release(self, timeout_id: int, using: str) -> tuple[Timeout | None, datetime]:
        """Lock the row, and return it with its history, and the database's time.

        None: another transaction has locked the row, and the timeout is released.
        """
        rows, self.now, _ = marking.lock_rows([timeout_id], using, history=True)
        if timeout_id not in rows:
            self.release([timeout_id], using, "another transaction has locked its row")
        return rows.get(timeout_id), self.now

    def note_call(self, call: Call) -> None:
        """Note for the log that the handler has returned."""
        call.at = self.current_time()
        self.calls.append(call)

    def note_steps(self, members: Iterable[Member], call: Call | None = None) -> None:
        """Note for the log those of `members` of which a step has just ended."""
        self.steps += [(each.row, each.ended, call, None) for each in members if each.ended]

    def release(self, ids: Collection[int], using: str, why: str, max_seconds: float = LOCKED_MAX_SECONDS) -> None:
        """Have `ids` checked again after a short backoff, which grows up to `max_seconds`."""
        log_waiting(ids, why)
        for timeout_id in ids:
            wait = firing_state.backoff.next_wait(using, timeout_id, why, max_seconds)
            self.again[timeout_id] = self.current_time() + wait
            self.uncounted.add(timeout_id)

    def release_rest(self, ids: Collection[int], again: datetime, why: str = "its turn is later") -> None:
        """Have `ids`, which were not tried, checked at the datetime `again`. `why` is logged."""
        log_waiting(ids, why)
        for timeout_id in ids:
            self.again[timeout_id] = again
            self.uncounted.add(timeout_id)

    def release_stopped(self, ids: Collection[int]) -> None:
        """Have `ids`, whose policy was stopped meanwhile, checked again when each process knows of the stop.

        At once they would be read in a loop: by `fire_due`, and by a worker that does not know of it yet.
        """
        self.release_rest(ids, self.current_time() + timedelta(seconds=CACHE_SECONDS), STOPPED)

    def release_unknown(self, policy: str, ids: Iterable[int], error: BaseException, using: str) -> None:
        """Log that `error` prevented the outcome of `ids` from being known or written, and release them."""
        rest = [timeout_id for timeout_id in ids if timeout_id not in self.again and timeout_id not in self.done]
        transient = transient_reason(error, using)
        logger.warning(
            "Timeouts %s of %s are released, because their outcome could not be determined or written: %s",
            *(rest, policy, transient or message_of(error)),
            exc_info=None if transient else shown(error),
            extra={"event": "timeouts_released", "policy": policy},
        )
        self.release(rest, using, transient or f"{type(error).__name__}: {message_of(error)}", longest_wait(error))

    def add(self, other: ReportBuilder) -> None:
        self.done += other.done
        self.again.update(other.again)
        self.fired += other.fired
        self.uncounted |= other.uncounted
        self.signals += other.signals
        self.calls += other.calls
        self.steps += other.steps
        self.before += other.before
        self.errors.update(other.errors)
        self.now = other.now or self.now
        self.missed = self.missed or other.missed

    def publish(self, using: str) -> None:
        """Log what has fired, and send the collected signals. What fails here is logged and undoes nothing."""
        log_settled((row for _, row in self.signals), self.calls)
        for ended in self.steps:
            log_step(*ended)
        if any(signal.receivers for signal, _ in self.signals):
            check, policy = SessionCheck(), self.signals[0][1].policy
            check.run(partial(self._send, using))
            check.end().log(f"A signal receiver of {policy}", policy)

    def _send(self, using: str) -> None:
        for signal, row in self.signals:
            error = raised_by(partial(announce, signal, row, using))
            if error is not None:
                words = "The signal for timeout %s (%s) was not sent"
                logger.error(words, row.pk, row.state, exc_info=shown(error, row))

    def report(self, early: Mapping[int, datetime] | None = None) -> Report:
        """Return the report. `early`: of a plan, see `Report`."""
        untried = tuple(self.uncounted & self.again.keys())
        return Report(
            tuple(self.done),
            dict(self.again),
            tuple(self.fired),
            self.now,
            early or {},
            untried=untried,
            before=tuple(self.before),
            stepped=tuple(row.pk for row, *_ in self.steps),
            missed=self.missed,
            signals=self.signals,
            errors=self.errors,
        )
