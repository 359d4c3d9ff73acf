"""One pass over what was taken: load the rows, group them by policy, have them fired, and say what became of them."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple

from django_delayq.conf import get_settings
from django_delayq.executors import Executor
from django_delayq.firing import Report, Work, plan
from django_delayq.firing.report import is_moment
from django_delayq.ledger.scrubbing import message_of, shown
from django_delayq.policies import registry
from django_delayq.recovery.clocks import Clocks
from django_delayq.worker.appetite import Appetite
from django_delayq.worker.sources.both import Sources
from django_delayq.worker.sources.redis import AHEAD_MS

logger = logging.getLogger("django_delayq.worker")

SOON: Final = timedelta(seconds=1)
FIRST_PAUSE_SECONDS: Final = 0.5
LONGEST_PAUSE_SECONDS: Final = 30.0
"""How long nothing is handed over to an executor that refused a work, at first and at most."""
MAX_LOST: Final = 10_000
AHEAD: Final = timedelta(milliseconds=AHEAD_MS)


class _Sitting(NamedTuple):
    """When an id came, and how many were held then, itself included."""

    began: float
    held: int


class _Refusals:
    """How long to hand over nothing to an executor that refuses works: a broker that is down, a pool that is full."""

    def __init__(self, executor: Executor) -> None:
        self._name = f"{type(executor).__module__}.{type(executor).__qualname__}"
        self._count = 0
        self._until = 0.0

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def refused(self, reason: object) -> None:
        """Pause, each time for longer, with jitter; what was refused at once counts as one refusal."""
        if self.seconds_left:
            return
        if not self._count:
            logger.warning(
                "The executor %s refuses works; they are handed over again soon: %s",
                self._name,
                reason,
                extra={"event": "executor_refused"},
            )
        pause = min(FIRST_PAUSE_SECONDS * 2 ** min(self._count, 10), LONGEST_PAUSE_SECONDS)
        self._count += 1
        self._until = time.monotonic() + pause * random.uniform(0.75, 1.0)

    def accepted(self) -> None:
        """A work was run: the next refusal is a new one."""
        if self._count and not self.seconds_left:
            self._count = 0
            logger.info("The executor %s accepts works again", self._name, extra={"event": "executor_back"})

    def lost(self, count: int) -> None:
        logger.warning(
            "The executor %s has not said what became of %d timeouts; they are handed over again after a lease",
            self._name,
            count,
            extra={"event": "executor_lost"},
        )

    def failed(self, what: str, error: Exception) -> None:
        logger.warning(
            "The executor %s failed in %s(): %s",
            self._name,
            what,
            message_of(error),
            exc_info=shown(error),
            extra={"event": "executor_failed"},
        )


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
        self._refusals = _Refusals(executor)
        self._lost: Counter[int] = Counter()
        self.held_by_policy: Counter[str] = Counter()
        """How many of each policy are under way."""
        self.worked_on = 0
        """How many timeouts were given to handlers, or found not to need one, by a work that has ended."""

    @property
    def held(self) -> int:
        """How many timeouts are under way."""
        return len(self._works)

    @property
    def refused_for(self) -> float:
        """For how many seconds nothing is to be handed out, because the executor has refused works."""
        return self._refusals.seconds_left

    def hand_out(self, deliveries: Mapping[int, int]) -> int:
        """Every id is under way, or settled in the sources; returns how many were new here.

        An id that is under way already is not fired a second time beside itself.

        Raises:
            django.db.Error: the rows could not be read. The ids are as if they had never been handed out.
        """
        # What was lost on its way counts as handed out once more: a process may have died of it.
        fresh = {id: count + self._lost[id] for id, count in deliveries.items() if id not in self._works}
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
            self._submit(work)
        if report.again:
            self._sources.flush()  # what this worker cannot fire now is there for others at once
        return len(fresh)

    def _submit(self, work: Work) -> None:
        """The executor has the work, or has refused it: then nothing more is handed over for a while."""
        if not self.refused_for:
            try:
                self._executor.submit(work, self._done)
            except Exception as error:  # noqa: BLE001 - a broker, a pool: not the database, whose errors end the pass
                self._refusals.refused(f"{type(error).__name__}: {message_of(error)}")
            else:
                return
        self._come_again(work.ids, self.refused_for)

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
        count = self._expire()
        while True:
            try:
                work, report = self._finished.get_nowait()
            except Empty:
                return count
            count += self._settle(work, report)

    def _settle(self, work: Work, report: Report) -> int:
        """Whether `report` settles any timeout. It may come late, twice, without a meaning, or for others' ids."""
        ids = [id for id in getattr(work, "ids", ()) if id in self._works]
        if not ids:
            return 0
        if not isinstance(report, Report):
            report = Report(lost=tuple(ids))
        done = [id for id in report.done if id in ids]
        again = {id: moment for id, moment in report.again.items() if id in ids and is_moment(moment)}
        refused = [id for id in report.refused if id in ids and id not in done and id not in again]
        lost = [id for id in ids if id not in done and id not in again and id not in refused]
        if refused:
            self._refusals.refused("it answered so")
            self._come_again(refused, self.refused_for)
        if lost:
            self._lose(lost)
        if done or again:
            self._refusals.accepted()
            sitting = self._forget([*done, *again])
            self._appetite.ate(sitting.held, time.monotonic() - sitting.began)
            self.worked_on += len(done) + len(again.keys() - set(report.untried))
            for id in done:
                self._lost.pop(id, None)
            self._tell(Report(tuple(done), again, now=report.now))
        return 1

    def _expire(self) -> int:
        """What an executor elsewhere has not answered for within a lease is not held any more; returns how much."""
        if getattr(self._executor, "keeps_leases", False):
            return 0
        before = time.monotonic() - get_settings().lease.total_seconds()
        expired = [id for id, sitting in self._sitting.items() if sitting.began <= before]
        if expired:
            self._lose(expired)
        return len(expired)

    def _lose(self, ids: Sequence[int]) -> None:
        """Nothing is known of `ids`, which may be running: they come again when their lease would have ended."""
        self._refusals.lost(len(ids))
        lease = get_settings().lease.total_seconds()
        if len(self._lost) < MAX_LOST:
            self._lost.update(ids)
        for id in ids:
            self._come_again([id], self._sitting[id].began + lease - time.monotonic())

    def _come_again(self, ids: Sequence[int], seconds: float) -> None:
        """Not held any more, and handed out again after some seconds; the delivery is not counted."""
        self._forget(ids)
        moment = self._clocks.now() + timedelta(seconds=max(0.0, seconds))
        self._tell(Report(again=dict.fromkeys(ids, moment)))

    def give_back(self, held_for: float = 0.0) -> int:
        """What has waited here for `held_for` seconds without being begun can be taken by others; returns how many.

        Its delivery is not counted: nobody has tried it.
        """
        began_before = time.monotonic() - held_for
        if held_for and not any(sitting.began <= began_before for sitting in self._sitting.values()):
            return 0
        returned = 0
        for work in self._withdrawn():
            if self._sitting[work.ids[0]].began > began_before:
                self._submit(work)
                continue
            self._forget(work.ids)
            self._appetite.was_full()
            returned += len(work.ids)
            self._tell(Report(again=dict.fromkeys(work.ids, self._clocks.now())))
        return returned

    def _withdrawn(self) -> list[Work]:
        """What the executor has not begun, and is under way here."""
        try:
            withdrawn = list(self._executor.withdraw())
        except Exception as error:  # noqa: BLE001 - whatever it is, the worker goes on
            self._refusals.failed("withdraw", error)
            return []
        return [work for work in withdrawn if all(id in self._works for id in work.ids)]

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

    def _forget(self, ids: Sequence[int]) -> _Sitting:
        sitting = self._sitting[ids[0]]
        for id in ids:
            policy = self._works.pop(id).policy
            del self._sitting[id]
            self.held_by_policy[policy] -= 1
            if not self.held_by_policy[policy]:
                del self.held_by_policy[policy]
        return sitting

    def _tell(self, report: Report) -> None:
        if report.now is not None:
            self._clocks.saw_database(report.now)
        self._sources.settle(report.done, report.again)
