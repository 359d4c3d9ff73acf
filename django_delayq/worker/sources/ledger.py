"""Without Redis: due rows are read from the ledger, once a second, each claimed for a while by one worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from django_delayq.conf import get_settings
from django_delayq.firing.unknown import unknown
from django_delayq.ledger import claiming
from django_delayq.recovery.clocks import Clocks

POLL_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Taken:
    """What a source of due timeouts gave: how often each id was handed out, and how long to wait before asking again.

    `is_part`: more is due than there was room for.
    """

    deliveries: Mapping[int, int] = field(default_factory=dict)
    wait_seconds: float = 0.0
    is_part: bool = False


class Poll:
    """A source of due timeouts that needs nothing but the ledger.

    `settle` only takes note; `flush` writes. Threads share an instance. Every method that touches the database raises
    its errors, and may be repeated then.
    """

    def __init__(self, using: str, queues: Sequence[str] | None, clocks: Clocks) -> None:
        self.queues = queues
        self._using = using
        self._clocks = clocks
        self._lock = threading.Lock()
        self._next_look = 0.0
        self._claimed: dict[int, datetime] = {}
        self._again: dict[datetime, dict[int, datetime]] = {}

    def take(self, room: int) -> Taken:
        """At most `room` due rows are claimed; at most one look a second, but for as long as there is more."""
        wait = self._next_look - time.monotonic()
        if wait > 0:
            return Taken(wait_seconds=wait)
        return self.look(room)

    def look(self, room: int) -> Taken:
        """As `take`, now."""
        self._next_look = time.monotonic() + POLL_SECONDS
        # The look that finds nothing, and most do, must not begin a writing transaction: on SQLite all stand in line.
        without = unknown.labels()
        if not claiming.is_any_claimable(self._using, self.queues, without):
            return Taken(wait_seconds=POLL_SECONDS)
        claims = self._note(claiming.claim(self._using, self.queues, room, get_settings().lease, without))
        if len(claims) >= room:
            self._next_look = 0.0
            return Taken(claims, is_part=True)
        return Taken(claims, POLL_SECONDS)

    def labels_with_more(self, labels: Sequence[str]) -> list[str]:
        """Those of `labels` whose policies have rows that are due and not claimed."""
        return claiming.labels_with_claimable(self._using, self.queues, labels)

    def look_for(self, limits: Mapping[str, int]) -> Mapping[int, int]:
        """Of each label at most so many due rows are claimed, whatever else is due."""
        return self._note(claiming.claim_each(self._using, self.queues, limits, get_settings().lease))

    def _note(self, claimed: claiming.Claimed) -> Mapping[int, int]:
        self._clocks.saw_database(claimed.now)
        with self._lock:
            self._claimed.update(dict.fromkeys(claimed.claims, claimed.until))
        return claimed.claims

    def settle(self, done: Collection[int], again: Mapping[int, datetime]) -> None:
        """Whatever of these is claimed here need not be any more; `again` comes back at its moments."""
        with self._lock:
            for id in done:
                self._claimed.pop(id, None)
            for id, moment in again.items():
                until = self._claimed.pop(id, None)
                if until is not None:
                    self._again.setdefault(until, {})[id] = moment
                    wait = max(0.0, (moment - self._clocks.now()).total_seconds())
                    self._next_look = min(self._next_look, time.monotonic() + wait)

    def flush(self) -> None:
        """What was settled is written; what others hold just now, the next time."""
        for until, again in list(self._again.items()):
            held = claiming.give_back(again, until, self._using)
            with self._lock:
                left = {id: moment for id, moment in self._again.pop(until).items() if id in held}
                if left:
                    self._again[until] = left

    def extend(self) -> None:
        """Everything claimed here and not settled stays so for one `LEASE` from now."""
        with self._lock:  # all along: who settles meanwhile would give back a claim that has just been renewed
            by_claim: dict[datetime, list[int]] = {}
            for id, until in self._claimed.items():
                by_claim.setdefault(until, []).append(id)
            for until, ids in by_claim.items():
                longer, kept = claiming.keep(ids, until, get_settings().lease, self._using)
                self._claimed.update(dict.fromkeys(kept, longer))
