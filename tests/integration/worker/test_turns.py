"""A forged turn in Redis does not stop the workers from sweeping: without sweeps timeouts would be lost."""

from __future__ import annotations

from datetime import timedelta

import pytest
import redis

from django_delayq.engine.engine import Engine
from django_delayq.engine.records import turn_key
from django_delayq.worker import sweep
from django_delayq.worker.sweep import try_claim_turn
from tests.support.workers import worker_engine

pytestmark = pytest.mark.dialect

MINUTE = timedelta(minutes=1)


def test_a_turn_is_one_workers(engine: Engine) -> None:
    with worker_engine() as other:
        assert [try_claim_turn(one, "sweep", MINUTE) for one in (engine, other, engine)] == [True, False, False]
        assert try_claim_turn(other, "sync", MINUTE)


@pytest.mark.parametrize("forged", ["without end", "for ten minutes", "another type"])
def test_a_turn_that_lasts_longer_than_any_is_taken_back(
    engine: Engine, redis_client: redis.Redis, forged: str
) -> None:
    key = turn_key(engine.prefix, "sweep")
    if forged == "another type":
        redis_client.rpush(key, "x")
    else:
        redis_client.set(key, 1, ex=None if forged == "without end" else 600)
    assert [try_claim_turn(engine, "sweep", MINUTE) for _ in range(3)] == [True, False, False]
    assert 0 < redis_client.pttl(key) <= 60_000


def test_who_never_has_a_turn_takes_one_in_the_end(
    engine: Engine, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(sweep, "monotonic", lambda: now[0])

    def asked_after(seconds: float) -> bool:
        redis_client.set(turn_key(engine.prefix, "sweep"), 1, px=50_000)
        now[0] += seconds
        return try_claim_turn(engine, "sweep", MINUTE)

    turns = [asked_after(60.0) for _ in range(2 * sweep.MAX_MISSED + 2)]
    assert [number for number, turn in enumerate(turns) if turn] == [sweep.MAX_MISSED, 2 * sweep.MAX_MISSED]
