"""Threads that use a queue while its servers change places, and then give account of every id."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from django_delayq.engine.engine import Engine
from django_delayq.engine.records import Change
from django_delayq.exceptions import EngineError, EngineUnavailable
from tests.engine.lines import LINE
from tests.support.waiting import wait_until

PAUSE = 0.002
LEASE_MS = 2000


@dataclass
class Load:
    """One producer adds ids, one worker removes them; both retry while Redis is not available.

    `refused` collects all other errors: there must be none.
    """

    engine: Engine
    wanted: set[int] = field(default_factory=set)
    drained: Counter[int] = field(default_factory=Counter)
    outages: int = 0
    refused: list[EngineError] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def produce(self) -> None:
        id = 0
        while not self._stop.is_set():
            id += 1
            self._put([id])
            self.wanted.add(id)

    def work(self) -> None:
        shard = 0
        while not self._stop.is_set():
            shard = (shard + 1) % self.engine.shards
            self._once(shard)

    def drain(self) -> None:
        """Remove the remaining ids, as a worker does after an outage; leases expire."""
        deadline = time.monotonic() + 60
        while (missing := self.wanted - self.drained.keys()) and time.monotonic() < deadline:
            self._put(missing)  # as a sweep would: a master may have died before it replicated them
            for shard in range(self.engine.shards):
                self._once(shard)
        assert not missing

    def _once(self, shard: int) -> None:
        queue = self.engine.queue("q", shard)
        with self._noted():
            reserved = queue.reserve({LINE: 50}, LEASE_MS)
            if reserved.lease is not None:
                ids = [entry.id for entry in reserved.entries]
                self.drained.update(ids)
                queue.acknowledge(reserved.lease, ids)
        time.sleep(PAUSE)

    def _put(self, ids: Iterable[int]) -> None:
        changes = [Change("q", LINE, id, 0, earlier_only=True) for id in ids]
        is_done = False
        while not is_done and not (self._stop.is_set() and threading.current_thread() is not threading.main_thread()):
            with self._noted():
                self.engine.apply(changes)
                is_done = True
            time.sleep(PAUSE)

    def await_progress(self) -> None:
        """Wait until ids are added and removed on every shard without a sweep."""
        before = set(self.wanted)
        shards = set(range(self.engine.shards))
        wait_until(lambda: {self.engine.shard_of(id) for id in (self.drained.keys() - before)} == shards)

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except EngineUnavailable:
            self.outages += 1
        except EngineError as error:
            self.refused.append(error)


@contextlib.contextmanager
def loaded(engine: Engine) -> Iterator[Load]:
    """Run the load inside the block; at the end, drain the queues and check all ids."""
    load = Load(engine)
    threads = [threading.Thread(target=work, daemon=True) for work in (load.produce, load.work)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        load._stop.set()
        for thread in threads:
            thread.join(60)
    load.drain()
    assert load.refused == [], [repr(error.__cause__) for error in load.refused]
