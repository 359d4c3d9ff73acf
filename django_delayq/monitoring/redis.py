"""What Redis holds, and whether that is what the ledger says."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final

from django_delayq.conf import ConfigError, get_settings
from django_delayq.exceptions import EngineError
from django_delayq.ledger.controls import stop_cache
from django_delayq.models import Timeout
from django_delayq.policies import get_policies
from django_delayq.redis_clients import get_engine

if TYPE_CHECKING:
    from django_delayq.engine import Engine

COMPARED: Final = 100
"""So many rows, the next that fall due, are looked for in Redis."""
PEEKED: Final = 500


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """The entries of one queue, all its shards together."""

    name: str
    entries: int
    due: int
    leased: int


@dataclass(frozen=True, slots=True)
class RedisStatus:
    """What Redis holds.

    Attributes:
        is_configured: False: workers read the ledger, and the rest of this says nothing.
        is_reachable: whether it answered this process within a quarter of a second.
        error: why not.
        queues: what is in it.
        compared: how many rows that fall due next were looked for.
        missing: those of them that it should know and does not. A sweep brings them in; so it is normal right after
            Redis was emptied, and wrong if it lasts.
    """

    is_configured: bool = False
    is_reachable: bool = False
    error: str = ""
    queues: tuple[QueueStatus, ...] = ()
    compared: int = 0
    missing: int = 0

    @property
    def is_in_step(self) -> bool:
        """Whether it knows what falls due next."""
        return self.is_reachable and not self.missing


def redis_status(using: str, now: datetime) -> RedisStatus:
    """What Redis holds at the database's moment `now`. Raises the database's errors, none of Redis."""
    try:
        engine = get_engine()
        if engine is None:
            return RedisStatus()
        rows = _next_rows(using, now)
        names = sorted({"default", *(policy.queue for policy in get_policies()), *(queue for _, queue in rows)})
        queues = tuple(_queue_status(engine, name) for name in names)
        missing = _missing(engine, rows)
    except (EngineError, ConfigError) as error:
        return RedisStatus(is_configured=True, error=str(error))
    # Fired, moved or cancelled since it was read, it was missed for a good reason.
    still = Timeout.objects.using(using).pending().filter(pk__in=missing, run_at__lte=_known_until(now))
    return RedisStatus(True, True, "", queues, len(rows), still.count() if missing else 0)


def _queue_status(engine: Engine, name: str) -> QueueStatus:
    shards = [engine.queue(name, shard).stats() for shard in range(engine.shards)]
    return QueueStatus(
        name, sum(each.total for each in shards), sum(each.due for each in shards), sum(each.leased for each in shards)
    )


def _next_rows(using: str, now: datetime) -> list[tuple[int, str]]:
    """Id and queue of the next rows that fall due, or just have, of policies that somebody fires."""
    labels = {label for policy in get_policies() for label in policy.labels} - set(stop_cache.read(using).all_labels())
    rows = Timeout.objects.using(using).pending().of_labels(labels).filter(run_at__lte=_known_until(now))
    return list(rows.order_by("run_at", "id").values_list("id", "queue")[:COMPARED])


def _known_until(now: datetime) -> datetime:
    """What is due by then has been swept into Redis, if any worker sweeps."""
    return now + min(get_settings().sweep_interval, get_settings().horizon)


def _missing(engine: Engine, rows: Collection[tuple[int, str]]) -> list[int]:
    """Those of `rows` that are not among the first entries of their queue. Where there are too many to see: none."""
    by_place: dict[tuple[str, int], list[int]] = {}
    for row_id, queue in rows:
        by_place.setdefault((queue, engine.shard_of(row_id)), []).append(row_id)
    missing = []
    for (name, shard), ids in by_place.items():
        seen = {entry for entry, _ in engine.queue(name, shard).peek(PEEKED)}
        if len(seen) < PEEKED:
            missing += [row_id for row_id in ids if row_id not in seen]
    return missing
