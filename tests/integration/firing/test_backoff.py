"""How long a timeout waits that cannot be fired through no fault of its own, and who hears of it."""

from __future__ import annotations

import pytest

from django_delayq.firing.state import _MAX_BACKOFFS, TimeoutBackoff


def test_waits_double_from_a_tenth_of_a_second_with_jitter_up_to_the_ceiling() -> None:
    backoff = TimeoutBackoff()
    waits = [backoff.next_wait("default", 7, "held", 5.0).total_seconds() for _ in range(200)]
    for number, base in enumerate((0.1, 0.2, 0.4, 0.8, 1.6, 3.2)):
        assert base / 2 <= waits[number] <= base * 1.5
    assert all(2.5 <= wait <= 7.5 for wait in waits[6:])
    assert len(set(waits)) > 150


def test_each_timeout_of_each_database_waits_for_itself() -> None:
    backoff = TimeoutBackoff()
    for _ in range(5):
        backoff.next_wait("default", 7, "held", 5.0)
    assert backoff.next_wait("default", 8, "held", 5.0).total_seconds() <= 0.15
    assert backoff.next_wait("other", 7, "held", 5.0).total_seconds() <= 0.15
    backoff.reset("default", 7)
    assert backoff.next_wait("default", 7, "held", 5.0).total_seconds() <= 0.15


def test_a_wait_that_lasts_is_logged_every_half_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    monkeypatch.setattr("django_delayq.firing.state.time.monotonic", lambda: now[0])
    backoff = TimeoutBackoff()
    for _ in range(91):
        backoff.next_wait("default", 7, "others hold its object", 5.0)
        now[0] += 1
    words = [record.getMessage() for record in caplog.records]
    assert words == [f"Timeout 7 has waited {s} s to be fired: others hold its object" for s in (30, 60, 90)]


def test_what_it_remembers_is_bounded() -> None:
    backoff = TimeoutBackoff()
    for timeout_id in range(_MAX_BACKOFFS + 50):
        backoff.next_wait("default", timeout_id, "held", 5.0)
    assert len(backoff._waiting) == _MAX_BACKOFFS
