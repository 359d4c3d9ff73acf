"""All queues and shards behind one client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from weakref import WeakSet

from django_delayq.engine.faults import Client, translated
from django_delayq.engine.keys import queue_keys, shard_of
from django_delayq.engine.queue import DelayQueue
from django_delayq.engine.records import Change
from django_delayq.engine.scripts import Call, Caller
from django_delayq.engine.wakeup import Wakeup
from django_delayq.exceptions import EngineError


class Engine:
    """Every queue of one prefix: finds the shard of an id, and changes many queues in one round trip. Thread-safe.

    The number of shards is fixed as long as the data exists: with another number, entries are searched in other shards
    until the sweep has added them again.
    """

    def __init__(self, client: Client, *, prefix: str = "delayq", shards: int = 1) -> None:
        if shards < 1:
            raise ValueError(f"an engine has 1 shard or more, not {shards}")
        self.client = client
        self.prefix = prefix
        self.shards = shards
        self._caller = Caller(client)
        self._queues: dict[tuple[str, int], DelayQueue] = {}
        self._wakeups: WeakSet[Wakeup] = WeakSet()

    def queue(self, name: str, shard: int) -> DelayQueue:
        """Return a shard of a queue, always the same object. Raises ValueError unless 0 <= shard < shards."""
        key = (name, shard)
        found = self._queues.get(key)
        if found is None:
            made = DelayQueue(
                self.client, prefix=self.prefix, queue=name, shard=shard, shards=self.shards, caller=self._caller
            )
            found = self._queues.setdefault(key, made)
        return found

    def shard_of(self, id: int) -> int:
        """Return the shard that holds this id, in every queue."""
        return shard_of(id, self.shards)

    def apply(self, changes: Sequence[Change]) -> None:
        """Make all changes, in their order for each id, in one round trip over all queues and shards.

        They are not atomic together, and may be repeated. Raises ValueError before anything is sent, and
        EngineUnavailable or EngineError after all other changes have been tried.
        """
        by_queue: dict[tuple[str, int], list[Change]] = {}
        for change in changes:
            by_queue.setdefault((change.queue, self.shard_of(change.id)), []).append(change)
        calls: list[Call] = []
        for (name, shard), wishes in by_queue.items():
            calls += _calls(self.queue(name, shard), wishes)
        self._caller.send(calls)

    def wakeup(self, queues: Sequence[str]) -> Wakeup:
        """Return a wakeup, not yet started, for every shard of these queues."""
        channels = [
            queue_keys(self.prefix, name, shard, self.shards).wake for name in queues for shard in range(self.shards)
        ]
        wakeup = Wakeup(self.client, channels)
        self._wakeups.add(wakeup)
        return wakeup

    def ping(self) -> None:
        """Raise EngineUnavailable or EngineError unless Redis answers."""
        with translated(self.client):
            self.client.ping()

    def close(self) -> None:
        """Stop every wakeup and close the connections of the client. Raises nothing if Redis is unavailable.

        A later call opens connections again.
        """
        for wakeup in list(self._wakeups):
            wakeup.close()
        with suppress(EngineError), translated(self.client):  # a broken connection needs no closing
            self.client.close()


def _calls(queue: DelayQueue, changes: Iterable[Change]) -> list[Call]:
    """Return the commands for one queue: adjacent changes of one kind are one command."""
    calls: list[Call] = []
    for (removal, earlier_only), run in groupby(changes, key=lambda c: (c.due_ms is None, c.earlier_only)):
        if removal:
            calls += queue.remove_calls(change.id for change in run)
            continue
        pairs = [(change.id, change.due_ms) for change in run if change.due_ms is not None]
        calls += queue.ensure_calls(pairs) if earlier_only else queue.reschedule_calls(pairs)
    return calls
