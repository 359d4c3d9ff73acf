"""A queue whose server clock is set by the test: the scripts' TIME and PUBLISH are replaced when they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis

from django_delayq.engine import DelayQueue
from django_delayq.engine.calls import Caller
from django_delayq.engine.scripts import Scripts, read_texts

CLOCK = "test:clock"
WAKES = "test:wakes"
START_MS = 1_700_000_000_000


def virtual_texts(texts: Mapping[str, str] | None = None) -> dict[str, str]:
    """The commands' texts with the server's clock and its messages kept in two keys."""
    changed = {}
    for name, text in (texts or read_texts()).items():
        timed = text.replace("redis.call('TIME')", f"redis.call('HMGET', '{CLOCK}', 's', 'us')")
        changed[name] = timed.replace("redis.pcall('PUBLISH', channel,", f"redis.pcall('RPUSH', '{WAKES}',")
        assert "'TIME'" not in changed[name]
        assert "PUBLISH" not in changed[name]
    return changed


class VirtualQueue:
    """One `DelayQueue` on a clock that only moves when told to."""

    def __init__(self, client: redis.Redis, texts: Mapping[str, str] | None = None, queue: str = "default") -> None:
        self.client = client
        self.queue = DelayQueue(client, queue=queue, caller=Caller(client, Scripts(virtual_texts(texts))))
        self.entries = self.queue.keys.entries
        self.set_clock(START_MS)

    def set_clock(self, ms: int) -> None:
        """It is now `ms`, and as many microseconds as still are that millisecond."""
        self.now = ms
        self.client.hset(CLOCK, mapping={"s": ms // 1000, "us": ms % 1000 * 1000 + 999})

    def advance(self, ms: int) -> int:
        """It is `ms` later. Returns the time."""
        self.set_clock(self.now + ms)
        return self.now

    def wakes(self) -> list[int]:
        """What was published since the last look."""
        with self.client.pipeline() as pipeline:
            pipeline.lrange(WAKES, 0, -1)
            pipeline.delete(WAKES)
            return [int(ms) for ms in pipeline.execute()[0]]

    def waiting(self) -> dict[int, int]:
        """Due times by id, of what is under no lease."""
        return {id: score >> 10 for id, score in self.scores().items() if score < 2**52}

    def scores(self) -> dict[int, int]:
        """Raw scores by id."""
        return {int(id): int(score) for id, score in self.members().items()}

    def members(self) -> dict[bytes, float]:
        """Whatever is in the sorted set, with its raw score."""
        found: Any = self.client.zrange(self.entries, 0, -1, withscores=True)
        return dict(found)
