"""Redis is away, and a shop's pages do not wait for it: each way of being away, and each way of scheduling.

What is held is how often Redis is asked, not how long anything took: a machine may be slow, but it does not ask by
itself. That one asking ends after a quarter of a second is the business of
`tests/integration/worker/test_redis_clients.py`.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from django_delayq import cancel_timeout, schedule_timeout
from django_delayq.engine.engine import Engine
from django_delayq.models import Timeout
from tests.e2e.outages.conftest import Seconds, await_redis_calls, breaker_of, once
from tests.e2e.outages.faults import FAULTS
from tests.support.waiting import wait_until
from tests.testapp.models import Order

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]
UseRedis = Callable[[str], Engine]


def schedule_and_cancel(times: int) -> None:
    order = Order.objects.create(status="new")
    for _ in range(times):
        schedule_timeout(order, "remind", minutes=5)
        assert cancel_timeout(order, "remind")


@pytest.mark.dialect
@once
@pytest.mark.parametrize("fault", FAULTS)
def test_redis_is_asked_once_and_once_more_when_the_pause_is_over(
    use_redis: UseRedis, seconds: Seconds, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    with FAULTS[fault]() as wire:
        engine = use_redis(wire.url)
        schedule_and_cancel(1)
        await_redis_calls()
        first = wire.opened, wire.asked
        assert first[0] == 1
        schedule_and_cancel(25)
        assert (wire.opened, wire.asked) == first, "50 more calls, and none of them asked"
        seconds.now += 60
        schedule_and_cancel(10)
        await_redis_calls()
        assert wire.opened <= 2
        assert wire.asked > first[1] or fault == "refused"
        assert breaker_of(engine).is_open
    told = [vars(line).get("event", line.message) for line in caplog.records if line.levelno >= logging.WARNING]
    assert told == ["redis_away"]
    assert Timeout.objects.count() == 36


@pytest.mark.dialect
@once
def test_a_name_server_that_does_not_answer_is_waited_for_by_nobody(
    use_redis: UseRedis, seconds: Seconds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look-up has no timeout that could be set: the system tries its name servers for ten seconds and more."""
    asked: list[str] = []
    answers = threading.Event()

    def look_up(host: str, *args: Any, **kwargs: Any) -> Any:
        asked.append(host)
        answers.wait(60)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    engine = use_redis("redis://redis.example/0")
    try:
        schedule_and_cancel(25)
        seconds.now += 60
        schedule_and_cancel(10)
        wait_until(lambda: len(asked) > 1)
        assert asked == ["redis.example"] * 2, "one that was waited for, and the probe, which was not"
        assert breaker_of(engine).is_open
    finally:
        answers.set()
    wait_until(lambda: not breaker_of(engine)._is_probing)
