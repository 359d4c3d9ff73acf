"""Lease due entries from Redis, from each line as many as this worker may take.

`Sources` turns to the ledger while Redis does not work.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from math import inf
from typing import TYPE_CHECKING, Any, Final

from django_delayq.conf import get_settings
from django_delayq.engine.engine import DelayQueue, Engine, Lease
from django_delayq.exceptions import EngineError
from django_delayq.firing.state import firing_state
from django_delayq.ledger.controls import stop_cache
from django_delayq.ledger.db_connections import check_connections
from django_delayq.policy.policies import registry
from django_delayq.times.clock import plural
from django_delayq.worker.servers import ClockSkew, RedisHealth
from django_delayq.worker.sources.ledger import POLL_SECONDS, Batch, LedgerSource

if TYPE_CHECKING:
    from django_delayq.ledger.claiming import Granted, Slot
    from django_delayq.policy.policies import TimeoutPolicy
    from django_delayq.worker.lines import Lines, MayRun

logger = logging.getLogger("django_delayq.worker")

LEAD_MS: Final = 20
"""The worker leases an entry and reads its row this long before it is due: only the firing is left at its deadline."""
AHEAD_MS: Final = 50
"""It then also leases the entries that are due within this time, so that one lease and one read serve several."""
MAX_ROUNDS: Final = 10
"""How often one pass asks, so that a flood of invalid entries does not block it."""
MAX_OUTDATED: Final = 100
"""How many entries of a policy with a rate are checked at once if the ledger has no due row of it."""
JITTER_SECONDS: Final = 0.005
"""Spreads the checks of idle workers. A worker that waits for a deadline is on time."""


def _asked_at(due_at: float, policy: TimeoutPolicy[Any]) -> float:
    """Return from when on to ask a line. The ledger has no row of a policy with a rate before it is due."""
    return due_at if policy.rate else due_at - LEAD_MS / 1000


@dataclass(slots=True, eq=False)
class _Leased:
    """One lease: the ids in flight, and the results of the others that Redis does not have yet."""

    queue: DelayQueue
    lease: Lease
    expires: float
    in_flight: set[int]
    lost: int = 0
    done: set[int] = field(default_factory=set)
    again: dict[int, datetime] = field(default_factory=dict)


class RedisSource:
    """The source of due timeouts that Redis is; without an engine it has none. Raises EngineError."""

    def __init__(self, engine: Engine | None, queues: Iterable[str], skew: ClockSkew) -> None:
        self._engine = engine
        self._skew = skew
        self._lock = threading.RLock()
        self._check_at: dict[DelayQueue, float] = {}
        """When to read next which lines of each queue and shard have work."""
        self._heads: dict[DelayQueue, dict[str, float]] = {}
        """When each line of a queue and shard has its next work, if that is soon."""
        self._turn = 0
        self._leased: list[_Leased] = []
        self.by_id: dict[int, _Leased] = {}
        """The ids that this worker has leased, and not resolved."""
        self.serve(queues)

    def serve(self, queues: Iterable[str]) -> None:
        for queue in [] if self._engine is None else self._engine.queues(queues):
            self._check_at.setdefault(queue, 0.0)

    def check_now(self) -> None:
        """Make the next `due` read the heads of every queue."""
        self._check_at = dict.fromkeys(self._check_at, 0.0)

    def due(self, lines: Lines) -> Collection[str]:
        """Read the heads of each queue once a second, or when a message came. In between they are known."""
        for queue in [queue for queue, at in self._check_at.items() if at <= time.monotonic()]:
            self._reserve(queue, {}, {})
        now, may_run = time.monotonic(), lines.may_run(by_last_answer=True)
        found = (item for heads in self._heads.values() for item in heads.items())
        return dict.fromkeys(line for line, at in found if line in may_run and _asked_at(at, may_run[line]) <= now)

    def take(self, limits: Mapping[str, int]) -> Mapping[str, Mapping[int, int]]:
        """Ask the queues in turns. After an error release what others have leased."""
        found: dict[str, dict[int, int]] = {line: {} for line in limits}
        queues = list(self._check_at)
        self._turn = (self._turn + 1) % max(1, len(queues))
        soon = time.monotonic() + AHEAD_MS / 1000
        for queue in queues[self._turn :] + queues[: self._turn]:
            due = [line for line, at in self._heads.get(queue, {}).items() if line in limits and at <= soon]
            left = {line: limits[line] - len(found[line]) for line in due}
            if wanted := {line: count for line, count in left.items() if count > 0}:
                self._reserve(queue, wanted, found)
        return found

    def seconds_left(self, may_run: MayRun, waiting: Collection[str]) -> float:
        heads = (item for heads in self._heads.values() for item in heads.items())
        due = [_asked_at(at, may_run[line]) for line, at in heads if line in may_run and line not in waiting]
        return max(0.0, min([*due, *self._check_at.values()], default=inf) - time.monotonic())

    def overdue_seconds(self, labels: Collection[str]) -> float:
        """Return for how long the first work of one of these lines has been due."""
        heads = [heads[line] for heads in self._heads.values() for line in labels if line in heads]
        return time.monotonic() - min(heads, default=inf)

    def _reserve(self, queue: DelayQueue, limits: Mapping[str, int], found: dict[str, dict[int, int]]) -> None:
        """Lease entries of one queue into `found`, and learn when its lines have work. After an error release all."""
        lease_seconds, asked = get_settings().lease.total_seconds(), time.monotonic()
        with self._lock:
            try:
                named = [label for policy in registry for label in policy.labels]
                reserved = queue.reserve(limits, int(lease_seconds * 1000), AHEAD_MS, named)
            except EngineError:  # the caller never learns what other queues have leased
                self.resolve((), dict.fromkeys((id for ids in found.values() for id in ids), self._skew.now()))
                raise
            if reserved.lease is not None:
                ids = {entry.id for entry in reserved.entries}
                leased = _Leased(queue, reserved.lease, asked + lease_seconds, ids)
                self._leased.append(leased)
                for id in ids:
                    # An id that is in flight here already has lost its lease: its result counts for the new one.
                    if former := self.by_id.get(id):
                        former.in_flight.discard(id)
                    self.by_id[id] = leased
        for entry in reserved.entries:
            found[entry.line][entry.id] = entry.deliveries
        self._skew.note_redis(reserved.now_ms)
        now = time.monotonic()
        self._heads[queue] = {line: now + (ms - reserved.now_ms) / 1000 for line, ms in reserved.heads.items()}
        # Not a second later: what is then due would be found too late to be prepared.
        self._check_at[queue] = now + POLL_SECONDS - AHEAD_MS / 1000 - random.uniform(0, JITTER_SECONDS)

    def resolve(self, done: Collection[int], again: Mapping[int, datetime]) -> None:
        with self._lock:
            for id in done:
                if leased := self.by_id.pop(id, None):
                    leased.in_flight.discard(id)
                    leased.done.add(id)
            for id, due_at in again.items():
                if leased := self.by_id.pop(id, None):
                    leased.in_flight.discard(id)
                    leased.again[id] = due_at

    def flush(self) -> None:
        """Acknowledge and release entries. After an error they stay noted until their lease is too old to matter."""
        with self._lock:
            calls, sent = [], [leased for leased in self._leased if leased.done or leased.again]
            for leased in sent:
                due = [(id, (id, self._skew.redis_ms(due_at))) for id, due_at in leased.again.items()]
                calls += leased.queue.calls_of(leased.lease, "acknowledge", ((id, id) for id in leased.done))
                calls += leased.queue.calls_of(leased.lease, "release", due)
            if calls and self._engine is not None:
                self._engine.caller.send(calls)
            for leased in sent:
                if leased.again:
                    self._check_at[leased.queue] = 0.0  # an entry may be due again already
                leased.done, leased.again = set(), {}
            too_old = time.monotonic() - get_settings().lease.total_seconds()
            self._leased = [
                leased
                for leased in self._leased
                if leased.in_flight or ((leased.done or leased.again) and leased.expires > too_old)
            ]

    def extend(self) -> None:
        lease_ms = int(get_settings().lease.total_seconds() * 1000)
        with self._lock:
            for leased in self._leased:
                if not leased.in_flight or leased.lost >= len(leased.in_flight):
                    continue
                began = time.monotonic()
                leased.lease, count = leased.queue.extend(leased.lease, lease_ms)
                leased.expires = began + lease_ms / 1000
                lost, name = len(leased.in_flight) - count, leased.queue.name
                if lost > leased.lost:  # no action: the worker that has the lease now finds the row locked or settled
                    logger.warning(
                        "%s moved, cancelled or leased to others while in flight here",
                        plural(lost, f"timeout of queue {name!r} was", f"timeouts of queue {name!r} were"),
                        extra={"event": "lease_lost", "queue": name},
                    )
                leased.lost = max(lost, 0)


class Sources:
    """Both sources as one. Raises the database's errors. An error of Redis only switches to the ledger.

    `queues` are served from Redis, and `only` from the ledger (None: all queues).
    """

    def __init__(
        self, health: RedisHealth, queues: Sequence[str], only: Sequence[str] | None, using: str, skew: ClockSkew
    ) -> None:
        self._health = health
        self._skew = skew
        self.redis = RedisSource(health.engine, queues, skew)
        self.ledger = LedgerSource(using, only, skew)
        self._must_poll = self._is_turn_of_redis = False
        self._database_used_at, self._look_at = time.monotonic(), 0.0
        self._first_due: Mapping[str, int] = {}
        """What `LedgerSource.first_due` returned when this worker has last asked it."""
        self._silent: dict[str, int] = {}
        """The lines that are read from the ledger, too, each with the row that no worker has taken from Redis."""
        self._unseen: dict[str, int] = {}
        """The last such row of each line that this worker has taken from the ledger, until it is done."""

    def check_now(self) -> None:
        """Check every queue in Redis, because a message came. It may be about a policy that was resumed."""
        self.redis.check_now()
        stop_cache.forget_stops()

    def take(self, lines: Lines, left: int) -> Batch:
        """Lease or claim due timeouts of the lines that may be asked, a fair share of each, at most `left`."""
        if self._health.is_up and not self._must_poll:
            if (batch := self._take_silent(lines, left)).deliveries:
                return replace(batch, wait_seconds=0.0)
            try:
                batch = self._take(self.redis, lines, left)
            except EngineError as error:
                self._lost(error)
            else:
                # A full Redis lacks entries. The ledger is read only when Redis returns none, because an error of the
                # database would lose those that were leased.
                if not self._health.is_full or batch.deliveries or not batch.wait_seconds:
                    return batch
                more = self._take(self.ledger, lines, left)
                return replace(more, wait_seconds=min(batch.wait_seconds, more.wait_seconds))
        if not self._health.is_up:
            return self._take(self.ledger, lines, left)
        # Redis is back. It still leases entries to callers that never got the answer, so poll the ledger once more.
        batch = self.take_due_rows(lines, left)
        self._must_poll = batch.is_part
        return batch if self._must_poll else replace(batch, wait_seconds=0.0)

    def take_due_rows(self, lines: Lines, left: int) -> Batch:
        """Claim due timeouts from the ledger at once, also such as Redis has not returned."""
        self.ledger.check_now()
        return self._take(self.ledger, lines, left)

    def _take_silent(self, lines: Lines, left: int) -> Batch:
        """Claim due timeouts of the lines that are silent in Redis, in turns with what it shows, until none is due.

        A line is silent if its first due row was the first one half a lease ago, and no worker has begun or claimed
        it. So nothing that is written to Redis delays a timeout for longer, such as a lease that no worker has.
        """
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + get_settings().lease.total_seconds() / 2
            self._use_database()
            before, self._first_due = self._first_due, self.ledger.first_due(lines)
            same = {line: id for line, id in self._first_due.items() if before.get(line) == id}
            self._silent |= {line: id for line, id in same.items() if id not in self.redis.by_id}
        self._is_turn_of_redis = not self._silent or not self._is_turn_of_redis
        if self._is_turn_of_redis:
            return Batch()
        batch = self._take(self.ledger, lines, left, self._silent)
        self._unseen |= {line: id for line, id in self._silent.items() if id in batch.deliveries}
        self._silent = {line: self._silent[line] for line in self.ledger.due(lines) if line in self._silent}
        return batch

    def _take(self, source: RedisSource | LedgerSource, lines: Lines, left: int, due: Collection[str] = ()) -> Batch:
        """Ask the due lines of one source for a fair share of the room. What one leaves, others get in another round.

        After an error, what was taken is to be delivered again at once.
        """
        due = due or source.due(lines)
        # Redis may show no due entry of these: those of rows that got no slot are checked again a second later.
        if more := self.ledger.without_slots.intersection(lines.declared()):
            due = dict.fromkeys((*due, *more))
        if due:
            self._use_database()
        may_run = lines.may_run(by_last_answer=not due)
        deliveries: dict[int, int] = {}
        slots: dict[int, Slot] = {}
        labels: dict[int, str] = {}
        taken: Counter[str] = Counter()
        try:
            for policy in dict.fromkeys(may_run[line] for line in due if line in may_run and may_run[line].rate):
                granted = self.ledger.take_in_slots(policy, lines, left - len(deliveries))
                if granted is not None:
                    deliveries |= granted.claimed.claims
                    slots |= granted.slots
                    for id, count in self._entries_of(policy, granted, source).items():
                        # Of two counts the higher one decides whether a timeout is a poison message.
                        deliveries[id] = max(count, deliveries.get(id, 0))
            for _ in range(MAX_ROUNDS):
                limits = lines.limits(due, may_run, taken, left - len(deliveries))
                if not limits:
                    break
                asked = source.take(limits)
                for line, found in asked.items():
                    deliveries |= found
                    labels |= dict.fromkeys(found, may_run[line].label)
                    taken[may_run[line].label] += len(found)
                due = [line for line in due if line not in limits or len(asked[line]) >= limits[line]]
        except Exception:
            self.resolve((), dict.fromkeys(deliveries, self._skew.now()))
            raise
        waiting = {line for line in due if line in may_run and not may_run[line].rate}
        wait = source.seconds_left(lines.may_run(by_last_answer=True), waiting)
        return Batch(deliveries, min(wait, lines.seconds_left), bool(waiting), slots, labels)

    def _use_database(self) -> None:
        """Renew an idle connection: a firewall may have forgotten it, and a statement on it would wait for minutes."""
        check_connections(idle_seconds=time.monotonic() - self._database_used_at)
        self._database_used_at = time.monotonic()

    def _entries_of(self, policy: TimeoutPolicy[Any], granted: Granted, source: object) -> Mapping[int, int]:
        """Lease as many entries of a policy with a rate as were claimed, most likely theirs, to have them removed.

        If none could be claimed although its line has been due for long, some may be outdated.
        """
        if source is not self.redis:
            return {}
        claimed = len(granted.slots)
        if not claimed and not granted.has_more and self.redis.overdue_seconds(policy.labels) > POLL_SECONDS:
            claimed = MAX_OUTDATED
        found = self.redis.take(dict.fromkeys(policy.labels, claimed)) if claimed else {}
        return {id: count for entries in found.values() for id, count in entries.items()}

    def resolve(self, done: Collection[int], again: Mapping[int, datetime]) -> None:
        """Note results in both sources, because one timeout may have come from both."""
        self.ledger.resolve(done, again)
        self.redis.resolve(done, again)
        for line in [line for line, id in self._unseen.items() if id in done]:
            id = self._unseen.pop(line)
            if firing_state.is_time_to_log(("silent", line)):
                words = "Redis hides due timeouts of %s, so they are read from the database: %d had waited half a lease"
                logger.warning(words, line, id, extra={"event": "redis_silent", "policy": line, "timeout_id": id})

    def flush(self) -> None:
        """Send what `resolve` has noted. While Redis is unavailable its part waits, as long as it is of use."""
        self._try(self.redis.flush)
        self.ledger.flush()

    def extend(self) -> None:
        """Extend all leases and claims that are not resolved to one `LEASE` from now."""
        self._try(self.redis.extend)
        self.ledger.extend()

    def _try(self, call: Callable[[], None]) -> None:
        if self._health.is_up:
            try:
                call()
            except EngineError as error:
                self._lost(error)

    def _lost(self, error: EngineError) -> None:
        self._must_poll = True
        self._health.lost(error)
