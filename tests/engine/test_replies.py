"""Replies that are not what the scripts return: an EngineError, for which callers fall back to the ledger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from django_delayq.engine.engine import Engine
from django_delayq.engine.records import Change
from django_delayq.engine.scripts import Caller, read_texts
from django_delayq.exceptions import EngineError, EngineUnavailable
from tests.engine.lines import LINE, OneLine, lease_of, one_line
from tests.engine.virtual import VirtualQueue

pytestmark = pytest.mark.slow

REPLIES = ["5", "false", "'x'", "{}", "{1}", "{{1}, {2}}", "{1, 2, 3, 4, 5, 6}", "{'x', 'x', 'x', 'x', {'x'}, {'x'}}"]
REPLIES += ["{1, 0, {}, {{3, {'99999999999999999999'}, {1}}}}", "{1, 0, {}, {{3, {'1'}, {}}}}"]
REPLIES += [
    "{1, 0, {'x'}, {{-1, {}, {}}}}",
    "{1, 0, {'x', 'y'}, {{-1, {}, {}}}}",
    "{1, 0, {}, {{-1, {}, {}}, {-1, {}, {}}}}",
]
USES: dict[str, Callable[[OneLine], Any]] = {
    "reserve": lambda queue: queue.reserve(1, 1000),
    "extend": lambda queue: queue.extend(lease_of(2**52), 1000),
    "stats": lambda queue: queue.stats(),
}


@pytest.mark.parametrize("reply", REPLIES)
@pytest.mark.parametrize("command", USES)
def test_a_reply_of_another_form_is_an_error_of_redis(virtual: VirtualQueue, command: str, reply: str) -> None:
    texts = {**read_texts(), command: f"return {reply}"}
    queue = one_line(Engine(virtual.client, caller=Caller(virtual.client, texts)))
    with pytest.raises(EngineError) as raised:
        USES[command](queue)
    assert not isinstance(raised.value, EngineUnavailable)


@pytest.mark.parametrize("reply", ["{}", "false", "'x'"])
def test_a_count_that_is_no_number_is_an_error_of_redis(virtual: VirtualQueue, reply: str) -> None:
    texts = dict.fromkeys(read_texts(), f"return {reply}")
    engine = Engine(virtual.client, caller=Caller(virtual.client, texts))
    queue = one_line(engine)
    for call in (
        lambda: queue.ensure([(1, 1)]),
        lambda: queue.acknowledge(lease_of(2**52, ids=[1])),
        lambda: queue.release(lease_of(2**52, ids=[1]), [(1, 1)]),
        lambda: engine.count("brake", 1, 1000),
    ):
        with pytest.raises(EngineError):
            call()
    engine.apply([Change("default", LINE, 1, 5)])
