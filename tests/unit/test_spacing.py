"""The slots of a policy with a rate: no period has more attempts than the rate, whatever threads and workers do."""

from __future__ import annotations

from bisect import bisect_left
from datetime import timedelta

from hypothesis import example, given, settings
from hypothesis import strategies as st

from django_delayq import Rate
from django_delayq.ledger.claiming import AHEAD_SECONDS, Spacing

PERIODS = st.integers(10, 20_000).map(lambda ms: timedelta(milliseconds=ms))
CLAIMS = st.lists(
    st.tuples(st.floats(0, 3), st.floats(0, 0.5), st.integers(1, 60), st.floats(0, 1)), min_size=1, max_size=40
)


@settings(deadline=None)
@given(count=st.integers(1, 200), per=PERIODS, together=st.integers(1, 300), claims=CLAIMS)
@example(count=1, per=timedelta(milliseconds=10), together=1, claims=[(0.0, 0.0, 60, 1.0)] * 9)
def test_no_period_has_more_attempts_than_the_rate(
    count: int, per: timedelta, together: int, claims: list[tuple[float, float, int, float]]
) -> None:
    """Workers claim at any time, prepare for any time, use a part of the slots, and threads are late in each."""
    spacing = Spacing.of(Rate(count, per), together)
    now = free_at = 0.0
    begins: list[float] = []
    for pause, preparation, works, used in claims:
        now += pause
        slots = spacing.slots(free_at - now, preparation, works * spacing.size)
        found = slots[: round(used * len(slots))]
        if found:
            free_at = now + found[-1] + spacing.interval
        for number, slot in enumerate(found):
            begins.append(now + slot + (spacing.lateness if number // spacing.size % 2 else 0.0))
    begins.sort()
    for place, begin in enumerate(begins):
        assert bisect_left(begins, begin + per.total_seconds() - 1e-9) - place <= count


@given(count=st.integers(1, 1_000_000), per=PERIODS, together=st.integers(1, 1000))
def test_little_of_the_rate_is_lost(count: int, per: timedelta, together: int) -> None:
    """A sixteenth, or ten milliseconds in each period; and what does not divide into works of one size."""
    spacing, period = Spacing.of(Rate(count, per), together), per.total_seconds()
    works = -(-count // together)
    attempts = spacing.size * (period + spacing.lateness) / spacing.interval
    assert spacing.size <= together
    assert count - works < round(attempts) <= count
    assert spacing.lateness <= max(period / 16, 0.01) + 1e-9


@given(free_in=st.floats(-1e9, 1e9), soonest=st.floats(0, 0.5), count=st.integers(1, 1000))
def test_a_slot_is_found_within_a_second_wherever_the_clock_was_set(free_in: float, soonest: float, count: int) -> None:
    slots = Spacing.of(Rate(20)).slots(free_in, soonest, count)
    assert len(slots) <= count
    assert all(soonest <= slot <= AHEAD_SECONDS for slot in slots)
    assert slots or 0.5 < free_in < 1.5, "it would never fire"
