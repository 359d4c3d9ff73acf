"""Play records on a virtual clock, as fast as the machine can."""

from __future__ import annotations

import gc
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from django_delayq import clock
from django_delayq.testing import fire_due
from shop.delays import delays_set_to
from shop.replay.agenda import Agenda
from shop.replay.results import Ledger
from shop.replay.steps import Life, Step, locked, steps_of, take

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from datetime import timedelta

    from shop.replay.records import OrderRecord

END_OF_TIME = datetime.max.replace(tzinfo=UTC)


class VirtualPlay:
    """Play all steps of all records in the order of time, and fire each timeout at its deadline.

    Timeouts due at the time of a step fire before it, also if an earlier step of the same time has scheduled them. The
    clock stops at the last step, also if that one was refused. Later timeouts stay pending, unless `until_settled` lets
    the clock continue.
    """

    def __init__(self, records: Iterable[OrderRecord], delays: Mapping[str, timedelta]) -> None:
        self.lives = [Life(record, promised_at=record.promised_at) for record in records]
        self.delays = delays
        self.ledger = Ledger.from_now_on()
        self._agenda = Agenda()
        self._events = sorted(
            (moment, row, step) for row, life in enumerate(self.lives) for moment, step in steps_of(life.record)
        )

    def __len__(self) -> int:
        return len(self._events)

    def run(self, advance: Callable[[], object], *, until_settled: bool = False) -> None:
        """Play everything; call `advance` after each step."""
        gc.collect()
        gc.freeze()  # otherwise a fifth of the time is spent in garbage collection of Django's objects
        with delays_set_to(self.delays), self._agenda.kept():
            for moment, row, step in self._events:
                self._fire_until(moment)
                self._take(step, self.lives[row], moment)
                advance()
            if self._events:
                end = END_OF_TIME if until_settled else self._events[-1][0]
                self._fire_until(end)
                self._expect_nothing_due(end)

    @staticmethod
    def _take(step: Step, life: Life, moment: datetime) -> None:
        with clock.set_to(moment):
            take(step, life, guard=locked)

    def _fire_until(self, moment: datetime) -> None:
        while (first := self._agenda.first()) is not None and first[0] <= moment:
            with clock.set_to(first[0]):
                fired = fire_due(limit=1)  # this one, or an earlier one that a previous run left pending
            if not fired and self._agenda.first() == first:
                raise RuntimeError(f"Timeout {first[1]} was due at {first[0]}, but neither fired nor moved.")

    def _expect_nothing_due(self, end: datetime) -> None:
        """Check that the agenda missed no signal, which would be a timeout that did not fire."""
        forgotten = self.ledger.open_rows().filter(run_at__lte=end)
        if forgotten.exists():
            raise RuntimeError(f"Due by {end}, and not fired: {', '.join(map(str, forgotten[:5]))}")
