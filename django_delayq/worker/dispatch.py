"""Pass due timeouts from the sources of a worker to its executor.

Load their rows, make works of them, submit these, and report their results to the sources.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from datetime import timedelta
from math import inf
from typing import Final, NamedTuple, TypeVar

from django_delayq.backoff import Backoff, StateLog
from django_delayq.conf import get_settings
from django_delayq.firing.executors import PREFETCH_SECONDS, Executor
from django_delayq.firing.planning import plan
from django_delayq.firing.state import firing_state
from django_delayq.firing.works import Report, Work, suits_use_tz
from django_delayq.ledger.error_texts import message_of, shown
from django_delayq.policy.policies import registry
from django_delayq.times.clock import plural
from django_delayq.worker.lines import Lines
from django_delayq.worker.parts import WorkerParts
from django_delayq.worker.sources.ledger import CLAIMED_AHEAD, Batch, SlotQueue

logger = logging.getLogger("django_delayq.worker")
T = TypeVar("T")

RETRY_SECONDS: Final = 1.0
"""After an error of the database: at once would be a loop while it restarts."""
MAX_LOST: Final = 10_000
"""Ids that are remembered: an executor that loses everything for days must not fill the memory."""
RELEASE_SHARE: Final = 0.1
"""The part of the time after which works are released that passes between two checks."""


class _InFlight(NamedTuple):
    """The work of an id, and when it may begin."""

    work: Work
    at: float


class Dispatch:
    """Between the sources of a worker and its executor. For the worker's own thread."""

    def __init__(self, worker: WorkerParts, executor: Executor) -> None:
        self._worker, self._sources, self._skew = worker, worker.sources, worker.skew
        self._executor = executor
        self._early_seconds = getattr(executor, "early_seconds", 0.0)
        self._executor_name = f"{type(executor).__module__}.{type(executor).__qualname__}"
        self.lines = Lines(worker.using, worker.concurrency, getattr(executor, "prefetch_seconds", PREFETCH_SECONDS))
        self._finished: deque[tuple[Work, Report]] = deque()
        self._unheeded: Counter[str] = Counter()
        """How many more timeouts of each policy may complete before the worker's own thread has to know of them."""
        self._queues: defaultdict[tuple[str, str] | None, SlotQueue] = defaultdict(SlotQueue)
        """The works that may not begin yet, by what has slots of its own: see `_queue_of`."""
        self._in_flight: dict[int, _InFlight] = {}
        self._release_at = 0.0
        """When to check again whether works are to be released."""
        self._refusals = Backoff(0.5, 30.0)
        self._refusal_log = StateLog(logger, "executor_refused", "executor_back")
        self._lost: dict[int, int] = {}
        """How often an executor has lost each id, the latest last; of the last `MAX_LOST` ids."""
        self.worked_on = 0
        """How many timeouts of completed works were passed to handlers, or need none, each time they were."""
        self._settled = Counter({"fired": 0, "skipped_or_dead": 0, "settled_before": 0})
        self._again: dict[int, None] = {}
        """The timeouts that are to be tried again; of very many, the last `MAX_LOST` ids."""
        self._forgotten = 0

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def outcomes(self) -> dict[str, int]:
        """Return how many timeouts had which last outcome. One that is tried several times counts once."""
        return {**self._settled, "to_be_tried_again": len(self._again) + self._forgotten}

    def _count(self, done: set[int], again: set[int], report: Report) -> None:
        """Count the outcomes of a completed work for the last line of the log."""
        self.worked_on += len(done) + len(again)
        for id in done:
            self._again.pop(id, None)
        self._again |= dict.fromkeys(again)
        while len(self._again) > MAX_LOST:  # a worker that runs for months must not keep all their ids
            del self._again[next(iter(self._again))]
            self._forgotten += 1
        fired, before = done.intersection(report.fired), done.intersection(report.before)
        rest = len(done) - len(fired) - len(before)
        self._settled.update(fired=len(fired), skipped_or_dead=rest, settled_before=len(before))

    @property
    def refused_for(self) -> float:
        """Return for how many seconds nothing is to be submitted, because the executor has refused works."""
        return self._refusals.seconds_left

    def add(self, batch: Batch) -> None:
        """Load the rows and plan their works, or resolve them in the sources. Ids that are in flight are skipped.

        Due works are submitted at once, others by `submit_due`.

        Raises:
            django.db.Error: the rows could not be read. They are delivered again in a second.
        """
        # A timeout that an executor has lost counts as one more delivery: a process may have died of it.
        lost, held = self._lost, self._in_flight
        fresh = {id: count + lost.get(id, 0) for id, count in batch.deliveries.items() if id not in held}
        if not fresh:
            return
        try:
            works, report = plan(fresh, self._worker.using, CLAIMED_AHEAD, batch.slots)
        except Exception:
            self._resolve_again(fresh, RETRY_SECONDS)
            raise
        self._resolve(report)
        for id in report.done:  # another worker has settled what this one had tried
            self._again.pop(id, None)
        # Else entries without a timeout, of which there may be thousands, would be read few at a time.
        for label, count in Counter(batch.labels[id] for id in report.done if id in batch.labels).items():
            self.lines.completed(label, count)
        now, arrived = self._skew.now(), time.monotonic()
        for work in works:
            if due_at := report.early.get(work.ids[-1]):
                # A clock that jumps cannot make the wait longer.
                wait = min(due_at - now, CLAIMED_AHEAD).total_seconds()
                work = replace(work, begin_at=arrived + wait)  # noqa: PLW2901
            self._in_flight.update(dict.fromkeys(work.ids, _InFlight(work, max(arrived, work.begin_at))))
            self.lines.in_flight[work.policy] += len(work.ids)
            self._queue_of(work).add(work)
        self.submit_due()
        if report.again:
            self._sources.flush()  # timeouts that this worker cannot fire become available to others at once

    def _queue_of(self, work: Work) -> SlotQueue:
        """Return the works that share slots: of one policy with a rate, and of one value if it counts by one.

        Those of all other policies are in one.
        """
        return self._queues[(work.policy, work.share) if work.begin_by < inf else None]

    def submit_due(self) -> None:
        """Submit the works whose deadline or slot has come, or has nearly come if the executor waits for it."""
        for key, queue in list(self._queues.items()):
            for work in queue.ready(self._early_seconds):
                if work.ids[0] in self._in_flight:
                    self._submit(work)
            for work in queue.without_slot():
                self._redeliver(work.ids, 0)
            if queue.next_at == inf:  # there may be one for each of a million merchants
                del self._queues[key]

    @property
    def seconds_left(self) -> float:
        """Return how long it is until the next work that was planned before its deadline or slot is submitted."""
        first = min((queue.next_at for queue in self._queues.values()), default=inf)
        return max(0.0, first - self._early_seconds - time.monotonic())

    def _submit(self, work: Work) -> None:
        """Pass the work to the executor. If it refuses, submit nothing for a while."""
        if not self.refused_for:
            try:
                self._executor.submit(work, self._done)
            except Exception as error:  # noqa: BLE001 - a broker or a pool; database errors end the pass elsewhere
                self._refused(f"{type(error).__name__}: {message_of(error)}")
            else:
                return
        self._redeliver(work.ids, self.refused_for)

    def _refused(self, reason: str) -> None:
        if self.refused_for:
            return  # works that are refused together count once
        self._refusals.failed()
        words = "The executor %s refuses works; they are submitted again soon: %s"
        self._refusal_log.failed(words, self._executor_name, reason)

    def collect(self) -> int:
        """Resolve in the sources what has completed since the last call; return how many works that were.

        Reports that have arrived count, even if they are older than a lease: this thread may have been busy.
        """
        self._unheeded, count = Counter(), 0
        while self._finished:
            count += self._complete(*self._finished.popleft())
        return count + self._expire()

    def let_run(self) -> None:
        """Until the next `collect`, interrupt the worker only for reports that it can act on.

        These have a timeout that is to be tried again; or with them, so many of a policy are done that more are worth a
        round trip. A pass costs as much as two firings.
        """
        self._unheeded = self.lines.enough()
        for each in list(self._finished):
            self._note(*each)

    def _note(self, work: Work, report: Report) -> None:
        policy, ids = getattr(work, "policy", ""), getattr(work, "ids", ())  # an executor may send anything
        # Not atomic: if two threads do so at once, the worker sleeps for one report more, of many.
        self._unheeded[policy] = left = self._unheeded[policy] - len(ids)
        if left <= 0 or getattr(report, "again", True) or report.refused or report.missed:
            self._worker.interrupt()

    def _complete(self, work: Work, report: Report) -> int:
        """Resolve a work; return 1 if any of its timeouts was in flight, else 0.

        An executor may send a report late, twice, of a wrong type, or with ids of other works.
        """
        ids = self._in_flight.keys() & getattr(work, "ids", ())
        if not ids:
            return 0
        report = report if isinstance(report, Report) else Report(lost=tuple(ids))
        if report.missed and (missed := self._in_flight[min(ids)].work).begin_by < inf:
            self._queue_of(missed).put_back(missed)
            return 1
        done = ids.intersection(report.done)
        ids -= done
        again = {id: due_at for id, due_at in report.again.items() if id in ids and suits_use_tz(due_at)}
        ids -= again.keys()
        if refused := ids.intersection(report.refused):
            self._refused("it answered so")
            self._redeliver(refused, self.refused_for)
        self._lose(ids - refused)
        if done or again:
            if not self.refused_for:
                self._refusals.succeeded()
                self._refusal_log.recovered("The executor %s accepts works again", self._executor_name)
            self._remove([*done, *again])
            self.lines.completed(work.policy, len(done) + len(again))
            self._count(done, again.keys() - set(report.untried), report)
            for id in done:
                self._lost.pop(id, None)
            self._resolve(Report(tuple(done), again, now=report.now))
        return 1

    def _expire(self) -> int:
        """Give up timeouts that a remote executor has not reported within a lease; return how many."""
        if getattr(self._executor, "keeps_leases", False):
            return 0
        before = time.monotonic() - get_settings().lease.total_seconds()
        return self._lose([id for id, each in self._in_flight.items() if each.at <= before])

    def _lose(self, ids: Collection[int]) -> int:
        """Have `ids`, which may still run, delivered again when their lease would have ended; return how many."""
        if not ids:
            return 0
        words, count = "The executor %s did not report the outcome of %s: submitted again after a lease", len(ids)
        logger.warning(words, self._executor_name, plural(count, "timeout"), extra={"event": "executor_lost"})
        lease = get_settings().lease.total_seconds()
        for id in ids:
            self._lost[id] = self._lost.pop(id, 0) + 1
            if len(self._lost) > MAX_LOST:
                del self._lost[next(iter(self._lost))]
            self._redeliver([id], self._in_flight[id].at + lease - time.monotonic())
        return len(ids)

    def _redeliver(self, ids: Iterable[int], seconds: float) -> None:
        """Have those of `ids` that are in flight delivered again after some seconds. This delivery is not counted.

        A work that waits for a slot may have been given up meanwhile.
        """
        if held := [id for id in ids if id in self._in_flight]:
            self._remove(held)
            self._resolve_again(held, seconds)

    def release(self, after_seconds: float = 0.0) -> int:
        """Release timeouts that came `after_seconds` ago, or up to a tenth earlier, and have not begun.

        So others can take them. Their delivery is not counted. Return how many.
        """
        now = time.monotonic()
        before = now - after_seconds if after_seconds else inf
        if after_seconds:
            # Some that are so old may be running. Then each pass would withdraw and submit again all the others, which
            # costs time and makes the executor forget which of them has waited longest.
            if now < self._release_at:
                return 0
            self._release_at = now + after_seconds * RELEASE_SHARE
            if not any(each.at <= before for each in self._in_flight.values()):
                return 0
        withdrawn = self._try("withdraw", lambda: list(self._executor.withdraw())) or []
        withdrawn += [] if after_seconds else [work for queue in self._queues.values() for work in queue.clear()]
        released = 0
        for work in withdrawn:
            held = [id for id in work.ids if id in self._in_flight]
            if held and self._in_flight[held[0]].at > before:
                self._submit(work)
            elif held:
                self._redeliver(held, 0)
                released += len(held)
                self.lines.leave(work.policy, after_seconds)
        return released

    def close(self, *, wait: bool) -> None:
        """Close the executor, which must not keep the worker from ending."""
        self._try("close", lambda: self._executor.close(wait=wait))

    def _try(self, name: str, call: Callable[[], T]) -> T | None:
        """Return the result of a method of the executor, a class of the project; after an error log it."""
        try:
            return call()
        except Exception as error:
            words, facts = "The executor %s failed in %s(): %s", (self._executor_name, name, message_of(error))
            logger.warning(words, *facts, exc_info=shown(error), extra={"event": "executor_failed"})
            return None

    def abandon(self) -> int:
        """Leave running timeouts to other workers; return how many. For a process that is about to end."""
        ids = list(self._in_flight)
        self._resolve_again(ids, RETRY_SECONDS)
        return len(ids)

    def firing_non_atomic(self) -> list[int]:
        """Return the ids in flight whose rows are `firing` while their handler runs (`atomic=False`).

        Not suspects that wait for a thread: the attempt that died must expire.
        """
        begun = {id for running in list(firing_state.running.values()) for id in running.work.ids}
        return [
            id
            for id, each in list(self._in_flight.items())
            if (policy := registry.get(each.work.policy)) is not None and policy.runs_outside
            if id in begun or not each.work.suspect
        ]

    def _done(self, work: Work, report: Report) -> None:
        self._finished.append((work, report))
        self._note(work, report)

    def _remove(self, ids: Iterable[int]) -> None:
        for id in ids:
            policy = self._in_flight.pop(id).work.policy
            self.lines.in_flight[policy] -= 1
            if not self.lines.in_flight[policy]:
                del self.lines.in_flight[policy]

    def _resolve_again(self, ids: Iterable[int], seconds: float) -> None:
        due_at = self._skew.now() + timedelta(seconds=max(0.0, seconds))
        self._resolve(Report(again=dict.fromkeys(ids, due_at)))

    def _resolve(self, report: Report) -> None:
        if report.now is not None:
            self._skew.note_database(report.now)
        self._sources.resolve(report.done, report.again)
