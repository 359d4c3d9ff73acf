"""The proxy itself: a fault that does nothing would make every test behind it a lie."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.engine.fault_proxy import SMALL, Fault, FaultProxy, _pieces
from tests.engine.redis_process import RedisProcess
from tests.support.waiting import wait_until

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
        wait_until(lambda: proxy.met == {Fault.STALL_AFTER: 1})
        assert client.get("count") == b"1"


def test_a_reset_is_no_polite_end(proxy: FaultProxy) -> None:
    proxy.inject(Fault.RESET_BEFORE)
    with socket.create_connection(("127.0.0.1", proxy.port)) as raw:
        raw.sendall(b"PING\r\n")
        with pytest.raises(ConnectionResetError):
            raw.recv(1)


@pytest.mark.parametrize("length", [0, 1, SMALL - 1, SMALL, SMALL + 1, 2 * SMALL, 2 * SMALL + 1, 50_000])
def test_pieces_are_the_whole_and_single_bytes_at_both_ends(length: int) -> None:
    data = bytes(i % 251 for i in range(length))
    pieces = list(_pieces(data))
    assert b"".join(pieces) == data
    ends = pieces[:SMALL] + pieces[-SMALL:]
    assert all(len(piece) == 1 for piece in ends)
