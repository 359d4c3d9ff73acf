"""The Lua files: what their heads declare is what they use, and the loader finds every piece."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest
import redis

from django_delayq.engine.records import QueueKeys
from django_delayq.engine.scripts import Call, Caller, digest_of, read_texts

FOLDER = files("django_delayq.engine") / "lua"
TEXTS = read_texts()
COMMANDS = sorted(TEXTS)
QUEUE = QueueKeys.of("delayq", "default", 0, 1)
KEYS = (QUEUE.heads, QUEUE.line("a"))


def raw(name: str) -> str:
    return (FOLDER / f"{name}.lua").read_text(encoding="utf-8")


def highest(table: str, text: str) -> int:
    """Return the highest index of KEYS or ARGV in a source."""
    return max((int(number) for number in re.findall(rf"\b{table}\[(\d+)\]", text)), default=0)


def test_every_file_is_a_command_or_a_piece_that_is_used() -> None:
    assert {file.name for file in FOLDER.iterdir() if file.is_file()} == {f"{name}.lua" for name in COMMANDS}
    calls = re.findall(r'"([a-z_]+)"', (files("django_delayq.engine") / "engine.py").read_text(encoding="utf-8"))
    assert set(COMMANDS) - {"set_aside"} <= set(calls)
    used = {piece for name in COMMANDS for piece in re.findall(r"^--- include (\w+)$", raw(name), re.MULTILINE)}
    assert {file.name for file in (FOLDER / "include").iterdir()} == {f"{piece}.lua" for piece in used}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_at_most_sixty_lines(name: str) -> None:
    assert len(raw(name).splitlines()) <= 60


@pytest.mark.parametrize("name", COMMANDS)
def test_the_head_declares_what_the_command_uses(name: str) -> None:
    head = dict(re.findall(r"^-- (KEYS|ARGV|RETURN)(?: (.*))?$", raw(name), re.MULTILINE))
    assert list(head) == ["KEYS", "ARGV", "RETURN"]
    body = re.sub(r"^--.*$", "", TEXTS[name], flags=re.MULTILINE)
    for table, several in {"KEYS": r"#KEYS|\(KEYS[,)]|KEYS\[i", "ARGV": r"#ARGV|unpack\(ARGV|ARGV\[\(?i"}.items():
        fixed = head[table].split("[")[0].split()
        is_passed_on = table == "KEYS" and "(KEYS, " in body  # to a piece that takes all of them
        assert highest(table, body) == len(fixed)
        assert is_passed_on or bool(re.search(several, body)) == ("[" in head[table])


@pytest.mark.parametrize("name", COMMANDS)
def test_no_include_is_left_and_none_is_put_in_twice(name: str) -> None:
    assert "--- include" not in TEXTS[name]
    functions = re.findall(r"local function (\w+)", TEXTS[name])
    assert len(functions) == len(set(functions))


@pytest.mark.parametrize("name", COMMANDS)
def test_the_digest_is_the_servers(client: redis.Redis, name: str) -> None:
    assert client.script_load(TEXTS[name]) == digest_of(TEXTS[name])


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


def test_the_error_of_one_command_leaves_the_others_their_replies(client: redis.Redis) -> None:
    client.set(KEYS[1], "mine")
    other = (QUEUE.heads, QUEUE.line("b"))
    replies = Caller(client).run([Call("remove", other, ("1",)), Call("remove", KEYS, ("1",))])
    assert replies[0] == 0
    assert isinstance(replies[1], redis.ResponseError)


def test_a_command_that_is_no_lua_is_an_error_reply(client: redis.Redis) -> None:
    broken = Caller(client, {"stats": "this is not Lua"})
    (reply,) = broken.run([Call("stats", KEYS[1:])])
    assert isinstance(reply, redis.ResponseError)
