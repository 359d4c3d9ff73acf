"""The circuit breaker between producers and Redis."""

from __future__ import annotations

import contextlib
import logging
import threading

import pytest

from django_delayq.connections.breaker import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, Breaker
from django_delayq.exceptions import EngineError, EngineUnavailable


class Seconds:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def seconds() -> Seconds:
    return Seconds()


@pytest.fixture
def breaker(seconds: Seconds) -> Breaker:
    return Breaker(clock=seconds)


def fail(breaker: Breaker) -> bool:
    """Whether the call got through to fail there."""
    asked = False
    try:
        with breaker.guarding():
            asked = True
            raise EngineUnavailable("away")
    except EngineUnavailable:
        return asked


def succeed(breaker: Breaker) -> None:
    with breaker.guarding():
        pass


def test_after_a_failure_nothing_passes_until_the_pause_is_over(breaker: Breaker, seconds: Seconds) -> None:
    assert fail(breaker)
    assert not fail(breaker)
    seconds.now += FIRST_PAUSE_SECONDS
    succeed(breaker)
    assert not breaker.is_open


def test_the_pause_doubles_with_each_failed_probe_up_to_a_few_seconds(breaker: Breaker, seconds: Seconds) -> None:
    assert fail(breaker)
    pauses = []
    for _ in range(5):
        began = seconds.now
        while not fail(breaker):
            seconds.now += 0.5
        pauses.append(seconds.now - began)
    assert pauses[:2] == [FIRST_PAUSE_SECONDS, 2 * FIRST_PAUSE_SECONDS]
    assert pauses[-1] == LONGEST_PAUSE_SECONDS


def test_only_one_call_at_a_time_is_the_probe(breaker: Breaker, seconds: Seconds) -> None:
    fail(breaker)
    seconds.now += 60
    with breaker.guarding():
        assert not fail(breaker)
    succeed(breaker)


def test_failures_that_began_before_it_opened_do_not_lengthen_the_pause(breaker: Breaker, seconds: Seconds) -> None:
    began, go = threading.Barrier(4), threading.Event()

    def fail_late() -> None:
        with contextlib.suppress(EngineUnavailable), breaker.guarding():
            began.wait(10)
            go.wait(10)
            raise EngineUnavailable("away")

    threads = [threading.Thread(target=fail_late) for _ in range(3)]
    for thread in threads:
        thread.start()
    began.wait(10)
    go.set()
    for thread in threads:
        thread.join()
    seconds.now += FIRST_PAUSE_SECONDS
    succeed(breaker)


def test_a_probe_that_ends_in_another_error_lets_the_next_one_probe(breaker: Breaker, seconds: Seconds) -> None:
    fail(breaker)
    seconds.now += 60
    with pytest.raises(KeyboardInterrupt), breaker.guarding():
        raise KeyboardInterrupt
    succeed(breaker)
    assert not breaker.is_open


def test_an_outage_is_logged_once_at_each_end(
    breaker: Breaker, seconds: Seconds, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "django_delayq"):
        for _ in range(3):
            fail(breaker)
            seconds.now += 60
        succeed(breaker)
        succeed(breaker)
    assert [record.event for record in caplog.records] == ["redis_away", "redis_back"]  # type: ignore[attr-defined]


def test_a_refusal_opens_it_too(breaker: Breaker) -> None:
    with pytest.raises(EngineError), breaker.guarding():
        raise EngineError("NOPERM")
    assert breaker.is_open
