"""Counters of the last slices of time, such as that of a brake."""

from __future__ import annotations

import pytest
import redis

from django_delayq.engine.engine import Engine
from django_delayq.engine.records import SLICES, counter_key
from django_delayq.engine.scripts import Client
from django_delayq.exceptions import EngineError

HOUR_MS = 3_600_000


def test_a_counter_adds_up_everywhere(anywhere: Client) -> None:
    engine = Engine(anywhere)
    assert [engine.count("shop.order.cancel_unpaid:0", amount, HOUR_MS) for amount in (1, 2, 50)] == [1, 3, 53]
    assert engine.count("another", 1, HOUR_MS) == 1
    engine.close()


def test_only_the_present_slice_and_the_complete_ones_before_it_count(client: redis.Redis) -> None:
    engine, key = Engine(client, prefix="p"), counter_key("p", "c")
    present = client.time()[0] * 1000 // HOUR_MS
    ages = {SLICES: 1000, SLICES - 1: 7, 1: 5, 0: 3, -1: 1000}
    client.set(key, " ".join(f"{present - age}:{count}" for age, count in ages.items()))
    assert engine.count("c", 2, HOUR_MS) == 7 + 5 + 3 + 2
    kept = client.get(key)
    assert kept == f"{present - SLICES + 1}:7 {present - 1}:5 {present}:5".encode()
    assert 0 < client.pttl(key) <= SLICES * HOUR_MS


def test_foreign_data_counts_as_nothing(client: redis.Redis) -> None:
    engine, key = Engine(client, prefix="p"), counter_key("p", "c")
    client.set(key, b"\xff no counter")
    assert engine.count("c", 2, HOUR_MS) == 2
    client.delete(key)
    client.zadd(key, {"member": 1})
    with pytest.raises(EngineError):
        engine.count("c", 2, HOUR_MS)
    assert client.zcard(key) == 1


def test_names_and_prefixes_of_any_kind_do_not_share_a_key() -> None:
    given = [("a", "b:c"), ("a:count:b", "c"), ("a", "b%3Ac"), ("{a}", "b"), ("a", "{b}")]
    assert len({counter_key(*each) for each in given}) == len(given)
