"""How much a worker holds at once: what it can work on soon, and not more, so that others can take the rest."""

from __future__ import annotations

from typing import Final

SOON_SECONDS: Final = 0.5
MOST: Final = 1000
"""What one call of Redis leases at most."""
FIRST_EACH: Final = 25
"""Per thread, before anything is known."""
WEIGHT: Final = 0.5


class Appetite:
    """From how long the last timeouts were held until they were done: as many as are done in half a second.

    A thousand quick ones, or one for each thread if handlers take minutes.
    """

    def __init__(self, concurrency: int) -> None:
        self._least = concurrency
        self._size = float(FIRST_EACH * concurrency)

    @property
    def size(self) -> int:
        """How many to hold."""
        return max(self._least, min(MOST, int(self._size)))

    def ate(self, held: int, seconds: float) -> None:
        """A timeout is done that was one of `held` when it came, `seconds` ago."""
        wanted = held * SOON_SECONDS / max(seconds, 0.001)
        self._size += WEIGHT * (min(wanted, MOST) - self._size)

    def was_full(self) -> None:
        """Something was held for so long without being begun that it is left to others: no more than what runs."""
        self._size = float(self._least)

    def room(self, held: int) -> int:
        """How many to take now; 0 while so little room is left that asking is not worth it."""
        room = self.size - held
        return room if room >= max(1, self.size // 4) else 0
