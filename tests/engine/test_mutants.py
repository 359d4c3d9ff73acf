"""The mutation gate: each small mistake planted in the Lua files must be caught by the model or by a unit test.

A mutant that survives means that a line of Lua could be broken without any test noticing.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from django_delayq.engine.engine import Engine
from django_delayq.engine.scripts import Caller, read_texts
from django_delayq.exceptions import EngineUnavailable
from tests.engine import test_bounds, test_faults, test_foreign_data, test_lines
from tests.engine.lines import one_line
from tests.engine.model import machine
from tests.engine.virtual import VirtualQueue

pytestmark = pytest.mark.slow

# file under lua/, a piece that it contains once, its replacement
LEASE = "include/lease.lua"
MUTANTS = {
    "leases of one millisecond share a token": ("include/token.lua", "(last + step) % 64", "0"),
    "a token still in use is given out": ("include/token.lua", "DELIVERIES - 1)) == 0", "DELIVERIES - 1)) >= 0"),
    "the counter is not kept": ("include/token.lua", "redis.call('SET', counter, text(seq))", ""),
    "the ms of a score keeps the lease bit": ("include/score.lua", "(score % LEASED) / MS", "score / MS"),
    "fractions count as ours": ("include/score.lua", " and score % 1 == 0", ""),
    "negative scores count as ours": ("include/score.lua", "score >= 0 and ", ""),
    "numbers lose their last digits": ("include/score.lua", "string.format('%.0f', number)", "tostring(number)"),
    "ids of twenty digits are taken": ("include/ids.lua", "#member > 19", "#member > 20"),
    "ids beyond 2^63 are taken": ("include/ids.lua", " or member <= '9223372036854775807'", " or true"),
    "ids with a leading zero are taken": ("include/ids.lua", "'^[1-9]%d*$'", "'^%d+$'"),
    "the wake-up is forgotten": ("include/wake.lua", "if after and", "if false and"),
    "the wake-up comes only for the first entry": (
        "include/wake.lua", "(not before or ms_of(after) < ms_of(before))", "not before",
    ),
    "every change wakes": ("include/wake.lua", "ms_of(after) < ms_of(before)", "true"),
    "the next time forgets leases": ("include/head.lua", "local only = waiting or leased", "local only = waiting"),
    "the next time is the later one": ("include/head.lua", "math.min", "math.max"),
    "ensure overwrites": ("ensure.lua", "'NX', unpack(ARGV, 4)", "unpack(ARGV, 4)"),
    "ensure never moves": ("ensure.lua", "wanted < held - deliveries", "wanted > held - deliveries"),
    "ensure may move a later duplicate over an earlier one": ("ensure.lua", "'XX', 'LT', 'CH'", "'XX', 'CH'"),
    "ensure moves leased entries": ("ensure.lua", "held < LEASED and wanted", "wanted"),
    "ensure forgets deliveries": ("ensure.lua", "text(wanted + deliveries)", "text(wanted)"),
    "ensure believes in every lease": ("ensure.lua", "if held >= no_lease", "if false"),
    "ensure does not wake": ("ensure.lua", "wake_if_earlier(KEYS[2], ARGV[1], head)", ""),
    "reschedule keeps leases": ("reschedule.lua", "'CH', unpack", "'CH', 'LT', unpack"),
    "reschedule does not wake": ("reschedule.lua", "wake_if_earlier(KEYS[2], ARGV[1], head)", ""),
    "remove takes the first id only": ("remove.lua", "unpack(ARGV)", "ARGV[1]"),
    "reserve gives out the next millisecond": (
        LEASE, "(now + tonumber(ARGV[2])) * MS + MS - 1", "(now + tonumber(ARGV[2])) * MS + MS",
    ),
    "reserve is a millisecond late": (
        LEASE, "(now + tonumber(ARGV[2])) * MS + MS - 1", "(now + tonumber(ARGV[2])) * MS - 1",
    ),
    "reserve ignores ahead_ms": (LEASE, "now + tonumber(ARGV[2])", "now"),
    "a lease ends a millisecond late": (
        LEASE, "lease(text(LEASED), LEASED + now * MS + MS - 1)", "lease(text(LEASED), LEASED + now * MS - 1)",
    ),
    "lapsed leases are lost": (LEASE, "lease(text(LEASED), LEASED + now * MS + MS - 1)\n", ""),
    "deliveries are not counted": (LEASE, "score % DELIVERIES + 1", "1"),
    "deliveries overflow into the token": (LEASE, "DELIVERIES - 1)\n          ids", "DELIVERIES)\n          ids"),
    "nothing is leased": (LEASE, "redis.call('ZADD', line, 'XX', unpack(moves))", ""),
    "the limit does not span both kinds": (LEASE, "math.min(limit - #ids, budget)", "math.min(limit, budget)"),
    "junk stops a reserve": (LEASE, "#junk == 0 or ", "true or "),
    "junk is not counted": (LEASE, "discarded = discarded + redis", "redis"),
    "junk beyond all times stays": (LEASE, "discard(line, redis.call(", "local _ = (redis.call("),
    "junk is bounded by nothing": (LEASE, "budget = budget - #members", ""),
    "acknowledging ignores the lease": (
        "acknowledge.lua", "score >= token and score < token + DELIVERIES", "score >= 0",
    ),
    "acknowledging reaches the next lease": (
        "acknowledge.lua", "token + DELIVERIES then", "token + 2 * DELIVERIES then",
    ),
    "release ignores the lease": ("release.lua", "score >= token and score < token + DELIVERIES", "score >= 0"),
    "release counts the delivery": ("release.lua", "score - token - 1", "score - token"),
    "release does not wake": ("release.lua", "wake_if_earlier(KEYS[2], ARGV[1], head)", ""),
    "extend keeps the token": ("extend.lua", "text(new + (held[i + 1] - old))", "text(old + (held[i + 1] - old))"),
    "extend reaches the next lease": ("extend.lua", "old + DELIVERIES - 1", "old + DELIVERIES + 15"),
    "extend forgets deliveries": ("extend.lua", "text(new + (held[i + 1] - old))", "text(new + 1)"),
    "extend loses the lowest bit": ("extend.lua", "text(new + (held[i + 1] - old))", "text(new + held[i + 1] - old)"),
    "stats count lapsed leases as live": ("stats.lua", "'(' .. text(LEASED + till)", "text(LEASED)"),
    "stats forget lapsed leases": ("stats.lua", "waiting + lapsed", "waiting"),
    "peek hides leases": ("peek.lua", "show(text(LEASED), '(' .. text(BEYOND))", ""),
    "peek shows junk": ("peek.lua", "if is_id(found[i])", "if true"),
    "a pushed line has no head": ("ensure.lua", "set_head(KEYS[1], KEYS[2])", ""),
    "a moved line keeps its head": ("reschedule.lua", "set_head(KEYS[1], KEYS[2])", ""),
    "a line keeps its head although entries were removed": ("remove.lua", "set_head(KEYS[1], KEYS[2])", ""),
    "a line keeps its head although entries were acknowledged": ("acknowledge.lua", "set_head(KEYS[1], KEYS[2])", ""),
    "a released entry is not in the head": ("release.lua", "set_head(KEYS[1], KEYS[2])", ""),
    "an extended lease is not in the head": ("extend.lua", "set_head(KEYS[1], KEYS[3])", ""),
    "a reserve leaves the head as it was": ("reserve.lua", "set_head(KEYS[1], KEYS[i])", ""),
    "a line without entries keeps its head": ("include/head.lua", "redis.call('ZREM', heads, name)", ""),
    "the heads end a millisecond early": ("reserve.lua", "tonumber(ARGV[4])", "tonumber(ARGV[4]) - 1"),
    "the heads of named lines are not asked for": ("reserve.lua", "asked[1] and", "false and"),
    "the first named line is left out": ("reserve.lua", "#KEYS + 3", "#KEYS + 4"),
    "the limits of lines are mixed up": ("reserve.lua", "ARGV[i + 2]", "ARGV[5]"),
    "foreign heads are believed": ("include/names.lua", "#found[i] > 3000 or", "false and"),
    "long foreign heads are sent": ("include/names.lua", "#found[i] > 3000 or", ""),
    "foreign heads stay": ("include/names.lua", "redis.call('ZREM', heads, unpack(junk))", ""),
    "heads before 1970 are believed": ("include/names.lua", "math.max(tonumber(found[i + 1]), 0)", "found[i + 1]"),
    "a line never ends": ("include/keep.lua", "redis.call('PEXPIRE', key, text(needed + DAY))", ""),
    "a line ends before its last entry is due": ("include/keep.lua", "math.max(last_ms - now_ms(), 0) + DAY", "DAY"),
    "foreign heads stop an ensure half-way": ("ensure.lua", "redis.call('ZCARD', KEYS[1])", ""),
    "foreign heads stop a reschedule half-way": ("reschedule.lua", "redis.call('ZCARD', KEYS[1])", ""),
    "foreign heads stop a removal half-way": ("remove.lua", "redis.call('ZCARD', KEYS[1])", ""),
    "foreign heads stop an acknowledgement half-way": ("acknowledge.lua", "redis.call('ZCARD', KEYS[1])", ""),
}  # fmt: skip

STEP = int(os.environ.get("DELAYQ_TEST_MUTANTS_STEP", "1"))
"""Every how many of them are planted: all by `make mutants`, some by the whole suite."""

# Each begins with a removal; without it nothing drains at full memory.
FULL_MEMORY_MUTANTS = ["reserve", "release", "extend"]

MODULES = [test_bounds, test_foreign_data, test_lines]
QUICK = settings(  # what needs luck here should rather have a unit test
    max_examples=150,
    stateful_step_count=40,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def mutated(path: str, old: str, new: str) -> dict[str, str]:
    """Return the sources of all commands, with the mistake in one file."""
    texts = read_texts()
    whole = (files("django_delayq.engine") / "lua" / path).read_text(encoding="utf-8").rstrip()
    assert whole.count(old) == 1, "the mutant must match exactly one place"
    if not path.startswith("include/"):
        name = path.removesuffix(".lua")
        assert texts[name].count(old) == 1
        return {**texts, name: texts[name].replace(old, new)}
    return {name: text.replace(whole, whole.replace(old, new)) for name, text in texts.items()}


def unit_tests() -> Iterator[Callable[[VirtualQueue], None]]:
    """Yield the tests that only need a queue."""
    for module in MODULES:
        for name, function in vars(module).items():
            if name.startswith("test_") and list(inspect.signature(function).parameters) == ["virtual"]:
                yield function


def is_caught(client: redis.Redis, texts: Mapping[str, str], examples: int = QUICK.max_examples) -> bool:
    """Whether a unit test or the model fails with these commands."""
    for check in unit_tests():
        client.flushdb()
        try:
            check(VirtualQueue(client, texts))
        except Exception:
            return True
    try:
        run_state_machine_as_test(machine(client, texts), settings=settings(QUICK, max_examples=examples))
    except Exception:
        return True
    return False


def test_the_packaged_scripts_pass_what_the_mutants_must_fail(client: redis.Redis) -> None:
    assert not is_caught(client, read_texts(), examples=10), "`test_model` tries many more"
    assert len(list(unit_tests())) > 10


@pytest.mark.parametrize(
    ("path", "old", "new"),
    list(MUTANTS.values())[::STEP],
    ids=[name.replace(" ", "-") for name in MUTANTS][::STEP],
)
def test_a_mutant_is_caught(client: redis.Redis, path: str, old: str, new: str) -> None:
    texts: dict[str, Any] = mutated(path, old, new)
    for text in texts.values():
        client.script_load(text)  # a mutant must be valid Lua
    assert is_caught(client, texts)


@pytest.mark.parametrize("name", FULL_MEMORY_MUTANTS)
def test_a_command_that_does_not_begin_with_a_removal_is_caught(client: redis.Redis, name: str) -> None:
    texts = mutated(f"{name}.lua", "redis.call('ZREM', KEYS[1], '%')", "local _ = 0")
    try:
        with pytest.raises(EngineUnavailable):
            test_faults.drain_at_full_memory(client, one_line(Engine(client, caller=Caller(client, texts))))
    finally:
        client.config_set("maxmemory", 0)
