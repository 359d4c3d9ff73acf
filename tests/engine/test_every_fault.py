"""Each command meets faults on its way: a clean error, nothing done by halves, and it may be sent again.

What should have happened is what happens to a second queue on the same clock, which nothing disturbs.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from django_delayq.engine.engine import Engine, Lease
from django_delayq.engine.records import Change
from django_delayq.engine.scripts import read_texts
from django_delayq.exceptions import EngineUnavailable
from tests.engine.fault_proxy import Fault, FaultProxy
from tests.engine.lines import LINE, Entry, one_line
from tests.engine.redis_process import RedisProcess
from tests.engine.virtual import START_MS, VirtualQueue, virtual_texts
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

NOW = START_MS
HASTY, PATIENT = 0.1, 20.0
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
COSTS_A_LEASE = {"reserve", "extend"}
CASES = [(name, Fault.RESET_AFTER) for name in COMMANDS]
CASES += [(name, fault) for name in ("ensure", "reserve") for fault in Fault if fault is not Fault.RESET_AFTER]


def begun(virtual: VirtualQueue) -> Lease:
    """1 to 4 wait and are due; 5, 6 and 7 are under the lease that is returned."""
    virtual.queue.ensure([(id, NOW) for id in (5, 6, 7)])
    lease = virtual.queue.reserve(3, 1000).lease
    assert lease is not None
    virtual.queue.ensure([(id, NOW) for id in (1, 2, 3, 4)])
    virtual.wakes()
    return lease


@pytest.fixture
def proxy(shared_server: RedisProcess, client: redis.Redis) -> Iterator[FaultProxy]:
    for text in [*read_texts().values(), *virtual_texts().values()]:
        client.script_load(text)
    with FaultProxy(shared_server.socket) as proxy:
        yield proxy


def through(proxy: FaultProxy, fault: Fault | None = None) -> redis.Redis:
    """Return a connected client behind the proxy that does not retry, and waits no longer than the fault needs."""
    seconds = HASTY if fault is not None and fault.is_silent else PATIENT
    client = redis.Redis(port=proxy.port, socket_timeout=seconds, retry=Retry(NoBackoff(), 0))
    wait_until(client.ping)  # a loaded machine may need several
    return client


@pytest.mark.parametrize(("name", "fault"), CASES, ids=str)
def test_a_command_is_done_whole_or_not_at_all_and_may_be_sent_again(
    proxy: FaultProxy, client: redis.Redis, name: str, fault: Fault
) -> None:
    command = COMMANDS[name]
    calm, shaken = VirtualQueue(client, queue="calm"), VirtualQueue(client, queue="shaken")
    leases = begun(calm), begun(shaken)
    assert (before := shaken.snapshot()) == calm.snapshot()
    with through(proxy, fault) as unlucky, through(proxy) as lucky:
        proxy.inject(fault, only=b"EVAL")
        with pytest.raises(EngineUnavailable, match="not available") as error:
            command(shaken.through(unlucky), leases[1])
        assert isinstance(error.value.__cause__, redis.TimeoutError if fault.is_silent else redis.ConnectionError)
        wait_until(lambda: proxy.met == {fault: 1})
        once = command(calm.queue, leases[0]) if fault.runs else None
        after_one = calm.snapshot()
        assert shaken.snapshot() == (after_one if fault.runs else before)
        expected = command(calm.queue, leases[0])
        same = unlucky if not fault.is_silent else lucky
        assert command(shaken.through(same), leases[1]) == expected
    assert shaken.snapshot() == calm.snapshot()
    assert shaken.wakes() == calm.wakes()
    if fault.runs and name not in COSTS_A_LEASE:
        assert shaken.snapshot() == after_one, "sent twice is done once"
        assert expected == (once if name in {"stats", "peek"} else 0)


@pytest.mark.parametrize("condition", ["swallow", "refuse"])
def test_while_the_line_is_dead_every_command_gives_up_by_itself_and_then_all_go_on(
    proxy: FaultProxy, client: redis.Redis, condition: str
) -> None:
    calm, shaken = VirtualQueue(client, queue="calm"), VirtualQueue(client, queue="shaken")
    leases = begun(calm), begun(shaken)
    with through(proxy, Fault.STALL_BEFORE) as unlucky, through(proxy) as lucky:
        before = shaken.snapshot()
        getattr(proxy, condition)()
        if condition == "refuse":
            unlucky.connection_pool.disconnect()
        for command in COMMANDS.values():
            with pytest.raises(EngineUnavailable):
                command(shaken.through(unlucky), leases[1])
        assert shaken.snapshot() == before
        proxy.heal()
        for command in COMMANDS.values():
            assert command(shaken.through(lucky), leases[1]) == command(calm.queue, leases[0])
    assert shaken.snapshot() == calm.snapshot()


@pytest.mark.parametrize("fault", [Fault.HALF_SENT, Fault.RESET_AFTER, Fault.STALL_AFTER], ids=str)
def test_a_round_trip_over_many_queues_is_repeated_until_it_is_whole(
    proxy: FaultProxy, client: redis.Redis, fault: Fault
) -> None:
    changes = [Change(name, LINE, id, id) for name in "abcd" for id in range(1, 6)]
    changes += [Change("b", LINE, 1, None), Change("c", LINE, 2, 99), Change("d", LINE, 3, 1, earlier_only=True)]
    engine = Engine(client)
    engine.apply([Change("b", LINE, 9, 9), Change("c", LINE, 2, 3)])
    with through(proxy, fault) as unlucky:
        proxy.inject(fault, only=b"EVAL")
        with pytest.raises(EngineUnavailable):
            Engine(unlucky).apply(changes)
        wait_until(lambda: proxy.met == {fault: 1})
    engine.apply(changes)
    plain = {id: id for id in range(1, 6)}
    expected = {"a": plain, "b": {id: id for id in (2, 3, 4, 5, 9)}, "c": plain | {2: 99}, "d": plain | {3: 1}}
    assert {name: dict(one_line(engine, name).peek()) for name in "abcd"} == expected


def test_a_lost_reserve_costs_one_lease_and_one_delivery(proxy: FaultProxy, client: redis.Redis) -> None:
    virtual = VirtualQueue(client)
    virtual.queue.ensure([(1, NOW)])
    for deliveries, fault in enumerate([Fault.RESET_AFTER, Fault.HALF_ANSWERED], start=1):
        with through(proxy) as unlucky:
            proxy.inject(fault, only=b"EVAL")
            with pytest.raises(EngineUnavailable):
                virtual.through(unlucky).reserve(5, 1000)
            assert virtual.through(unlucky).reserve(5, 1000).entries == ()
        virtual.advance(999)
        assert virtual.queue.reserve(5, 1).entries == ()
        virtual.advance(1)
        assert virtual.scores()[1] % 16 == deliveries
    assert virtual.queue.reserve(5, 1000).entries == (Entry(1, 3),)


def test_a_reset_is_no_polite_end(shared_server: RedisProcess) -> None:
    with FaultProxy(shared_server.socket) as proxy:
        proxy.inject(Fault.RESET_BEFORE)
        with socket.create_connection(("127.0.0.1", proxy.port)) as raw:
            raw.sendall(b"PING\r\n")
            with pytest.raises(ConnectionResetError):
                raw.recv(1)
