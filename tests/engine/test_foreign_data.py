"""Foreign data under the names of a queue is removed or renamed, logged once, and blocks no worker."""

from __future__ import annotations

import pytest
import redis

from django_delayq.engine.engine import Engine
from django_delayq.engine.scripts import Caller, read_texts
from django_delayq.exceptions import EngineError
from tests.engine.lines import Entry, lease_of, one_line
from tests.engine.virtual import VirtualQueue

pytestmark = pytest.mark.slow

WORDS = [
    "", "x", "0", "-1", "+1", "007", "1.0", "1e3", " 1", "1 ", "1\n", "1\x00", "0x10", "nan", "inf",
    str(2**63), str(2**64), "9" * 19 + "0", "१२", "b" * 1_000_000,
]  # fmt: skip
GARBAGE = [*(word.encode() for word in WORDS), b"\xff\xfe"]
SCORES = ["-inf", "inf", "-1", "-1e300", "1e300", "0", "0.5", "1024.25", str(2**53), str(2**53 + 2)]


def test_garbage_at_any_score_is_removed_counted_and_never_given_out(virtual: VirtualQueue) -> None:
    for score in SCORES:
        virtual.client.zadd(virtual.entries, dict.fromkeys(GARBAGE, score))
        virtual.queue.ensure([(5, virtual.now)])
        reserved = virtual.queue.reserve(1000, 1000)
        assert [entry.id for entry in reserved.entries] == [5]
        assert reserved.discarded == len(GARBAGE)
        assert reserved.next_due_ms == virtual.now + 1000
        assert virtual.queue.remove([5]) == 1


def test_one_reserve_looks_past_garbage_but_touches_a_thousand_members_at_most(virtual: VirtualQueue) -> None:
    virtual.client.zadd(virtual.entries, {f"x{n}": 1 for n in range(2500)})
    virtual.queue.ensure([(1, virtual.now)])
    found = [virtual.queue.reserve(1, 1000) for _ in range(3)]
    assert [reserved.discarded for reserved in found] == [1000, 1000, 500]
    assert [reserved.entries for reserved in found] == [(), (), (Entry(1, 1),)]
    assert found[0].next_due_ms == 0, "the caller learns that there is more at once"


COMMANDS = {
    "ensure": lambda queue: queue.ensure([(1, 0)]) == 1,
    "reschedule": lambda queue: queue.reschedule([(1, 0)]) == 1,
    "remove": lambda queue: queue.remove([1]) == 0,
    "reserve": lambda queue: queue.reserve(1, 1000).entries == (),
    "stats": lambda queue: queue.stats().total == 0,
    "peek": lambda queue: queue.peek() == [],
    "acknowledge": lambda queue: queue.acknowledge(lease_of(2**52, ids=[1])) == 0,
    "release": lambda queue: queue.release(lease_of(2**52, ids=[1]), [(1, 0)]) == 0,
    "extend": lambda queue: queue.extend(lease_of(2**52, ids=[1]), 1000)[1] == 0,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_key_of_another_type_is_moved_aside_and_the_command_works(
    client: redis.Redis, command: str, caplog: pytest.LogCaptureFixture
) -> None:
    client.connection_pool.connection_kwargs["decode_responses"] = command == "ensure"
    client.connection_pool.disconnect()
    queue = one_line(Engine(client))
    client.set(queue.entries, "mine")
    assert COMMANDS[command](queue)
    (aside,) = client.keys("*foreign*")
    assert client.get(aside) in (b"mine", "mine")
    assert [record.__dict__["event"] for record in caplog.records] == ["foreign_key"]


def test_a_counter_of_another_type_is_moved_aside_and_the_lease_is_given(client: redis.Redis) -> None:
    queue = one_line(Engine(client))
    queue.ensure([(1, 0)])
    client.rpush(queue.keys.counter, "mine")
    reserved = queue.reserve(1, 1000)
    assert reserved.lease is not None
    client.delete(queue.keys.counter)
    client.rpush(queue.keys.counter, "mine too")
    lease, count = queue.extend(reserved.lease, 1000)
    assert (count, queue.acknowledge(lease)) == (1, 1)
    assert len(client.keys("*:n:foreign:*")) == 2


def test_each_foreign_key_gets_a_name_of_its_own_and_who_writes_one_all_the_time_gets_an_error(
    client: redis.Redis,
) -> None:
    queue = one_line(Engine(client))
    for value in range(20):  # in one millisecond
        client.set(queue.entries, value)
        queue.ensure([(1, 1)])
        client.delete(queue.entries)
    kept = [client.get(name) for name in client.keys("*:foreign:*")]
    assert sorted(int(value or -1) for value in kept) == list(range(20))
    # Renaming without effect simulates a client that always writes the key again first.
    queue = one_line(Engine(client, caller=Caller(client, {**read_texts(), "set_aside": "return {}"})))
    client.set(queue.entries, "mine")
    with pytest.raises(EngineError, match="WRONGTYPE"):
        queue.ensure([(1, 1)])
    assert client.get(queue.entries) == b"mine"
    refused = Caller(client, {**read_texts(), "set_aside": "return redis.error_reply('ERR no')"})
    with pytest.raises(EngineError, match="no"):
        one_line(Engine(client, caller=refused)).ensure([(1, 1)])
