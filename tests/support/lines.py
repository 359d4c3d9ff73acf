"""What tests do to the entries of a queue without regard to their lines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django_delayq.engine.engine import DelayQueue
from django_delayq.engine.records import unquoted


def lines_of(queue: DelayQueue) -> list[str]:
    """Return the lines that have a head."""
    client: Any = queue._caller.client
    return [
        unquoted(name.decode() if isinstance(name, bytes) else name) for name in client.zrange(queue.keys.heads, 0, -1)
    ]


def remove_ids(queue: DelayQueue, ids: Iterable[int]) -> int:
    """Remove these ids from every line."""
    ids = list(ids)
    return sum(queue.remove(line, ids) for line in lines_of(queue))


def lose_entries(queue: DelayQueue) -> None:
    """Delete the heads and all lines, as a Redis that forgets."""
    client: Any = queue._caller.client
    client.delete(queue.keys.heads, *map(queue.keys.line, lines_of(queue)))
