"""What a worker knows about the clocks of others."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from django_delayq.ledger.outbox import due_ms_of
from django_delayq.worker.servers import MIN_SAMPLES, TOLERATED_MS, WINDOW_SECONDS, ClockSkew
from tests.support.waiting import Steady

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
NOON_MS = due_ms_of(NOON)
TEN_MINUTES_MS = 600_000


@pytest.fixture
def clocks(steady: Steady, monkeypatch: pytest.MonkeyPatch) -> ClockSkew:
    made = ClockSkew("default", monotonic=steady)
    monkeypatch.setattr(made, "_is_ours", False)
    return made


def look(clocks: ClockSkew, redis_ahead_ms: int = 0) -> None:
    for _ in range(MIN_SAMPLES):
        clocks.note_database(NOON)
        clocks.note_redis(NOON_MS + redis_ahead_ms)


def test_a_clock_that_was_set_back_is_believed_after_a_while(clocks: ClockSkew, steady: Steady) -> None:
    look(clocks, TEN_MINUTES_MS)
    for _ in range(3):
        steady.seconds += WINDOW_SECONDS + 1
        elapsed = int((steady.seconds - 1000) * 1000)
        for _ in range(MIN_SAMPLES):
            clocks.note_database(NOON + timedelta(milliseconds=elapsed))
            clocks.note_redis(NOON_MS + elapsed + int(TOLERATED_MS))
    assert clocks.redis_ahead_ms() == 0, "a small difference counts for nothing"


def test_redis_whose_clock_was_set_back_by_minutes_is_believed_after_a_few_answers_in_a_row(clocks: ClockSkew) -> None:
    look(clocks)
    for late in (2500, TEN_MINUTES_MS, TEN_MINUTES_MS, 0, TEN_MINUTES_MS, TEN_MINUTES_MS):
        clocks.note_redis(NOON_MS - late)
    assert clocks.redis_ahead_ms() == 0, "answers may be late, and the machine itself may have been suspended"
    clocks.note_redis(NOON_MS - TEN_MINUTES_MS)
    assert clocks.redis_ahead_ms() == -TEN_MINUTES_MS
