"""Delays between tries, and log lines at both ends of a failure."""

from __future__ import annotations

import logging

import pytest

from django_delayq.backoff import Backoff, StateLog

LOGGER = logging.getLogger("django_delayq.worker")


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


def test_a_failure_is_logged_once_of_each_kind_and_its_end_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "django_delayq")
    log = StateLog(LOGGER, "away", "back", job="sweep")
    log.recovered("it works")
    log.failed("it failed: %s", "refused", kind=OSError)
    log.failed("it failed: %s", "refused again", kind=OSError)
    log.failed("it failed: %s", "timeout", kind=TimeoutError, level=logging.ERROR)
    log.recovered("it works")
    log.recovered("it works")
    log.failed("it failed: %s", "timeout", kind=TimeoutError)
    lines = [(vars(record)["event"], record.levelname, record.getMessage()) for record in caplog.records]
    assert lines == [
        ("away", "WARNING", "it failed: refused"),
        ("away", "ERROR", "it failed: timeout"),
        ("back", "INFO", "it works"),
        ("away", "WARNING", "it failed: timeout"),
    ]
    assert {vars(record)["job"] for record in caplog.records} == {"sweep"}
    assert {record.filename for record in caplog.records} == {"test_backoff.py"}, "of the caller, not of the mechanism"
