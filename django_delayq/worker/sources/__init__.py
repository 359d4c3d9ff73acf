"""Where due timeouts come from: Redis while it works, the ledger while it does not.

`redis.Sources` is both as one. `redis.RedisSource` leases entries, `ledger.LedgerSource` claims rows, and
`redis.Fairness` claims rows of policies that would wait behind the backlog of another policy. `ledger.PacedSource`
claims rows of policies with a rate.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from django_delayq.ledger.claiming import Slot


@dataclass(frozen=True, slots=True)
class Batch:
    """Timeouts that a source has leased or claimed for this worker.

    `deliveries`: how often each id was delivered. `wait_seconds`: how long to wait before the next `take`.
    `is_part`: more timeouts are due than there was room for. `slots`: when those of policies with a rate may begin.
    """

    deliveries: Mapping[int, int] = field(default_factory=dict)
    wait_seconds: float = 0.0
    is_part: bool = False
    slots: Mapping[int, Slot] = field(default_factory=dict)


class Source(Protocol):
    """A source of due timeouts. Thread-safe. A method that raises may be called again."""

    def take(self, room: int) -> Batch:
        """Lease or claim about `room` due timeouts for one `LEASE`."""

    def resolve(self, done: Collection[int], again: Mapping[int, datetime]) -> None:
        """Note that `done` are settled, and when each of `again` is to be delivered again. Other ids are ignored.

        Nothing is sent before `flush`, so that the results of many works are sent together.
        """

    def flush(self) -> None:
        """Send what `resolve` has noted: acknowledge and release entries, or release claims."""

    def extend(self) -> None:
        """Extend all leases or claims that are not resolved to one `LEASE` from now."""
