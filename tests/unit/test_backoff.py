"""Delays between tries."""

from __future__ import annotations

from django_delayq.backoff import Backoff


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_delay_doubles_up_to_its_limit_and_is_over_after_a_success() -> None:
    backoff = Backoff(1, 5, jitter=0, monotonic=Clock())
    assert (backoff.seconds_left, backoff.is_failing) == (0, False)
    delays = []
    for _ in range(5):
        backoff.failed()
        delays.append(backoff.seconds_left)
    assert delays == [1, 2, 4, 5, 5]
    backoff.succeeded()
    assert (backoff.seconds_left, backoff.is_failing) == (0, False)
    backoff.failed()
    assert backoff.seconds_left == 1
