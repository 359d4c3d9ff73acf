"""How weeks become seconds: from a span of real time to a span of the replay's time.

Both ways keep what was longer the longer one. As every step waits from the step before it, and every deadline
counts from one of these steps, who was in time stays in time, and who was late stays late, as far as the
machine can tell such short spans apart.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    Tempo = Callable[[timedelta], timedelta]

MINUTE = timedelta(minutes=1)


def linear(speed: float) -> Tempo:
    """Everything `speed` times faster: at 86,400 a day takes a second, and half an hour takes 21 ms."""
    if not speed > 0:
        raise ValueError("A speed is greater than 0.")
    return lambda span: span / speed


def logarithmic(seconds: float = 1.0) -> Tempo:
    """Twice as long takes `seconds` longer, beyond the first minutes.

    Minutes and weeks can then be watched side by side: with one second, half an hour takes 5 s, three days 12 s,
    a week 13 s.
    """
    if not seconds > 0:
        raise ValueError("The seconds for twice as long are greater than 0.")
    return lambda span: timedelta(seconds=seconds * math.log2(1 + max(span, timedelta(0)) / MINUTE))
