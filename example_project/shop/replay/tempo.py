"""Convert a real duration to a duration of the replay, so that weeks become seconds.

Both conversions preserve which of two durations is longer. Every step waits from the previous step, and every deadline
counts from one of these steps. Therefore a step that was in time stays in time, and a late one stays late, unless the
difference is too short for the machine.
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
    """Make everything `speed` times faster: at 86,400 a day takes a second, and half an hour takes 21 ms."""
    if not speed > 0:
        raise ValueError("The speed must be greater than 0.")
    return lambda span: span / speed


def logarithmic(seconds: float = 1.0) -> Tempo:
    """Twice the duration takes `seconds` longer, beyond the first minutes.

    Minutes and weeks can then be watched side by side: with one second, half an hour takes 5 s, three days 12 s,
    a week 13 s.
    """
    if not seconds > 0:
        raise ValueError("The seconds for twice the duration must be greater than 0.")
    return lambda span: timedelta(seconds=seconds * math.log2(1 + max(span, timedelta(0)) / MINUTE))
