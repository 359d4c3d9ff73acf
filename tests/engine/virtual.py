"""A queue whose server clock is set by the test: the scripts' TIME and PUBLISH are replaced when they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django_delayq.engine.engine import Engine
from django_delayq.engine.scripts import Caller, read_texts
from tests.engine.lines import OneLine, one_line

START_MS = 1_700_000_000_000


def virtual_texts(texts: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the commands with the clock and the messages of the server in two keys, in the slot of the queue."""
    changed = {}
    for name, text in (texts or read_texts()).items():
        timed = text.replace("redis.call('TIME')", f"redis.call('HMGET', {_lua_key('clock')}, 's', 'us')")
        changed[name] = timed.replace("redis.pcall('PUBLISH', channel,", f"redis.pcall('RPUSH', {_lua_key('wakes')},")
        assert "'TIME'" not in changed[name]
        assert "PUBLISH" not in changed[name]
    return changed


def _lua_key(kind: str) -> str:
    return f"'test:{kind}:' .. string.match(KEYS[1], '{{.+}}')"


class VirtualQueue:
    """One line with a virtual clock, also on a cluster."""

    def __init__(self, client: Any, texts: Mapping[str, str] | None = None, queue: str = "default") -> None:
        self.client = client
        self._name, self._texts = queue, virtual_texts(texts)
        self.queue = self.through(client)
        self.entries = self.queue.entries
        self._tag = self.entries[self.entries.index("{") : self.entries.index("}") + 1]
        self.set_clock(START_MS)

    def through(self, client: Any) -> OneLine:
        """Return the same queue and clock with another client."""
        line = one_line(Engine(client, caller=Caller(client, self._texts)), self._name)
        line.is_alone = True
        return line

    def set_clock(self, ms: int) -> None:
        """Set the clock to `ms`, and to the most microseconds within that millisecond."""
        self.now = ms
        self.client.hset(f"test:clock:{self._tag}", mapping={"s": ms // 1000, "us": ms % 1000 * 1000 + 999})

    def advance(self, ms: int) -> int:
        """Advance the clock by `ms` and return the time."""
        self.set_clock(self.now + ms)
        return self.now

    def wakes(self) -> list[int]:
        """Return the messages since the last call."""
        key = f"test:wakes:{self._tag}"
        said = [int(ms) for ms in self.client.lrange(key, 0, -1)]
        self.client.delete(key)
        return said

    def snapshot(self) -> tuple[dict[bytes, float], Any, int | None]:
        """All that the server holds for the line."""
        return self.members(), self.client.get(self.queue.keys.counter), self.queue.head()

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
