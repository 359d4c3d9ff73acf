"""Play records in compressed real time, while real workers fire the timeouts."""

from __future__ import annotations

import heapq
import time
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING

from django.utils import timezone

from shop.delays import delays_set_to
from shop.replay.results import Ledger
from shop.replay.steps import Life, Step, steps_of, take

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from datetime import datetime

    from shop.replay.records import OrderRecord
    from shop.replay.tempo import Tempo

TICK_SECONDS = 0.2


class StillOpen(Exception):
    """Some timeouts did not settle, although they are overdue."""


class LivePlay:
    """Play orders one after the other, at most `pace` a second, each at the given tempo.

    The hours between two orders are omitted. A step waits from the time when the previous step really happened. When
    steps are late, no new order is placed until they have caught up: a slow machine takes longer, but does not make
    an order late that was paid in time.
    """

    def __init__(
        self, records: Iterable[OrderRecord], delays: Mapping[str, timedelta], tempo: Tempo, pace: float
    ) -> None:
        self.lives = [Life(record) for record in records]
        self.tempo = tempo
        self.delays = {name: tempo(delay) for name, delay in delays.items()}
        self.ledger = Ledger.from_now_on()
        self._gap = 1 / pace
        self._waiting: list[tuple[float, Step, int]] = []  # (monotonic seconds, step, index of the life)

    def run(self, advance: Callable[[], object], tick: Callable[[], object]) -> None:
        """Play all orders; call `advance` after each placed order, and `tick` a few times a second."""
        unplaced = deque(sorted(range(len(self.lives)), key=lambda row: self.lives[row].record.placed_at))
        next_place = next_tick = time.monotonic()
        with delays_set_to(self.delays):
            while unplaced or self._waiting:
                now = time.monotonic()
                if self._waiting and self._waiting[0][0] <= now:
                    _, step, row = heapq.heappop(self._waiting)
                    self._take(step, row)
                elif unplaced and next_place <= now:
                    self._take(Step.PLACED, unplaced.popleft())
                    next_place = max(next_place + self._gap, now)
                    advance()
                elif next_tick <= now:
                    tick()
                    next_tick = time.monotonic() + TICK_SECONDS
                else:
                    upcoming = [next_tick, *(due for due, _, _ in self._waiting[:1])]
                    time.sleep(max(0.0, min([*upcoming, next_place] if unplaced else upcoming) - now))

    def wait_until_settled(self, patience: float, tick: Callable[[], object]) -> None:
        """Return when all timeouts of this run have settled.

        Raises:
            StillOpen: something is overdue by more than `patience` seconds.
        """
        while self.ledger.open_rows().exists():
            overdue = self.ledger.open_rows().filter(run_at__lt=timezone.now() - timedelta(seconds=patience))
            if stuck := list(overdue[:5]):
                names = ", ".join(map(str, stuck))
                raise StillOpen(f"Overdue by more than {patience:g} s. Is a worker running? {names}")
            tick()
            time.sleep(TICK_SECONDS)

    def _take(self, step: Step, row: int) -> None:
        life = self.lives[row]
        if step is Step.ACCEPTED:
            life.promised_at = self._promise(life.record)
        if take(step, life):
            for moment, later in steps_of(life.record):
                anchor_step, anchor = _anchor(later, moment, life.record)
                if anchor_step is step:
                    wait = self.tempo(moment - anchor).total_seconds()
                    heapq.heappush(self._waiting, (time.monotonic() + wait, later, row))

    def _promise(self, record: OrderRecord) -> datetime | None:
        """Return the promised time, as long after this acceptance as it was after the recorded one."""
        if record.promised_at is None or record.accepted_at is None:
            return None
        return timezone.now() + self.tempo(max(record.promised_at - record.accepted_at, timedelta(0)))


def _anchor(step: Step, moment: datetime, record: OrderRecord) -> tuple[Step | None, datetime]:
    """Return the step that `step` waits from, and its recorded time: the previous one, for a review the latest one."""
    before: tuple[Step | None, datetime] = (None, moment)
    for at, earlier in steps_of(record):
        if earlier is step or earlier is Step.REVIEWED:
            continue
        if earlier < step if step is not Step.REVIEWED else at < moment or earlier is Step.PLACED:
            before = (earlier, at)
    return before
