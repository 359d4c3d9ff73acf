"""Without Redis: read due rows from the ledger once a second, and claim each for one worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from django_delayq.conf import get_settings
from django_delayq.firing.unknown import unknown
from django_delayq.ledger import claiming
from django_delayq.ledger.paging import chunks
from django_delayq.policies import registry
from django_delayq.recovery.clock_skew import ClockSkew
from django_delayq.worker.sources import Batch, Source

if TYPE_CHECKING:
    from django_delayq.policies import TimeoutPolicy

POLL_SECONDS: Final = 1.0


class LedgerSource(Source):
    """A source of due timeouts that needs only the ledger. Raises the database's errors."""

    def __init__(self, using: str, queues: Sequence[str] | None, skew: ClockSkew) -> None:
        self._using = using
        self._queues = queues
        self._skew = skew
        self._lock = threading.Lock()
        self._poll_at = 0.0
        self._claimed: dict[int, datetime] = {}
        """Until when each id is claimed."""
        self._again: dict[datetime, dict[int, datetime]] = {}
        """What to release, by the expiry of its claim."""

    def take(self, room: int) -> Batch:
        """Claim at most `room` due rows, once a second, or at once while more are due."""
        wait = self._poll_at - time.monotonic()
        return Batch(wait_seconds=wait) if wait > 0 else self.take_now(room)

    def take_now(self, room: int) -> Batch:
        """Do the same without waiting for the next second."""
        self._poll_at = time.monotonic() + POLL_SECONDS
        # Most polls find nothing. They must not begin a writing transaction, because SQLite allows only one at a time.
        without = [*unknown.labels(), *(label for policy in registry if policy.rate for label in policy.labels)]
        if not claiming.is_any_claimable(self._using, self._queues, without):
            return Batch(wait_seconds=POLL_SECONDS)
        claims = self._note(claiming.claim(self._using, self._queues, room, get_settings().lease, without))
        if len(claims) < room:
            return Batch(claims, POLL_SECONDS)
        self._poll_at = 0.0
        return Batch(claims, is_part=True)

    def labels_with_due(self, labels: Sequence[str]) -> list[str]:
        """Return those of `labels` whose policies have rows that are due and not claimed."""
        return claiming.labels_with_claimable(self._using, self._queues, labels)

    def take_of(self, limits: Mapping[str, int]) -> Mapping[int, int]:
        """Claim at most so many due rows of each label; return their deliveries."""
        return self._note(claiming.claim_each(self._using, self._queues, limits, get_settings().lease))

    def take_in_slots(self, policy: TimeoutPolicy[Any], limit: int, preparation: float) -> claiming.Granted | None:
        """Claim due rows of a policy with a rate: see `claiming.claim_in_slots`."""
        lease = get_settings().lease
        granted = claiming.claim_in_slots(
            policy, self._using, self._queues, limit=limit, seconds=lease, preparation=preparation
        )
        if granted is not None:
            self._note(granted.claimed)
        return granted

    def _note(self, claimed: claiming.Claimed) -> Mapping[int, int]:
        self._skew.note_database(claimed.now)
        with self._lock:
            self._claimed.update(dict.fromkeys(claimed.claims, claimed.until))
        return claimed.claims

    def resolve(self, done: Collection[int], again: Mapping[int, datetime]) -> None:
        with self._lock:
            for id in done:
                self._claimed.pop(id, None)
            for id, due_at in again.items():
                until = self._claimed.pop(id, None)
                if until is not None:
                    self._again.setdefault(until, {})[id] = due_at
                    wait = max(0.0, (due_at - self._skew.now()).total_seconds())
                    self._poll_at = min(self._poll_at, time.monotonic() + wait)

    def release(self, ids: Iterable[int]) -> None:
        """Note that `ids`, which the caller has claimed and lost in an error, are to be delivered again at once."""
        self.resolve((), dict.fromkeys(ids, self._skew.now()))

    def flush(self) -> None:
        """Release claims. Rows that are locked by others stay noted for the next call."""
        for until, again in list(self._again.items()):
            locked = claiming.release(again, until, self._using)
            with self._lock:
                left = {id: due_at for id, due_at in self._again.pop(until).items() if id in locked}
                if left:
                    self._again[until] = left

    def extend(self) -> None:
        with self._lock:  # held throughout: resolve() must not release a claim that has just been extended
            by_claim: dict[datetime, list[int]] = {}
            for id, until in self._claimed.items():
                by_claim.setdefault(until, []).append(id)
            for until, ids in by_claim.items():
                for chunk in chunks(ids, claiming.CHUNK):  # noted one by one: an error does not undo those before it
                    longer, kept = claiming.extend(chunk, until, get_settings().lease, self._using)
                    self._claimed.update(dict.fromkeys(kept, longer))
