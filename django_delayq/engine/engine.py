"""All queues and shards behind one client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from weakref import WeakSet

from django_delayq.engine.calls import Caller
from django_delayq.engine.faults import Client, translated
from django_delayq.engine.keys import queue_keys, shard_of
from django_delayq.engine.queue import DelayQueue
from django_delayq.engine.records import Change
from django_delayq.engine.scripts import Call
from django_delayq.engine.wakeup import Wakeup
from django_delayq.exceptions import EngineError


class Engine:
    """Every queue of one prefix: finds an id's shard, and changes many queues in one round trip.

    The number of shards is fixed for the life of the data: with another one, entries are looked for elsewhere until
    the sweep has added them again. Threads may share an instance.
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
        """The queue's shard; always the same object. Raises ValueError unless 0 <= shard < shards."""
        key = (name, shard)
        found = self._queues.get(key)
        if found is None:
            made = DelayQueue(
                self.client, prefix=self.prefix, queue=name, shard=shard, shards=self.shards, caller=self._caller
            )
            found = self._queues.setdefault(key, made)
        return found

    def shard_of(self, id: int) -> int:
        """The shard that holds this id, in every queue."""
        return shard_of(id, self.shards)

    def apply(self, changes: Sequence[Change]) -> None:
        """All changes are made, in their order for each id, in one round trip over all queues and shards.

        Not atomic together: after an error some may be made and some not. May be repeated safely. Raises
        EngineUnavailable or EngineError after everything else has been tried, ValueError before anything is sent.
        """
        by_queue: dict[tuple[str, int], list[Change]] = {}
        for change in changes:
            by_queue.setdefault((change.queue, self.shard_of(change.id)), []).append(change)
        calls: list[Call] = []
        for (name, shard), wishes in by_queue.items():
            calls += _calls(self.queue(name, shard), wishes)
        self._caller.send(calls)

    def wakeup(self, queues: Sequence[str]) -> Wakeup:
        """A wakeup, not yet started, for every shard of these queues."""
        channels = [
            queue_keys(self.prefix, name, shard, self.shards).wake for name in queues for shard in range(self.shards)
        ]
        wakeup = Wakeup(self.client, channels)
        self._wakeups.add(wakeup)
        return wakeup

    def ping(self) -> None:
        """Returns if Redis answers; raises EngineUnavailable or EngineError if not."""
        with translated(self.client):
            self.client.ping()

    def close(self) -> None:
        """Every wakeup is stopped and the client's connections are closed. Never raises for a dead Redis.

        A later call on the engine opens connections again.
        """
        for wakeup in list(self._wakeups):
            wakeup.close()
        with suppress(EngineError), translated(self.client):  # what is broken already needs no closing
            self.client.close()


def _calls(queue: DelayQueue, changes: Iterable[Change]) -> list[Call]:
    """The commands for one queue, neighbours of one kind in one command."""
    calls: list[Call] = []
    for (removal, earlier_only), run in groupby(changes, key=lambda c: (c.due_ms is None, c.earlier_only)):
        if removal:
            calls += queue.remove_calls(change.id for change in run)
            continue
        pairs = [(change.id, change.due_ms) for change in run if change.due_ms is not None]
        calls += queue.ensure_calls(pairs) if earlier_only else queue.reschedule_calls(pairs)
    return calls
