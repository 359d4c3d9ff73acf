"""Fair shares: no policy waits behind the backlog of another one.

Redis delivers by due time, and so does a poll of the ledger. Behind 100,000 timeouts that fall due at once, a timeout
that is due a second later would come last. So a worker with a backlog asks the ledger, by an index, which policies are
underserved: they have due timeouts, but few of them in this worker. It claims some of these, the longest due first.
Redis is not informed: an entry that is still there is found settled when its turn comes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Final

from django_delayq.policies import registry
from django_delayq.worker.sources.ledger import LedgerSource

FIRST_SECONDS: Final = 0.1
LONGEST_SECONDS: Final = 0.25
"""The time from the start of a backlog to the first check, and between two checks: it grows while they find nothing."""
MIN_SHARE: Final = 25
"""How many timeouts of each policy may be in flight, and one check may claim, however little room there is."""
MAX_LABELS: Final = 50
"""How many labels one query asks for. Where there are more, they take turns."""


class Fairness:
    """Claims due rows of underserved policies, in the queues `only` (None: in all). For the worker's own thread."""

    def __init__(self, ledger: LedgerSource, only: Sequence[str] | None) -> None:
        self._ledger = ledger
        self._only = only
        self._check_at = math.inf
        self._pause = FIRST_SECONDS
        self._turn = 0

    def note_backlog(self, has_backlog: bool) -> None:
        """Note whether the worker had to leave due timeouts behind."""
        if not has_backlog:
            self._check_at, self._pause = math.inf, FIRST_SECONDS
        elif self._check_at == math.inf:
            self._check_at = time.monotonic() + self._pause

    @property
    def seconds_left(self) -> float:
        """Return how long it is until the next check. Infinite without a backlog."""
        return max(0.0, self._check_at - time.monotonic())

    def take(self, room: int, in_flight: Mapping[str, int], least: int = MIN_SHARE) -> Mapping[int, int]:
        """Claim about `room` due rows of policies that have less than half of a fair share; return their deliveries.

        Up to `least` are claimed although there is no room. `in_flight` is how many timeouts the worker has, by policy.
        Raises the database's errors.
        """
        budget = max(room, min(MIN_SHARE, least))
        if self.seconds_left or budget <= 0:
            return {}
        total = room + sum(in_flight.values())
        share = max(MIN_SHARE, total // (len(in_flight) + 1))
        underserved = [label for policy, label in self._labels() if 2 * in_flight.get(policy, 0) < share]
        claims: Mapping[int, int] = {}
        if found := self._ledger.labels_with_due(underserved)[:budget]:
            share = max(MIN_SHARE, total // len({*in_flight, *found}))
            claims = self._ledger.take_of(dict.fromkeys(found, min(share, max(1, budget // len(found)))))
        self._pause = FIRST_SECONDS if claims else min(2 * self._pause, LONGEST_SECONDS)
        self._check_at = time.monotonic() + self._pause
        return claims

    def _labels(self) -> Sequence[tuple[str, str]]:
        """Return pairs of a served policy and one of its labels, in turns at most as many as one query may ask for."""
        served = [policy for policy in registry if self._only is None or policy.queue in self._only]
        pairs = [(policy.label, label) for policy in served for label in policy.labels]
        self._turn = (self._turn + MAX_LABELS) % max(1, len(pairs)) if len(pairs) > MAX_LABELS else 0
        return (pairs[self._turn :] + pairs[: self._turn])[:MAX_LABELS]
