"""One pass over what was taken: load the rows, group them by policy, have them fired, and say what became of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple

from django_delayq.executors import Executor
from django_delayq.firing import Report, Work, plan
from django_delayq.policies import registry
from django_delayq.recovery.clocks import Clocks
from django_delayq.worker.appetite import Appetite
from django_delayq.worker.sources import Sources
from django_delayq.worker.transfer import AHEAD_MS

SOON: Final = timedelta(seconds=1)
AHEAD: Final = timedelta(milliseconds=AHEAD_MS)


class _Sitting(NamedTuple):
    """When an id came, and how many were held then, itself included."""

    began: float
    held: int


class Dispatch:
    """Between the sources and the executor. For the worker's own thread; only `wake` is called by others.

    Args:
        executor: runs the works.
        sources: told what became of each timeout.
        using: the database.
        clocks: learns the database's moments.
        appetite: learns how long timeouts are held.
        wake: called, in any thread, when there is something to `collect`.
    """

    def __init__(
        self,
        executor: Executor,
        sources: Sources,
        using: str,
        *,
        clocks: Clocks,
        appetite: Appetite,
        wake: Callable[[], None],
    ) -> None:
        self._executor = executor
        self._sources = sources
        self._using = using
        self._clocks = clocks
        self._appetite = appetite
        self._wake = wake
        self._finished: SimpleQueue[tuple[Work, Report]] = SimpleQueue()
        self._sitting: dict[int, _Sitting] = {}
        self._works: dict[int, Work] = {}
        self.held_by_policy: Counter[str] = Counter()
        """How many of each policy are under way."""
        self.worked_on = 0
        """How many timeouts were given to handlers, or found not to need one, by a work that has ended."""

    @property
    def held(self) -> int:
        """How many timeouts are under way."""
        return len(self._works)

    def hand_out(self, deliveries: Mapping[int, int]) -> int:
        """Every id is under way, or settled in the sources; returns how many were new here.

        An id that is under way already is not fired a second time beside itself.

        Raises:
            django.db.Error: the rows could not be read. The ids are as if they had never been handed out.
        """
        fresh = {id: count for id, count in deliveries.items() if id not in self._works}
        if not fresh:
            return 0
        works, report = plan(fresh, self._using, AHEAD)
        sitting = _Sitting(time.monotonic(), len(self._works) + sum(len(work.ids) for work in works))
        for work in works:
            self._works.update(dict.fromkeys(work.ids, work))
            self.held_by_policy[work.policy] += len(work.ids)
            self._sitting.update(dict.fromkeys(work.ids, sitting))
        self._tell(report)
        if report.due_by is not None:
            self._hold(report.due_by)
        for work in works:
            self._executor.submit(work, self._done)
        if report.again:
            self._sources.flush()  # what this worker cannot fire now is there for others at once
        return len(fresh)

    def _hold(self, moment: datetime) -> None:
        """Wait out the few milliseconds that it took less to prepare. A clock that jumps cannot make it more."""
        seconds = min((moment - self._clocks.now()).total_seconds(), AHEAD.total_seconds())
        if seconds > 0:
            time.sleep(seconds)

    def put_back(self, deliveries: Iterable[int]) -> None:
        """The ids, which could not be handed out, come again in a second."""
        self._put_back_soon(id for id in deliveries if id not in self._works)

    def collect(self) -> int:
        """What has ended since the last time is settled in the sources; returns how many works that were."""
        count = 0
        while True:
            try:
                work, report = self._finished.get_nowait()
            except Empty:
                return count
            count += 1
            sitting = self._forget(work)
            self._appetite.ate(sitting.held, time.monotonic() - sitting.began)
            self.worked_on += len(work.ids)
            self._tell(report)

    def give_back(self, held_for: float = 0.0) -> int:
        """What has waited here for `held_for` seconds without being begun can be taken by others; returns how many.

        Its delivery is not counted: nobody has tried it.
        """
        began_before = time.monotonic() - held_for
        if held_for and not any(sitting.began <= began_before for sitting in self._sitting.values()):
            return 0
        withdrawn = self._executor.withdraw()
        returned = 0
        for work in withdrawn:
            if self._sitting[work.ids[0]].began > began_before:
                self._executor.submit(work, self._done)
                continue
            self._forget(work)
            self._appetite.was_full()
            returned += len(work.ids)
            self._tell(Report(again=dict.fromkeys(work.ids, self._clocks.now())))
        return returned

    def abandon(self) -> int:
        """What runs is left to others, soon; returns how many. For a process that is about to end."""
        ids = list(self._works)
        self._put_back_soon(ids)
        return len(ids)

    def firing_outside(self) -> list[int]:
        """The ids under way whose rows are `firing` while their handler runs (`atomic=False`)."""
        outside = []
        for id, work in list(self._works.items()):
            policy = registry.get(work.policy)
            if policy is not None and not policy.atomic:
                outside.append(id)
        return outside

    def _put_back_soon(self, ids: Iterable[int]) -> None:
        moment = self._clocks.now() + SOON
        self._tell(Report(again=dict.fromkeys(ids, moment)))

    def _done(self, work: Work, report: Report) -> None:
        self._finished.put((work, report))
        self._wake()

    def _forget(self, work: Work) -> _Sitting:
        sitting = self._sitting[work.ids[0]]
        for id in work.ids:
            del self._works[id], self._sitting[id]
        self.held_by_policy[work.policy] -= len(work.ids)
        if not self.held_by_policy[work.policy]:
            del self.held_by_policy[work.policy]
        return sitting

    def _tell(self, report: Report) -> None:
        if report.now is not None:
            self._clocks.saw_database(report.now)
        self._sources.settle(report.done, report.again)
