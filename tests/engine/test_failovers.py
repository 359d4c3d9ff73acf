"""Servers change places under load: the engine finds them again by itself, and every id is accounted for.

The clients are those that the library makes of its URLs. Ids that were lost with a master before their replication
are put in again at the end, as the sweep does from the ledger.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import count

import pytest
from redis.crc import key_slot

from django_delayq.engine.engine import Engine
from django_delayq.engine.records import Change
from django_delayq.exceptions import EngineUnavailable
from django_delayq.redis_clients.clients import WORKER, make_client
from tests.engine.lines import LINE, one_line
from tests.engine.load import loaded
from tests.engine.topologies import Clustered, Watched, clustered, watched
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

SHARDS = 6
FAR_MS = 2**41


@pytest.fixture(scope="module")
def servers() -> Iterator[Watched]:
    with watched() as found:
        yield found


@pytest.fixture(scope="module")
def nodes() -> Iterator[Clustered]:
    with clustered() as found:
        yield found


def engine_of(url: str, shards: int = 1) -> Engine:
    return Engine(make_client(url, WORKER), shards=shards)


def is_woken(engine: Engine) -> None:
    """Wait until a wakeup receives the messages of added entries."""
    ids = count(1)
    wakeup = engine.wakeup(["alarm"])
    wakeup.start()
    assert wakeup.wait(60), "it has subscribed"

    def is_told() -> bool:
        with contextlib.suppress(EngineUnavailable):
            while wakeup.wait(0.2):
                pass
            engine.apply([Change("alarm", LINE, 1, FAR_MS - next(ids))])
        return wakeup.wait(1)

    wait_until(is_told)
    wakeup.close()


@pytest.mark.timeout(180)
def test_sentinels_move_the_master_by_command_and_by_its_death(servers: Watched) -> None:
    engine = engine_of(servers.url)
    with loaded(engine) as load:
        load.await_progress()
        for change in (servers.fail_over, servers.kill_master):
            change()
            load.await_progress()
            is_woken(engine)
    engine.close()


@pytest.mark.timeout(180)
def test_a_cluster_changes_its_masters_by_command_and_by_death(nodes: Clustered) -> None:
    engine = engine_of(nodes.url, SHARDS)
    with loaded(engine) as load:
        load.await_progress()
        nodes.fail_over(0)
        load.await_progress()
        is_woken(engine)
        nodes.kill_master(1)
        load.await_progress()
        is_woken(engine)
    engine.close()


@pytest.mark.timeout(180)
def test_slots_that_move_under_load_take_their_entries_along(nodes: Clustered) -> None:
    engine = engine_of(nodes.url, SHARDS)
    with loaded(engine) as load:
        load.await_progress()
        for _ in range(2):
            moved = 0
            for shard in range(SHARDS):
                migration = nodes.migrating(slot_of(engine, "q", shard))
                migration.begin()
                moved += migration.move_keys()
                migration.finish()
            assert moved >= SHARDS
            load.await_progress()
    engine.close()


@pytest.mark.timeout(180)
def test_while_a_slot_is_on_its_way_its_queue_takes_entries_and_lets_them_go(nodes: Clustered) -> None:
    engine = engine_of(nodes.url, SHARDS)
    queue = one_line(engine, "moving")
    queue.ensure([(1, 1), (2, 2)])
    lease = queue.reserve(1, 60_000).lease
    assert lease is not None
    migration = nodes.migrating(slot_of(engine, "moving", 0))

    def use(id: int) -> None:
        assert queue.ensure([(id, FAR_MS)]) == 1
        assert queue.reschedule([(id, FAR_MS + 1)]) == 1
        assert queue.remove([id]) == 1
        assert queue.stats().total == 2

    migration.begin()
    use(10)
    assert migration.move_keys() == 3
    use(11)
    assert queue.release(lease, [(1, 7)]) == 1
    migration.finish()
    use(12)
    assert queue.peek() == [(2, 2), (1, 7)]
    queue.remove([1, 2])
    engine.close()


@pytest.mark.timeout(180)
def test_while_only_one_of_its_keys_is_there_a_queue_whose_slot_is_on_its_way_gives_nothing_out(
    nodes: Clustered,
) -> None:
    """A probe fails too; otherwise a worker would alternate between success and failure."""
    engine = engine_of(nodes.url, SHARDS)
    queue = one_line(engine, "lopsided")
    queue.ensure([(1, 1)])
    queue.probe()
    migration = nodes.migrating(slot_of(engine, "lopsided", 0))
    migration.begin()
    takings: list[Callable[[], object]] = [lambda: queue.reserve(5, 60_000), queue.probe]
    for take in takings:
        with pytest.raises(EngineUnavailable, match="a slot of the cluster is being moved"):
            take()
    assert queue.ensure([(1, 0)]) == 1
    assert migration.move_keys() == 2
    migration.finish()
    queue.probe()
    assert [entry.id for entry in queue.reserve(5, 60_000).entries] == [1]
    queue.remove([1])
    engine.close()


def slot_of(engine: Engine, name: str, shard: int) -> int:
    return key_slot(one_line(engine, name, shard).entries.encode())
