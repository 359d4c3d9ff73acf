"""The proxy itself: a fault that does nothing would make every test behind it a lie."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.engine.fault_proxy import SMALL, Fault, FaultProxy, Pace, _pieces
from tests.engine.redis_process import RedisProcess, await_true

HASTY = 0.3


@pytest.fixture
def proxy(shared_server: RedisProcess, client: redis.Redis) -> Iterator[FaultProxy]:
    client.set("count", 0)
    with FaultProxy(shared_server.socket) as proxy:
        yield proxy


def connected(proxy: FaultProxy, socket_timeout: float = 20) -> redis.Redis:
    """Yield a connected client that does not retry."""
    client = redis.Redis(
        port=proxy.port, retry=Retry(NoBackoff(), 0), single_connection_client=True, socket_timeout=socket_timeout
    )
    client.ping()
    return client


@pytest.mark.parametrize("fault", Fault)
def test_one_request_meets_the_fault_and_runs_or_not_as_its_name_says(
    proxy: FaultProxy, client: redis.Redis, fault: Fault
) -> None:
    through = connected(proxy, socket_timeout=HASTY if fault.is_silent else 20)
    proxy.inject(fault, only=b"INCRBY")
    assert through.get("count") == b"0", "other requests pass"
    with pytest.raises(redis.TimeoutError if fault.is_silent else redis.ConnectionError):
        through.incr("count")
    await_true(lambda: proxy.met == {fault: 1})
    assert client.get("count") == (b"1" if fault.runs else b"0")
    healthy = connected(proxy)
    assert healthy.incr("count") == 1 + fault.runs, "only one request met it"
    for one in (through, healthy):
        one.close()


def test_a_fault_counts_although_its_client_waits_no_longer(own_server: RedisProcess) -> None:
    """A test that waits for the fault also succeeds on a slow machine."""
    with own_server.client() as client, FaultProxy(own_server.socket) as proxy:
        through = connected(proxy, socket_timeout=HASTY)
        proxy.inject(Fault.STALL_AFTER)
        own_server.pause()
        with pytest.raises(redis.TimeoutError):
            through.incr("count")
        through.close()
        own_server.resume()
        await_true(lambda: proxy.met == {Fault.STALL_AFTER: 1})
        assert client.get("count") == b"1"


def test_a_reset_is_no_polite_end(proxy: FaultProxy) -> None:
    proxy.inject(Fault.RESET_BEFORE)
    with socket.create_connection(("127.0.0.1", proxy.port)) as raw:
        raw.sendall(b"PING\r\n")
        with pytest.raises(ConnectionResetError):
            raw.recv(1)


def test_a_mute_proxy_still_delivers_and_a_swallowing_one_does_not(proxy: FaultProxy, client: redis.Redis) -> None:
    for condition in (proxy.mute, proxy.swallow):
        through = connected(proxy, socket_timeout=HASTY)
        condition()
        with pytest.raises(redis.TimeoutError):
            through.incr("count")
        await_true(lambda: client.get("count") == b"1")
        with pytest.raises(redis.TimeoutError):
            connected(proxy, socket_timeout=HASTY)
        proxy.heal()
        through.close()
    healthy = connected(proxy)
    assert healthy.get("count") == b"1", "what was swallowed never arrives"
    healthy.close()


def test_a_refusing_proxy_resets_new_connections_and_leaves_the_others(proxy: FaultProxy) -> None:
    before = connected(proxy)
    proxy.refuse()
    with pytest.raises(redis.ConnectionError):
        connected(proxy)
    assert before.ping()
    proxy.heal()
    connected(proxy).close()
    before.close()


@pytest.mark.parametrize("pace", Pace)
def test_everything_arrives_whatever_the_pace(shared_server: RedisProcess, pace: Pace) -> None:
    value = bytes(range(256)) * 40
    with FaultProxy(shared_server.socket, pace) as proxy:
        through = connected(proxy)
        through.set("long", value)
        assert through.get("long") == value
        through.delete("long")
        through.close()


@pytest.mark.parametrize("length", [0, 1, SMALL - 1, SMALL, SMALL + 1, 2 * SMALL, 2 * SMALL + 1, 50_000])
def test_pieces_are_the_whole_and_single_bytes_at_both_ends(length: int) -> None:
    data = bytes(i % 251 for i in range(length))
    pieces = list(_pieces(data))
    assert b"".join(pieces) == data
    ends = pieces[:SMALL] + pieces[-SMALL:]
    assert all(len(piece) == 1 for piece in ends)
