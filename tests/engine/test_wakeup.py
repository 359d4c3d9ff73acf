"""Wake-ups: early when Redis speaks, at the cap when it does not, and never in the way of a shutdown."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

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


@pytest.fixture
def waking(client: redis.Redis) -> Iterator[tuple[Engine, Wakeup]]:
    """Yield an engine, and a wakeup on its queue whose subscription is confirmed."""
    engine = Engine(client, shards=2)
    wakeup = engine.wakeup(["default"])
    wakeup.start()
    assert wakeup.wait(LONG), "the subscription counts as a wake-up"
    yield engine, wakeup
    wakeup.close()


def test_an_earlier_due_time_ends_the_wait(waking: tuple[Engine, Wakeup]) -> None:
    engine, wakeup = waking
    ids = [next(id for id in range(1, 100) if engine.shard_of(id) == shard) for shard in (0, 1)]
    for due_ms in [FAR_MS, FAR_MS - 1]:
        for id in ids:
            engine.apply([Change("default", LINE, id, due_ms, earlier_only=True)])
            assert wakeup.wait(LONG)


def test_a_wait_that_nothing_ends_lasts_its_time(waking: tuple[Engine, Wakeup]) -> None:
    engine, wakeup = waking
    engine.apply([Change("other", LINE, 1, FAR_MS)])
    started = time.monotonic()
    assert not wakeup.wait(0.05)
    assert time.monotonic() - started >= 0.05
    assert not wakeup.wait(0)
    assert not wakeup.wait(-1)


def test_what_comes_while_nobody_waits_ends_the_next_wait_and_only_that(waking: tuple[Engine, Wakeup]) -> None:
    _, wakeup = waking
    for _ in range(5):
        wakeup.wake()
    assert wakeup.wait(float("inf")), "as long as it takes"
    assert not wakeup.wait(0)


def test_an_interruption_ends_the_wait_but_is_no_reason_to_check(waking: tuple[Engine, Wakeup]) -> None:
    _, wakeup = waking
    started = time.monotonic()
    wakeup.interrupt()
    assert not wakeup.wait(LONG)
    assert time.monotonic() - started < LONG / 2
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


def test_a_restarted_server_is_listened_to_again(own_server: RedisProcess) -> None:
    with own_server.client() as client:
        wakeup = Wakeup(client, ["w"])
        wakeup.start()
        assert wakeup.wait(LONG)
        own_server.kill()
        assert wakeup.wait(LONG)
        own_server.start()
        wait_until(lambda: len(subscribers(client)) == 1)
        while wakeup.wait(0.2):
            pass
        client.publish("w", "5")
        assert wakeup.wait(LONG)
        wakeup.close()


def test_a_server_that_is_down_at_the_start_is_listened_to_later(own_server: RedisProcess) -> None:
    with own_server.client() as client:
        own_server.kill()
        wakeup = Wakeup(client, ["w"])
        wakeup.start()
        own_server.start()
        wait_until(lambda: len(subscribers(client)) == 1)
        wakeup.close()
        wait_until(lambda: subscribers(client) == [])


def test_a_connection_that_stays_silent_is_renewed(
    own_server: RedisProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wakeup_module, "PULSE_SECONDS", 0.5)
    with FaultProxy(own_server.socket) as proxy, redis.Redis(port=proxy.port, socket_timeout=5) as client:
        wakeup = Wakeup(client, ["w"])
        wakeup.start()
        assert wakeup.wait(LONG)
        assert not wakeup.wait(1.2), "a server that answers is left alone, however little it has to say"
        with caplog.at_level(logging.INFO, "django_delayq.engine"):
            proxy.mute()
            assert wakeup.wait(LONG)
        wakeup.close()
    assert "no answer to PING" in caplog.text


@pytest.mark.parametrize("state", ["never started", "listening", "server gone", "server stalled", "connection mute"])
def test_closing_takes_no_time_whatever_the_server_does(own_server: RedisProcess, state: str) -> None:
    with FaultProxy(own_server.socket) as proxy, redis.Redis(port=proxy.port, socket_timeout=LONG) as client:
        wakeup = Wakeup(client, ["w"])
        if state != "never started":
            wakeup.start()
            assert wakeup.wait(LONG)
        {"server gone": own_server.kill, "server stalled": own_server.pause, "connection mute": proxy.mute}.get(
            state, lambda: None
        )()
        started = time.monotonic()
        wakeup.close()
        assert time.monotonic() - started < LONG / 2
        assert not [thread for thread in threading.enumerate() if thread.name == "delayq-wakeup"]
        assert wakeup.wait(LONG), "a closed wakeup does not block"
        wakeup.close()
        if state == "server gone":
            own_server.start()


def test_closing_during_a_connect_that_hangs_returns_and_the_thread_follows(own_server: RedisProcess) -> None:
    with own_server.client(socket_timeout=2) as client:
        own_server.pause()
        wakeup = Wakeup(client, ["w"])
        wakeup.start()
        started = time.monotonic()
        wakeup.close()
        assert time.monotonic() - started < LONG / 2
        own_server.resume()
        wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == "delayq-wakeup"])
        assert subscribers(client) == []


def test_a_client_that_tries_again_slowly_does_not_slow_the_wakeup(own_server: RedisProcess) -> None:
    with own_server.client(retry=Retry(ConstantBackoff(int(LONG)), 3)) as client:
        wakeup = Wakeup(client, ["w"])
        wakeup.start()
        assert wakeup.wait(LONG)
        own_server.kill()
        for _ in range(3):
            assert wakeup.wait(LONG / 2), "each failed try ends the wait"
        wakeup.close()


def test_closing_ends_a_wait_in_another_thread(waking: tuple[Engine, Wakeup]) -> None:
    _, wakeup = waking
    woken: list[bool] = []
    waiter = threading.Thread(target=lambda: woken.append(wakeup.wait(LONG)))
    waiter.start()
    wakeup.close()
    waiter.join(LONG / 2)
    assert woken == [True]


def test_starting_twice_subscribes_once(client: redis.Redis, waking: tuple[Engine, Wakeup]) -> None:
    _, wakeup = waking
    wakeup.start()
    assert len(subscribers(client)) == 1


def test_the_subscriber_takes_no_connection_of_the_pool(shared_server: RedisProcess) -> None:
    with shared_server.client(max_connections=1) as client:
        engine = Engine(client)
        wakeup = engine.wakeup(["default"])
        wakeup.start()
        assert wakeup.wait(LONG)
        engine.ping()
        engine.close()


@pytest.mark.parametrize(
    "options", [{"decode_responses": True}, {"protocol": 3}, {"protocol": 2}, {"socket_timeout": 1.0}]
)
def test_any_client_is_woken(shared_server: RedisProcess, options: dict[str, Any]) -> None:
    with shared_server.client(**options) as client:
        client.flushall()
        engine = Engine(client)
        wakeup = engine.wakeup(["default", "ü", "default"])
        wakeup.start()
        assert wakeup.wait(LONG)
        assert not wakeup.wait(0.4 + options.get("socket_timeout", 0.0))
        for name in ["ü", "default"]:
            engine.apply([Change(name, LINE, 1, FAR_MS)])
            assert wakeup.wait(LONG)
        engine.close()


def test_fifty_starts_and_stops_leave_no_thread_and_no_connection(client: redis.Redis) -> None:
    def cycle() -> None:
        for _ in range(10):
            wakeup = Wakeup(client, ["w"])
            wakeup.start()
            wakeup.close()

    threads = [threading.Thread(target=cycle) for _ in range(5)]
    for act in ("start", "join"):
        for thread in threads:
            run: Callable[[], None] = getattr(thread, act)
            run()
    assert not [thread for thread in threading.enumerate() if thread.name == "delayq-wakeup"]
    wait_until(lambda: subscribers(client) == [])


def test_interruptions_that_follow_each_other_are_logged_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    """Clients may be killed again and again, and the connection works briefly each time."""
    caplog.set_level(logging.INFO, logger="django_delayq.engine")
    nowhere: Any = None
    log = Wakeup(nowhere, ())._log
    for _ in range(20):
        log.failed("wake-ups are interrupted: %s", "killed", level=logging.INFO)
        log.recovered()
    assert [each.levelname for each in caplog.records] == ["INFO"]
