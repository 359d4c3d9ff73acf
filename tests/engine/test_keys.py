"""Names and numbers: any text as a queue, any id in its shard, and what is refused before it is sent."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from django_delayq.engine.engine import Engine
from django_delayq.engine.records import (
    Change,
    QueueKeys,
    counter_key,
    quoted,
    turn_key,
    type_of,
    unquoted,
)

ODD_NAMES = [
    "", " ", "a b", "a\nb", "{", "}", "{}", "}{", "a}.0", "{a}", "a.0", "a", "a:z", "%7B", "ü", "\x00", "\ud800",
]  # fmt: skip


@pytest.mark.parametrize("shards", [1, 3, 8])
def test_every_name_has_its_own_keys_all_in_one_slot(shards: int) -> None:
    seen: set[str] = set()
    for prefix in ["delayq", "a:b", "{x}", "delayq:{a.0}"]:
        for name in ODD_NAMES:
            for shard in range(shards):
                keys = QueueKeys.of(prefix, name, shard, shards)
                names = [*keys, *map(keys.line, ODD_NAMES)]
                assert len({key_slot(key.encode()) for key in names}) == 1
                assert all(key.isascii() and key.isprintable() and key.count("{") == 1 for key in names)
                assert seen.isdisjoint(names)
                seen |= set(names)


@given(st.lists(st.text(), min_size=2, max_size=2, unique=True))
def test_two_names_never_share_a_key(names: list[str]) -> None:
    first, second = (QueueKeys.of("delayq", name, 0, 1) for name in names)
    assert first.heads != second.heads
    assert first.line(names[0]) != first.line(names[1])
    assert [unquoted(quoted(name)) for name in names] == names


@pytest.mark.parametrize(("prefix", "quoted"), [("shop:eu", "shop:eu"), ("a{b}", "a%7Bb%7D"), ("50%", "50%25")])
def test_all_keys_of_a_prefix_match_one_pattern_of_an_acl(prefix: str, quoted: str) -> None:
    others = [counter_key(prefix, "brake"), turn_key(prefix, "sweep")]
    for key in (*QueueKeys.of(prefix, "default", 0, 1), *others):
        assert key.startswith(f"{quoted}:")


def test_queues_of_odd_names_hold_their_own_entries(client: redis.Redis) -> None:
    engine = Engine(client, shards=2)
    engine.apply([Change(name, name, id, id) for name in ODD_NAMES for id in range(1, 20)])
    for name in ODD_NAMES:
        held = {id: ms for shard in range(2) for id, ms in engine.queue(name, shard).peek()}
        heads = engine.queue(name, 0).reserve({}, 1).heads
        assert list(heads) == [name]
        assert held == {id: id for id in range(1, 20)}


def test_the_type_of_a_key_is_known_whatever_its_line_is_called() -> None:
    keys = QueueKeys.of("delayq", "q}:n", 0, 1)
    assert [type_of(key) for key in keys] == ["zset", "string", None]
    assert {type_of(keys.line(name)) for name in [*ODD_NAMES, "n", ":n", "h}:n"]} == {"zset"}
    others = [counter_key("delayq", "}:n"), turn_key("delayq", "sweep")]
    assert {type_of(key) for key in others} == {None}


@pytest.mark.parametrize("shards", [2, 3, 8, 64])
def test_shards_are_spread_evenly_over_the_slots(shards: int) -> None:
    slots = [key_slot(QueueKeys.of("delayq", "default", shard, shards).heads.encode()) for shard in range(shards)]
    assert [slot * shards // 16384 for slot in slots] == list(range(shards))


def test_ids_are_spread_over_the_shards_and_stay_there(client: redis.Redis) -> None:
    engine = Engine(client, shards=8)
    counts = [0] * 8
    for id in range(1, 8001):
        counts[engine.shard_of(id)] += 1
    assert min(counts) > 900
    assert [engine.shard_of(id) for id in (1, 2, 3, 2**63 - 1)] == [7, 5, 3, 6]
    assert {Engine(client).shard_of(id) for id in range(100)} == {0}


@pytest.mark.parametrize(("shard", "shards"), [(1, 1), (-1, 1), (0, 0), (8, 8)])
def test_a_shard_that_does_not_exist_is_refused(shard: int, shards: int) -> None:
    with pytest.raises(ValueError, match="is not one of"):
        QueueKeys.of("delayq", "default", shard, shards)


OUT_OF_RANGE: dict[type[Exception], list[Any]] = {
    ValueError: [(0, 1), (-1, 1), (2**63, 1), (1, -1), (1, 2**42)],
    TypeError: [("1", 1), (1.0, 1), (True, 1), (None, 1), (1, 1.5), (1, None), (1, True)],
}


@pytest.mark.parametrize(
    ("error", "entry"), [(error, entry) for error in OUT_OF_RANGE for entry in OUT_OF_RANGE[error]]
)
def test_what_is_out_of_range_is_refused_before_anything_is_sent(
    client: redis.Redis, entry: tuple[int, int], error: type[Exception]
) -> None:
    queue = Engine(client).queue("default", 0)
    entries = [*((id, 1) for id in range(1, 1500)), entry]
    with pytest.raises(error, match=r"id|due time"):
        queue.ensure("x", entries)
    with pytest.raises(error, match=r"id|due time"):
        queue.reschedule("x", entries)
    assert client.keys("*") == []


def test_a_change_out_of_range_stops_the_whole_round_trip(client: redis.Redis) -> None:
    with pytest.raises(ValueError, match="due time"):
        Engine(client).apply([Change("a", "x", 1, 5), Change("b", "x", 1, 2**42)])
    with pytest.raises(ValueError, match="id"):
        Engine(client).apply([Change("a", "x", 1, 5), Change("b", "x", -1, None)])
    assert client.keys("*") == []
