"""No policy waits behind another one's crowd: while more is due than can be held, each gets its share.

Redis hands out by due time, and so does a poll of the ledger. Of 100,000 timeouts that fall due at once, whatever is
due a second later would stand at the end. So a worker that is behind asks the ledger, by an index, which policies
have something due although it holds little of them, and claims some of that, the longest due first. Nothing has to be
told to Redis: an entry that is still there is found settled when its turn comes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Final

from django_delayq.policies import registry
from django_delayq.worker.sources.ledger import Poll

FIRST_SECONDS: Final = 0.1
LONGEST_SECONDS: Final = 0.25
"""How long a worker is behind before it looks, and between two looks: ever longer while there is nothing to find."""
LEAST: Final = 25
"""What every policy may have held, and what one look may claim, however little room others leave."""
MOST_LABELS: Final = 50
"""Asked for in one query. Where there are more, they take turns."""


class Shares:
    """Looks into the ledger for policies that get less than their share. For the worker's own thread.

    Args:
        poll: claims the rows.
        only: the queues that this worker serves; None: all of them.
    """

    def __init__(self, poll: Poll, only: Sequence[str] | None) -> None:
        self._poll = poll
        self._only = only
        self._look_at = math.inf
        self._pause = FIRST_SECONDS
        self._turn = 0

    def saw(self, *, is_behind: bool) -> None:
        """Whether the worker had to leave something that is due."""
        if not is_behind:
            self._look_at, self._pause = math.inf, FIRST_SECONDS
        elif self._look_at == math.inf:
            self._look_at = time.monotonic() + self._pause

    @property
    def seconds_left(self) -> float:
        """How long until the next look; infinite while the worker keeps up."""
        return max(0.0, self._look_at - time.monotonic())

    def take(self, room: int, held: Mapping[str, int], least: int = LEAST) -> Mapping[int, int]:
        """Due rows of policies that have less than half their share of what is held, with their claims.

        Raises the database's errors.

        Args:
            room: how much the worker would take.
            held: how much it holds, by policy.
            least: how much may be taken although there is no room.
        """
        budget = max(room, min(LEAST, least))
        if self.seconds_left or budget <= 0:
            return {}
        claims = self._claim(room, held, budget)
        self._pause = FIRST_SECONDS if claims else min(2 * self._pause, LONGEST_SECONDS)
        self._look_at = time.monotonic() + self._pause
        return claims

    def _claim(self, room: int, held: Mapping[str, int], budget: int) -> Mapping[int, int]:
        share = max(LEAST, (room + sum(held.values())) // (len(held) + 1))
        hungry = [label for policy, label in self._labels() if 2 * held.get(policy, 0) < share]
        found = self._poll.labels_with_more(hungry)[:budget]
        if not found:
            return {}
        share = max(LEAST, (room + sum(held.values())) // len({*held, *found}))
        return self._poll.look_for(dict.fromkeys(found, min(share, max(1, budget // len(found)))))

    def _labels(self) -> Sequence[tuple[str, str]]:
        """Every policy that is served here, with each of its labels: as many as one query may ask for, in turns."""
        served = [policy for policy in registry if self._only is None or policy.queue in self._only]
        pairs = [(policy.label, label) for policy in served for label in policy.labels]
        self._turn = (self._turn + MOST_LABELS) % max(1, len(pairs)) if len(pairs) > MOST_LABELS else 0
        return (pairs[self._turn :] + pairs[: self._turn])[:MOST_LABELS]
