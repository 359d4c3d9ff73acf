"""Names and numbers: any text as a queue, any id in its shard, and what is refused before it is sent."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from django_delayq.engine.engine import Engine
from django_delayq.engine.records import Change, QueueKeys, counter_key, quoted, turn_key, unquoted

ODD_NAMES = [
    "", " ", "a b", "a\nb", "{", "}", "{}", "}{", "a}.0", "{a}", "a.0", "a", "a:z", "%7B", "ü", "\x00", "\ud800",
]  # fmt: skip


@pytest.mark.parametrize("shards", [1, 8])
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


def test_counters_share_no_key_and_all_keys_of_a_prefix_match_one_pattern_of_an_acl() -> None:
    given = [("a", "b:c"), ("a:count:b", "c"), ("a", "b%3Ac"), ("{a}", "b"), ("a", "{b}")]
    assert len({counter_key(*each) for each in given}) == len(given)
    for prefix, shown in [("shop:eu", "shop:eu"), ("a{b}", "a%7Bb%7D"), ("50%", "50%25")]:
        keys = [*QueueKeys.of(prefix, "default", 0, 1), counter_key(prefix, "brake"), turn_key(prefix, "sweep")]
        assert all(key.startswith(f"{shown}:") for key in keys)


def test_shards_are_spread_evenly_over_the_slots_and_ids_over_the_shards(client: redis.Redis) -> None:
    for shards in (2, 3, 8, 64):
        slots = [key_slot(QueueKeys.of("delayq", "default", shard, shards).heads.encode()) for shard in range(shards)]
        assert [slot * shards // 16384 for slot in slots] == list(range(shards))
    engine = Engine(client, shards=8)
    counts = [0] * 8
    for id in range(1, 8001):
        counts[engine.shard_of(id)] += 1
    assert min(counts) > 900
    assert [engine.shard_of(id) for id in (1, 2, 3, 2**63 - 1)] == [7, 5, 3, 6], "as in every release"
    assert {Engine(client).shard_of(id) for id in range(100)} == {0}
    with pytest.raises(ValueError, match="is not one of"):
        QueueKeys.of("delayq", "default", 1, 1)
    with pytest.raises(ValueError, match="1 shard or more"):
        Engine(client, shards=0)


OUT_OF_RANGE: dict[type[Exception], list[Any]] = {
    ValueError: [(0, 1), (-1, 1), (2**63, 1), (1, -1), (1, 2**42)],
    TypeError: [("1", 1), (1.0, 1), (True, 1), (None, 1), (1, 1.5), (1, None), (1, True)],
}


def test_what_is_out_of_range_is_refused_before_anything_is_sent(client: redis.Redis) -> None:
    engine = Engine(client)
    queue = engine.queue("default", 0)
    for error, entries in OUT_OF_RANGE.items():
        for entry in entries:
            for act in (queue.ensure, queue.reschedule):
                with pytest.raises(error, match=r"id|due time"):
                    act("x", [*((id, 1) for id in range(1, 1500)), entry])
    for id, due_ms in [(1, 2**42), (-1, None)]:
        with pytest.raises(ValueError, match=r"id|due time"):
            engine.apply([Change("a", "x", 1, 5), Change("b", "x", id, due_ms)])
    assert client.keys("*") == []
