"""What Redis holds, compared with the ledger."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final

from django_delayq.conf import ConfigError, get_settings
from django_delayq.exceptions import EngineError
from django_delayq.ledger.controls import stop_cache
from django_delayq.models import Timeout
from django_delayq.policies import declared_queues, get_policies
from django_delayq.redis_clients import get_engine

if TYPE_CHECKING:
    from django_delayq.engine import Engine

COMPARED: Final = 100
"""How many of the rows that are due next are looked up in Redis."""
PEEKED: Final = 500


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """The entries of one queue, over all its shards."""

    name: str
    entries: int
    due: int
    leased: int


@dataclass(frozen=True, slots=True)
class RedisStatus:
    """What Redis holds.

    Attributes:
        is_configured: False: workers poll the ledger, and the other attributes have no meaning.
        is_reachable: whether it answered this process within a quarter of a second.
        error: why not.
        queues: the entries of each queue.
        compared: how many of the rows that are due next were looked up in Redis.
        missing: how many of them Redis should have, but has not. A sweep adds them, so missing rows are normal
            right after Redis lost its data, and an error if they persist.
    """

    is_configured: bool = False
    is_reachable: bool = False
    error: str = ""
    queues: tuple[QueueStatus, ...] = ()
    compared: int = 0
    missing: int = 0

    @property
    def is_in_step(self) -> bool:
        """Return whether Redis has the timeouts that are due next."""
        return self.is_reachable and not self.missing


def redis_status(using: str, now: datetime) -> RedisStatus:
    """Compare Redis with the ledger at the database's time `now`. Raises the database's errors, but none of Redis."""
    try:
        engine = get_engine()
        if engine is None:
            return RedisStatus()
        swept_until = now + min(get_settings().sweep_interval, get_settings().horizon)
        fired = {label for policy in get_policies() for label in policy.labels} - set(
            stop_cache.read(using).all_labels()
        )
        pending = Timeout.objects.using(using).pending().filter(run_at__lte=swept_until)
        rows = list(pending.of_labels(fired).order_by("run_at", "id").values_list("id", "queue")[:COMPARED])
        names = sorted({*declared_queues(), *(queue for _, queue in rows)})
        queues = tuple(_queue_status(engine, name) for name in names)
        missing = _missing(engine, rows)
    except (EngineError, ConfigError) as error:
        return RedisStatus(is_configured=True, error=str(error))
    # Rows that were fired, moved or cancelled in the meantime are not missing.
    count = pending.filter(pk__in=missing).count() if missing else 0
    return RedisStatus(True, True, "", queues, len(rows), count)


def _queue_status(engine: Engine, name: str) -> QueueStatus:
    shards = [engine.queue(name, shard).stats() for shard in range(engine.shards)]
    return QueueStatus(
        name, sum(each.total for each in shards), sum(each.due for each in shards), sum(each.leased for each in shards)
    )


def _missing(engine: Engine, rows: Iterable[tuple[int, str]]) -> list[int]:
    """Return the ids that are not among the first entries of their queue; none of a queue with too many entries."""
    by_place: dict[tuple[str, int], list[int]] = {}
    for row_id, queue in rows:
        by_place.setdefault((queue, engine.shard_of(row_id)), []).append(row_id)
    missing = []
    for (name, shard), ids in by_place.items():
        seen = {entry for entry, _ in engine.queue(name, shard).peek(PEEKED)}
        if len(seen) < PEEKED:
            missing += [row_id for row_id in ids if row_id not in seen]
    return missing
