"""Many steps and many shards on every kind of Redis. Whatever takes `virtual` runs there too."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from django_delayq.engine.engine import Engine
from django_delayq.engine.scripts import Client
from tests.engine.model import machine
from tests.engine.test_engine import walk_the_basic_path
from tests.engine.test_model import COMMON

pytestmark = pytest.mark.slow

FEW = settings(max_examples=6, stateful_step_count=25, **COMMON)


@pytest.mark.parametrize("shards", [1, 8])
def test_the_basic_path_runs_everywhere(anywhere: Client, shards: int) -> None:
    engine = Engine(anywhere, shards=shards)
    walk_the_basic_path(engine)
    engine.close()


@pytest.mark.parametrize("shards", [1, 8])
def test_lines_that_nobody_owns_are_removed_everywhere(anywhere: Client, shards: int) -> None:
    engine = Engine(anywhere, shards=shards)
    client: Any = anywhere
    for queue in engine.queues(["a"]):
        queue.ensure("own {line}", [(1, 5)])
        for name in (b"of.none", b"{brace", b"\xff", b"a" * 5000):
            client.zadd(queue.keys.heads, {name: -1})
            client.zadd(queue.keys.named("").encode() + name, {"1": 1})
        assert [queue.remove_foreign(["own {line}"]) for _ in range(2)] == [4, 0]
        assert client.zrange(queue.keys.heads, 0, -1) == [b"own%20%7Bline%7D"]
        assert not any(client.exists(queue.keys.named(name)) for name in ("of.none", "{brace"))
        assert queue.peek() == [(1, 5)]
    engine.close()


def test_the_model_holds_everywhere(anywhere: Client) -> None:
    run_state_machine_as_test(machine(anywhere), settings=FEW)
