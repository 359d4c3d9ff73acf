"""The Redis user in the docs: everything works with it, nothing is refused, and every rule is needed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import redis

from django_delayq.engine.engine import Engine
from django_delayq.exceptions import EngineError
from django_delayq.redis_clients.clients import WORKER, make_client
from django_delayq.worker.sweep import try_claim_turn
from tests.engine.lines import one_line
from tests.engine.redis_process import RedisProcess
from tests.engine.topologies import SERVICE, SentinelProcess

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / "docs" / "redis.md").read_text(encoding="utf-8")
RULES = re.findall(r"[+~&]\S+", re.findall(r"```text\nACL SETUSER(.*?)```", PAGE, re.DOTALL)[0])
ON_A_CLUSTER = ["+cluster|slots", "+command", "+asking"]
ON_A_SENTINEL = ["+sentinel|masters"]
OPTIONAL = {"client|setinfo"}


def admit(client: redis.Redis, rules: Sequence[str]) -> None:
    client.execute_command("ACL", "SETUSER", "shop", "reset", "resetchannels", "on", ">secret", *rules)
    client.execute_command("ACL", "LOG", "RESET")


def refused(client: redis.Redis) -> set[str]:
    return {str(entry["object"]) for entry in client.acl_log()} - OPTIONAL


def use_everything(url: str, owner: redis.Redis) -> None:
    """All that workers and views ever ask of Redis, of one that knows no scripts, and with foreign data in the way."""
    owner.script_flush()
    engine = Engine(make_client(url, WORKER), prefix="delayq")
    with contextlib.closing(engine):  # also when a right is missing: no thread may remain
        engine.ping()
        for _ in range(2):  # the second finds it taken
            try_claim_turn(engine, "sweep", timedelta(seconds=1))
        owner.set(one_line(engine, "q").entries, "mine")
        wakeup = engine.wakeup(["q"])
        wakeup.start()
        assert wakeup.wait(60)
        queue = one_line(engine, "q")
        queue.ensure([(id, 5) for id in range(1, 9)])
        queue.ensure([(1, 4)])
        queue.reschedule([(2, 2)])
        queue.remove([3])
        lease = queue.reserve(8, 60_000).lease
        assert lease is not None
        lease, _ = queue.extend(lease, 60_000)
        assert queue.release(lease, [(1, 9)]) == queue.acknowledge(lease, [2]) == 1
        assert queue.acknowledge(lease) == 5
        assert queue.stats().total == len(queue.peek()) == 1
        owner.zadd(queue.keys.heads, {"foreign": 1})
        assert queue.queue.remove_foreign([queue.line]) == 1
        assert [engine.count("brake", 2, 60_000) for _ in range(2)] == [2, 4]


@pytest.fixture
def url(shared_server: RedisProcess, client: redis.Redis) -> Iterator[str]:
    yield f"redis://shop:secret@127.0.0.1:{shared_server.port}/0"
    client.acl_deluser("shop")


def test_everything_works_as_the_documented_user_and_nothing_is_refused(
    shared_server: RedisProcess, client: redis.Redis, url: str
) -> None:
    assert len(RULES) == 20
    assert all(rule.replace("|", "\\|") in PAGE for rule in [*ON_A_CLUSTER, *ON_A_SENTINEL])
    admit(client, RULES)
    use_everything(url, client)
    assert refused(client) == set()
    admit(client, [*RULES, "+select"])
    with shared_server.client(db=1) as owner:
        use_everything(url[:-1] + "1", owner)
    assert refused(client) == set(), "another database takes one rule more"


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_is_there_in_vain(client: redis.Redis, url: str, rule: str) -> None:
    admit(client, [other for other in RULES if other != rule])
    with contextlib.suppress(EngineError, AssertionError):
        use_everything(url, client)
    assert refused(client), "the library never needed it"


def test_sentinels_that_ask_for_a_login_are_asked_one_thing(client: redis.Redis, shared_server: RedisProcess) -> None:
    with SentinelProcess(shared_server, 1) as sentinel, sentinel.client(tcp=True) as owner:
        admit(owner, ON_A_SENTINEL)
        login = "sentinel_username=shop&sentinel_password=secret"
        engine = Engine(make_client(f"redis+sentinel://127.0.0.1:{sentinel.port}/{SERVICE}/0?{login}", WORKER))
        engine.ping()
        engine.close()
        assert refused(owner) == set()
