"""Each command meets faults on its way: a clean error, nothing done by halves, and it may be sent again.

What should have happened is what happens to a second queue on the same clock, which nothing disturbs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from django_delayq.engine.engine import Lease
from django_delayq.engine.scripts import read_texts
from django_delayq.exceptions import EngineUnavailable
from tests.engine.fault_proxy import FaultProxy
from tests.engine.redis_process import RedisProcess
from tests.engine.virtual import START_MS, VirtualQueue, virtual_texts
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

NOW = START_MS
COMMANDS: dict[str, Callable[[Any, Lease], Any]] = {
    "ensure": lambda queue, _: queue.ensure([(1, NOW - 5), (11, NOW + 6)]),
    "reschedule": lambda queue, _: queue.reschedule([(2, NOW + 9), (5, NOW + 1)]),
    "remove": lambda queue, _: queue.remove([1, 6]),
    "reserve": lambda queue, _: queue.reserve(2, 1000),
    "acknowledge": lambda queue, lease: queue.acknowledge(lease, [5, 1]),
    "acknowledge all": lambda queue, lease: queue.acknowledge(lease),
    "release": lambda queue, lease: queue.release(lease, [(5, NOW - 9), (6, NOW + 9)]),
    "extend": lambda queue, lease: queue.extend(lease, 5000),
    "stats": lambda queue, _: queue.stats(),
    "peek": lambda queue, _: queue.peek(),
}


@pytest.fixture
def proxy(shared_server: RedisProcess, client: redis.Redis) -> Iterator[FaultProxy]:
    for text in [*read_texts().values(), *virtual_texts().values()]:
        client.script_load(text)
    with FaultProxy(shared_server.socket) as proxy:
        yield proxy


@pytest.fixture
def queues(client: redis.Redis) -> tuple[VirtualQueue, VirtualQueue, Lease, Lease]:
    """Return a calm and a shaken queue, each with a lease on 5, 6 and 7, in which 1 to 4 are due."""
    both = VirtualQueue(client, queue="calm"), VirtualQueue(client, queue="shaken")
    leases = []
    for virtual in both:
        virtual.queue.ensure([(id, NOW) for id in (5, 6, 7)])
        leases.append(virtual.queue.reserve(3, 1000).lease)
        virtual.queue.ensure([(id, NOW) for id in (1, 2, 3, 4)])
        virtual.wakes()
    assert leases[0] and leases[1]
    return (*both, leases[0], leases[1])


def through(proxy: FaultProxy, seconds: float = 20.0) -> redis.Redis:
    """Return a connected client behind the proxy that does not retry."""
    client = redis.Redis(port=proxy.port, socket_timeout=seconds, retry=Retry(NoBackoff(), 0))
    wait_until(client.ping)  # a loaded machine may need several
    return client


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_whose_reply_was_lost_has_run_and_may_be_sent_again(
    proxy: FaultProxy, queues: tuple[VirtualQueue, VirtualQueue, Lease, Lease], name: str
) -> None:
    command, (calm, shaken, lease, other) = COMMANDS[name], queues
    with through(proxy) as unlucky:
        proxy.lose_next_reply()
        with pytest.raises(EngineUnavailable, match="not available"):
            command(shaken.through(unlucky), other)
        wait_until(lambda: proxy.lost == 1)
        command(calm.queue, lease)
        assert shaken.snapshot() == calm.snapshot()
        assert command(shaken.through(unlucky), other) == command(calm.queue, lease)
    assert shaken.snapshot() == calm.snapshot()
    assert shaken.wakes() == calm.wakes()


@pytest.mark.parametrize("condition", ["swallow", "refuse"])
def test_while_the_line_is_dead_every_command_gives_up_by_itself_and_then_all_go_on(
    proxy: FaultProxy, queues: tuple[VirtualQueue, VirtualQueue, Lease, Lease], condition: str
) -> None:
    calm, shaken, lease, other = queues
    with through(proxy, 0.1) as unlucky, through(proxy) as lucky:
        before = shaken.snapshot()
        getattr(proxy, condition)()
        if condition == "refuse":
            unlucky.connection_pool.disconnect()
        for command in COMMANDS.values():
            with pytest.raises(EngineUnavailable):
                command(shaken.through(unlucky), other)
        assert shaken.snapshot() == before
        proxy.heal()
        for command in COMMANDS.values():
            assert command(shaken.through(lucky), other) == command(calm.queue, lease)
    assert shaken.snapshot() == calm.snapshot()
