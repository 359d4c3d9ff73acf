"""The sweep: Redis knows what is due soon or overdue, whatever became of pushes, entries and servers.

It loads what lay beyond the horizon, repairs what Redis lost, and finds rows whose push never happened: one mechanism
for all three, so that none of them is code which runs once a year. Every `SWEEP_INTERVAL` it looks at what is due from
a minute ago to two intervals ahead; once a minute, and when a policy goes on that was stopped, at everything overdue,
for rows that were committed after they were due and for old backlog. And it settles `firing` rows whose worker died.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from django_delayq import clock
from django_delayq.conf import get_settings
from django_delayq.engine import Engine
from django_delayq.firing import settle_expired
from django_delayq.firing.unknown import unknown
from django_delayq.ledger.controls import Stopped, stop_cache
from django_delayq.ledger.search import SOONEST, Cursor, in_state
from django_delayq.models import Timeout
from django_delayq.policies import registry
from django_delayq.recovery.clocks import Clocks
from django_delayq.recovery.turns import turn

logger = logging.getLogger("django_delayq.worker")

PAGE: Final = 1_000
PASS: Final = 10_000
BEHIND: Final = timedelta(seconds=60)
FULL_INTERVAL: Final = timedelta(seconds=60)
PARKED: Final = timedelta(minutes=1)
"""How long the entry of a stopped policy stays where it is."""
EXPIRED_PAGE: Final = 1_000
RESTORED_LIMIT: Final = 3
"""Fewer restored entries are not logged: single pushes fail, and rows fire between two looks."""


class Row(NamedTuple):
    """The columns of a pending row that its entry in Redis depends on."""

    run_at: datetime
    id: int
    queue: str
    policy: str
    created_at: datetime


def page_of(using: str, start: datetime | None, place: Row | None, end: datetime) -> list[Row]:
    """Return the next `PAGE` pending rows after `place` whose `run_at` is from `start` (None: no bound) to `end`."""
    rows = in_state(Timeout.objects.using(using).filter(run_at__lte=end), Timeout.State.PENDING)
    if place is not None:
        rows = Cursor(SOONEST, (place.run_at, place.id)).after(rows)
    elif start is not None:
        rows = rows.filter(run_at__gte=start)
    return [Row(*values) for values in rows.values_list(*Row._fields)[:PAGE]]


@dataclass(frozen=True, slots=True)
class Swept:
    """How many rows were looked at, and how many entries were missing or too late.

    `pushed`: how many of the rows had been pushed when they were scheduled. `restored`: how many of those were missing
    at least.
    """

    looked: int = 0
    changed: int = 0
    pushed: int = 0
    restored: int = 0

    def __add__(self, other: Swept) -> Swept:
        return Swept(
            self.looked + other.looked,
            self.changed + other.changed,
            self.pushed + other.pushed,
            self.restored + other.restored,
        )


class Sweep:
    """One worker's sweep. Not for several threads at once."""

    def __init__(self, engine: Engine, using: str, clocks: Clocks) -> None:
        self._engine = engine
        self._using = using
        self._clocks = clocks
        self._between: Callable[[], object] = lambda: None
        self._places: dict[str, Row | None] = {}
        self._parked_until = clock.now()
        self._stopped = Stopped()
        self._restored_at = float("-inf")

    def run_once(self, *, everything: bool = False, between: Callable[[], object] = lambda: None) -> Swept:
        """One sweep, if it is this worker's turn; with `everything` in any case, and over all that is overdue.

        `between` is called between two pages.

        Raises EngineError or the database's errors; what was done until then stays done.
        """
        interval = get_settings().sweep_interval
        # Whoever's turn it is: each worker has to know how far the two clocks are apart.
        now = self._clocks.ask_database()
        self._between = between
        with turn(self._engine, "sweep", interval, always=everything) as is_ours:
            if not is_ours:
                return Swept()
            before, self._stopped = self._stopped, stop_cache.read(self._using)
            everything = everything or bool(before.keys() - self._stopped.keys())
            with turn(self._engine, "full-sweep", FULL_INTERVAL, always=everything) as is_full:
                # What is yet to come is first: behind a long backlog it would have to wait for it.
                self._parked_until = now + PARKED
                ahead = self._logged(self._range("ahead", now, now + 2 * interval))
                if is_full:
                    return ahead + self._range("full", None, now)
                return ahead + self._range("behind", now - BEHIND, now)

    def _logged(self, swept: Swept) -> Swept:
        """Log once that Redis has lost entries: what is due later is restored by later sweeps, without another line.

        Only of rows that are yet to come: entries of overdue ones may have been put back for a while by a worker.
        """
        if swept.restored >= RESTORED_LIMIT and 2 * swept.restored >= swept.pushed:
            last, self._restored_at = self._restored_at, time.monotonic()
            if self._restored_at - last > FULL_INTERVAL.total_seconds():
                logger.warning(
                    "Redis had lost entries: %d of the %d timeouts that are due next were missing and are restored. "
                    "Later ones are restored before they are due",
                    swept.restored,
                    swept.pushed,
                    extra={"event": "entries_restored", "restored": swept.restored},
                )
        return swept

    def _range(self, kind: str, start: datetime | None, end: datetime) -> Swept:
        """Pass after pass until the end of the range, or until a whole pass found Redis as it should be.

        Then the rest is most likely as it should be too, and a backlog of 100,000 is not read again every few
        seconds. The next sweep goes on from there, so that in the end every row is looked at.
        """
        total = Swept()
        place = self._places.get(kind)
        while True:
            swept, place = self._pass(start, place, end)
            total += swept
            if place is None or not swept.changed:
                break
        self._places[kind] = place
        return total

    def _pass(self, start: datetime | None, place: Row | None, end: datetime) -> tuple[Swept, Row | None]:
        """At most `PASS` rows; returns how far it came, None: to the end."""
        if place is not None and start is not None and place.run_at < start:
            place = None
        swept = Swept()
        while swept.looked < PASS:
            page = page_of(self._using, start, place, end)
            swept += self._ensure(page)
            self._between()
            if len(page) < PAGE:
                return swept, None
            place = page[-1]
        return swept, place

    def _ensure(self, rows: Sequence[Row]) -> Swept:
        entries: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
        for row in rows:
            # One of a stopped policy is looked at once a minute; parked so, it stays where it is. One of a policy that
            # is not declared here stays where this worker has parked it; others, which may know it, find the rest.
            policy = registry.get(row.policy)
            moment = row.run_at
            if policy is None:
                moment = unknown.parked_until(row.id) or moment
            elif policy.label in self._stopped:
                moment = max(moment, self._parked_until)
            entries[row.queue, self._engine.shard_of(row.id)].append((row.id, self._clocks.redis_ms(moment)))
        changed = sum(self._engine.queue(*place).ensure(found) for place, found in entries.items())
        horizon = get_settings().horizon
        pushed = sum(row.run_at - row.created_at <= horizon for row in rows)
        return Swept(len(rows), changed, pushed, max(0, changed - (len(rows) - pushed)))


def settle_all_expired(using: str) -> int:
    """Every `firing` row whose attempt died is settled or waits again; returns how many. Needs no Redis."""
    settled = 0
    while True:
        report = settle_expired(using, EXPIRED_PAGE)
        found = len(report.done) + len(report.again)
        settled += found
        if found < EXPIRED_PAGE:
            return settled
