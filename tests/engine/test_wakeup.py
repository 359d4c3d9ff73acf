"""Wake-ups: early when Redis speaks, at the cap when it does not, and never in the way of a shutdown."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import redis

from django_delayq.engine import wakeup as wakeup_module
from django_delayq.engine.engine import Engine
from django_delayq.engine.records import Change
from django_delayq.engine.wakeup import Wakeup
from tests.engine.fault_proxy import FaultProxy
from tests.engine.lines import LINE
from tests.engine.redis_process import RedisProcess
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

LONG = 20.0
"""Seconds that no test waits for: a wait that ends before was woken."""
FAR_MS = 2**41


def subscribers(client: redis.Redis) -> list[str]:
    return [entry["id"] for entry in client.client_list(_type="pubsub")]


def its_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "delayq-wakeup"]


def started(client: redis.Redis) -> Wakeup:
    """Return a wakeup whose subscription is confirmed, which counts as a wake-up."""
    wakeup = Wakeup(client, ["w"])
    wakeup.start()
    assert wakeup.wait(LONG)
    return wakeup


@pytest.fixture
def waking(client: redis.Redis) -> Iterator[tuple[Engine, Wakeup]]:
    """Yield an engine, and a wakeup on its queue whose subscription is confirmed."""
    engine = Engine(client, shards=2)
    wakeup = engine.wakeup(["default"])
    wakeup.start()
    assert wakeup.wait(LONG)
    yield engine, wakeup
    wakeup.close()


def test_an_earlier_due_time_ends_the_wait_which_otherwise_lasts_its_time(waking: tuple[Engine, Wakeup]) -> None:
    engine, wakeup = waking
    ids = [next(id for id in range(1, 100) if engine.shard_of(id) == shard) for shard in (0, 1)]
    for due_ms in [FAR_MS, FAR_MS - 1]:
        for id in ids:
            engine.apply([Change("default", LINE, id, due_ms, earlier_only=True)])
            assert wakeup.wait(LONG)
    engine.apply([Change("other", LINE, 1, FAR_MS)])
    began = time.monotonic()
    assert not wakeup.wait(0.05)
    assert time.monotonic() - began >= 0.05
    assert not wakeup.wait(0) and not wakeup.wait(-1)


def test_what_comes_while_nobody_waits_ends_the_next_wait_and_only_that(waking: tuple[Engine, Wakeup]) -> None:
    _, wakeup = waking
    for _ in range(5):
        wakeup.wake()
    assert wakeup.wait(float("inf")), "as long as it takes"
    assert not wakeup.wait(0)
    began = time.monotonic()
    wakeup.interrupt()
    assert not wakeup.wait(LONG), "an interruption asks for no check"
    assert time.monotonic() - began < LONG / 2
    wakeup.interrupt()
    wakeup.wake()
    assert wakeup.wait(LONG), "the message behind it is not lost"
    assert not wakeup.wait(0)


def test_a_signal_handler_may_wake_the_very_thread_that_waits(waking: tuple[Engine, Wakeup]) -> None:
    _, wakeup = waking
    before = signal.signal(signal.SIGALRM, lambda *_: wakeup.wake())
    try:
        for _ in range(20):
            signal.setitimer(signal.ITIMER_REAL, 0.002)
            assert wakeup.wait(LONG)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_server_that_is_down_at_the_start_or_restarts_is_listened_to_again(own_server: RedisProcess) -> None:
    with own_server.client() as client:
        own_server.kill()
        wakeup = Wakeup(client, ["w"])
        wakeup.start()
        for _ in range(2):
            own_server.start()
            wait_until(lambda: len(subscribers(client)) == 1)
            while wakeup.wait(0.2):
                pass
            client.publish("w", "5")
            assert wakeup.wait(LONG)
            own_server.kill()
            assert wakeup.wait(LONG), "messages may be missed"
        own_server.start()
        wakeup.close()
        wait_until(lambda: subscribers(client) == [])


def test_a_connection_that_stays_silent_is_renewed(
    own_server: RedisProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wakeup_module, "PULSE_SECONDS", 0.5)
    with FaultProxy(own_server.socket) as proxy, redis.Redis(port=proxy.port, socket_timeout=5) as client:
        wakeup = started(client)
        assert not wakeup.wait(1.2), "a server that answers is left alone, however little it has to say"
        with caplog.at_level(logging.INFO, "django_delayq.engine"):
            proxy.mute()
            assert wakeup.wait(LONG)
        wakeup.close()
    assert "no answer to PING" in caplog.text


@pytest.mark.parametrize("state", ["listening", "server gone", "server stalled", "connection mute"])
def test_closing_takes_no_time_whatever_the_server_does(own_server: RedisProcess, state: str) -> None:
    with FaultProxy(own_server.socket) as proxy, redis.Redis(port=proxy.port, socket_timeout=LONG) as client:
        wakeup = started(client)
        acts = {"server gone": own_server.kill, "server stalled": own_server.pause, "connection mute": proxy.mute}
        acts.get(state, lambda: None)()
        began = time.monotonic()
        wakeup.close()
        assert time.monotonic() - began < LONG / 2
        assert not its_threads()
        assert wakeup.wait(LONG), "a closed wakeup does not block"
        wakeup.close()
        if state == "server gone":
            own_server.start()
