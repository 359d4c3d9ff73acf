"""How long a timeout waits that cannot be fired through no fault of its own, and who hears of it."""

from __future__ import annotations

import pytest

from django_delayq.firing.patience import _MOST, _Patience


def test_waits_double_from_a_tenth_of_a_second_with_jitter_up_to_the_ceiling() -> None:
    patience = _Patience()
    waits = [patience.wait("default", 7, "held", 5.0).total_seconds() for _ in range(200)]
    for number, base in enumerate((0.1, 0.2, 0.4, 0.8, 1.6, 3.2)):
        assert base / 2 <= waits[number] <= base * 1.5
    assert all(2.5 <= wait <= 7.5 for wait in waits[6:])
    assert len(set(waits)) > 150


def test_each_timeout_of_each_database_waits_for_itself() -> None:
    patience = _Patience()
    for _ in range(5):
        patience.wait("default", 7, "held", 5.0)
    assert patience.wait("default", 8, "held", 5.0).total_seconds() <= 0.15
    assert patience.wait("other", 7, "held", 5.0).total_seconds() <= 0.15
    patience.forget("default", 7)
    assert patience.wait("default", 7, "held", 5.0).total_seconds() <= 0.15


def test_a_wait_that_lasts_is_logged_every_half_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    monkeypatch.setattr("django_delayq.firing.patience.time.monotonic", lambda: now[0])
    patience = _Patience()
    for _ in range(91):
        patience.wait("default", 7, "others hold its object", 5.0)
        now[0] += 1
    words = [record.getMessage() for record in caplog.records]
    assert words == [f"Timeout 7 has waited {s} s to be fired: others hold its object" for s in (30, 60, 90)]


def test_what_it_remembers_is_bounded() -> None:
    patience = _Patience()
    for timeout_id in range(_MOST + 50):
        patience.wait("default", timeout_id, "held", 5.0)
    assert len(patience._waiting) == _MOST
