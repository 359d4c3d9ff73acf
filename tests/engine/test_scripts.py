"""Commands are sent by digest and in order, and a reply of another form is an error of Redis."""

from __future__ import annotations

import pytest
import redis

from django_delayq.engine.engine import Engine
from django_delayq.engine.records import Change, QueueKeys
from django_delayq.engine.scripts import Call, Caller, read_texts
from django_delayq.exceptions import EngineError, EngineUnavailable
from tests.engine.lines import LINE, lease_of, one_line
from tests.engine.virtual import VirtualQueue

TEXTS = read_texts()
QUEUE = QueueKeys.of("delayq", "default", 0, 1)
KEYS = (QUEUE.heads, QUEUE.line("a"))


def test_commands_are_sent_by_digest_once_the_server_knows_them(client: redis.Redis) -> None:
    caller, calls = Caller(client), [Call("stats", KEYS[1:]), Call("remove", KEYS, ("1",))]
    client.script_flush()
    caller.run(calls)
    client.config_resetstat()
    caller.run(calls)
    caller.run(calls[:1])
    stats = client.info("commandstats")
    assert stats["cmdstat_evalsha"]["calls"] == 3
    assert "cmdstat_eval" not in stats


def test_from_a_lost_script_on_all_commands_are_sent_again_in_order(client: redis.Redis) -> None:
    engine = Engine(client)
    queue = one_line(engine)
    for _ in range(2):
        client.script_flush()
        queue.remove([1])  # of two scripts the server knows only the later one
        engine.apply([Change("default", LINE, 7, 5, earlier_only=True), Change("default", LINE, 7, None)])
        assert queue.peek() == [], "the removal came last"


def test_the_error_of_one_command_leaves_the_others_their_replies(client: redis.Redis) -> None:
    client.set(KEYS[1], "mine")
    caller = Caller(client, {**TEXTS, "stats": "this is not Lua"})
    other = (QUEUE.heads, QUEUE.line("b"))
    removed, blocked, broken = caller.run(
        [Call("remove", other, ("1",)), Call("remove", KEYS, ("1",)), Call("stats", KEYS[1:])]
    )
    assert removed == 0
    assert isinstance(blocked, redis.ResponseError) and isinstance(broken, redis.ResponseError)


REPLIES = [
    "5", "false", "'x'", "{}", "{1, 2, 3, 4, 5, 6}", "{1, 0, {}, {{3, {'99999999999999999999'}, {1}}}}",
    "{1, 0, {}, {{3, {'1'}, {}}}}", "{1, 0, {'x'}, {{-1, {}, {}}}}", "{1, 0, {}, {{-1, {}, {}}, {-1, {}, {}}}}",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("reply", REPLIES)
def test_a_reply_of_another_form_is_an_error_of_redis(virtual: VirtualQueue, reply: str) -> None:
    texts = dict.fromkeys(read_texts(), f"return {reply}")
    queue = one_line(Engine(virtual.client, caller=Caller(virtual.client, texts)))
    for use in (lambda: queue.reserve(1, 1000), lambda: queue.extend(lease_of(2**52), 1000), queue.stats):
        with pytest.raises(EngineError) as raised:
            use()
        assert not isinstance(raised.value, EngineUnavailable)
