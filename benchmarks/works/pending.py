"""Works with many pending timeouts: memory, bytes, lag, and what an idle worker does in a minute."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from pathlib import Path

from benchmarks.contestants import RIVALS, Contestant, Failed, Tree
from benchmarks.harness import LEAST_ROUNDS, Column, Run, Samples, Work, say
from benchmarks.works.calls import SOON_SECONDS
from benchmarks.works.workers import drains, lag_of

FEW = 1_000
NEAR = 166
"""With 1,000 a minute: so many are due within two `SWEEP_INTERVAL`s by default, which a sweep reads."""
LEAST_RAN = 50.0
"""A contestant that runs fewer of its timeouts in time, in percent, is not measured again."""
SETTLE_SECONDS = 15.0
"""Until a started worker is idle, and its transactions are in pg_stat_database: an idle session reports after 10 s."""

AllSamples = dict[str, dict[str, list[float]]]


def _add(samples: AllSamples, name: str, figures: Samples) -> None:
    for key, value in figures.items():
        samples.setdefault(name, {}).setdefault(key, []).append(value)


def grow(contestant: Contestant, count: int) -> None:
    """Give the contestant this many pending timeouts, due in 40 to 60 minutes, unless it has them already.

    django-delayq then also has as many settled rows.
    """
    if contestant.pending != count:
        contestant.call("clear")
        contestant.call("grow", count)
        contestant.pending = count


def _growth(run: Run) -> AllSamples:
    """Measure calls, a drain and a worker, first with few pending timeouts and settled rows, then with many."""
    samples: AllSamples = {}
    contestant = run.contestant("delayq")
    for count in (FEW, run.sizes.pending):
        contestant.call("clear")
        contestant.call("grow", 100)  # so that the buffers of connections and scripts are not counted
        contestant.call("clear")
        before = contestant.call("bytes_stored")
        grow(contestant, count)
        say(f"    {count:,} pending and as many settled")
        after = contestant.call("bytes_stored")
        name = f"{count:,} pending"
        rows = {"redis_bytes": count, "database_bytes": 2 * count}
        _add(samples, name, {key: (after[key] - before[key]) / rows[key] for key in after})
        for _ in range(run.sizes.rounds):
            _add(samples, name, _calls(run, contestant))
        contestant.call("prepare", NEAR)
        swept = contestant.call("sweep", NEAR)
        _add(samples, name, {"sweep_us": swept["none"], "sweep_near_us": swept["near"]})
        with contestant.working("lag") as tree:
            contestant.warm_up("note")
            time.sleep(SETTLE_SECONDS)
            _add(samples, name, {"memory_mb": tree.memory_mb(), "connections": _connections(run, contestant)})
        sizes = contestant.call("bytes_by_relation")
        _add(samples, name, drains(run, contestant, "drain", {"nothing": ("note", run.sizes.drain_jobs)}))
    for relation, size in sizes.items():
        _add(samples, f"of which {relation}", {"database_bytes": size / (2 * run.sizes.pending)})
    return samples


def _calls(run: Run, contestant: Contestant) -> Samples:
    count = run.sizes.calls
    contestant.call("prepare", count)
    figures = {
        "schedule_us": contestant.call("schedule_one", count)["cpu_us"],
        "cancel_us": contestant.call("cancel_one", count)["cpu_us"],
    }
    contestant.call("prepare", count, "Plain")
    figures["save_us"] = contestant.call("save_unchanged", count)["more_us"]
    contestant.call("enqueue", "note", count)
    return figures | {"fire_us": contestant.call("fire", count)["cpu_us"]}


def _connections(run: Run, contestant: Contestant) -> float:
    """Return the number of connections to the contestant's database, without that of its client."""
    name = contestant.database
    return float(run.arena.query(name, f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{name}'")[0]) - 2


def _lag_behind(run: Run) -> AllSamples:
    """Measure the lag behind many pending timeouts; celery has nothing else pending, and serves for comparison."""
    samples: AllSamples = {}
    names = {"delayq": run.sizes.pending, "procrastinate": run.sizes.pending, "celery": 0}
    for number in range(run.sizes.rounds):
        if number >= LEAST_ROUNDS and run.is_over(BEHIND):
            break
        for name, count in names.items():
            if name in run.failed or samples.get(name, {}).get("ran", [100.0])[-1] < LEAST_RAN:
                continue
            try:
                contestant = run.contestant(name)
                if count:
                    grow(contestant, count)
                with contestant.working("lag"):
                    contestant.warm_up("note")
                    p50, p99, ran = lag_of(run, contestant, 50, run.sizes.lag_seconds)
                _add(samples, name, {"pending": count, "p50": p50, "p99": p99, "ran": ran})
                say(f"    round {number + 1}, {name}")
            except Failed as error:
                run.note_failure(name, error)
    return samples


def _idle(run: Run) -> AllSamples:
    """Run the idle workers of all contestants at the same time, and count what each does."""
    samples: AllSamples = {}
    trees: dict[str, Tree] = {}
    with contextlib.ExitStack() as stack:
        pending = {"delayq": run.sizes.pending, "delayq@ledger": run.sizes.pending // 10}
        for name in (*pending, *RIVALS):
            try:
                contestant = run.contestant(name)
                if name in pending:
                    grow(contestant, pending[name])
                else:
                    contestant.call("clear")
                trees[name] = stack.enter_context(contestant.working("idle"))
                contestant.warm_up("note")
            except Failed as error:
                run.note_failure(name, error)
                trees.pop(name, None)
        time.sleep(SETTLE_SECONDS)
        seconds = run.sizes.idle_seconds  # one whole minute: some passes run once a minute
        before = {name: _counters(run, name, tree) for name, tree in trees.items()}
        own = run.contestant("delayq").purposes
        begun = len(_lines(own))
        time.sleep(seconds)
        for name, tree in trees.items():
            after = _counters(run, name, tree)
            changes = {key: (after[key] - before[name][key]) * 60 / seconds for key in after}
            _add(samples, name, {"pending": run.contestant(name).pending, **changes, "memory_mb": tree.memory_mb()})
        counted = Counter(_lines(own)[begun:])
        for purpose, count in counted.most_common():
            _add(samples, f"django-delayq: `{purpose}`", {"transactions": count * 60 / seconds})
        if "delayq" in samples:
            rest = samples["delayq"]["transactions"][0] - counted.total() * 60 / seconds
            _add(samples, "django-delayq: PREPARE by the library, autovacuum", {"transactions": rest})
    return samples


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def _counters(run: Run, name: str, tree: Tree) -> Samples:
    """Return CPU seconds, Redis commands and transactions so far, without those of this function."""
    import redis

    contestant = run.contestant(name)
    with redis.Redis.from_url(run.arena.redis(name).url) as client:
        stats = client.info("stats")
        done = client.info("commandstats")
    handshakes = ("info", "client|setinfo", "client|setname", "hello", "ping", "select")
    own = sum(done[f"cmdstat_{word}"]["calls"] for word in handshakes[:3] if f"cmdstat_{word}" in done)
    statement = f"SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = '{contestant.database}'"
    row = run.arena.query("postgres", statement)
    return {
        "cpu_s": tree.cpu(),
        "commands": float(stats["total_commands_processed"] - own),
        "transactions": float(row[0]) if row else 0.0,
    }


def _stored(run: Run, contestant: Contestant) -> Samples:
    count = run.sizes.stored
    contestant.call("clear")
    contestant.call("fill", 100, SOON_SECONDS)  # so that the buffers of connections and scripts are not counted
    contestant.call("clear")
    before = contestant.call("bytes_stored")
    contestant.call("fill", count, SOON_SECONDS)
    after = contestant.call("bytes_stored")
    contestant.call("clear")
    return {key: (after[key] - before[key]) / count for key in after}


BEHIND = Work(
    "behind",
    "Lag behind many pending timeouts",
    "As the lag at 50 a second, with many other timeouts pending. Celery holds every pending message in the "
    "memory of its workers, so it has nothing else pending here. The other rivals are omitted: filling their "
    "Redis takes longer than the whole benchmark.",
    (
        Column("pending", "pending", ""),
        Column("p50", "p50 ms"),
        Column("p99", "p99 ms"),
        Column("ran", "ran, %", "more"),
    ),
    whole=_lag_behind,
    minutes=1.5,
)
WORKS = (
    Work(
        "stored",
        "Bytes stored for a pending timeout",
        "Memory of Redis, and heap plus indexes in PostgreSQL, before any worker has fetched them. Due in four "
        "minutes: Redis has the timeouts of django-delayq that are due within `HORIZON`, five minutes by default.",
        (Column("redis_bytes", "bytes in Redis"), Column("database_bytes", "bytes in PostgreSQL")),
        ("delayq", "earlier", *RIVALS),
        _stored,
        rounds=lambda sizes: 1,
        minutes=0.5,
    ),
    Work(
        "growth",
        "Growth: few and many pending timeouts",
        "With few and with many pending timeouts, and as many settled rows. Redis has all pending ones, as if all "
        "were due within `HORIZON`. Memory is the resident memory of one idle process with four threads "
        "(`--processes 1`). A sweep runs each `SWEEP_INTERVAL`, five seconds by default, in one worker: CPU of client "
        "and server. The drain is that of handlers that do nothing, with default settings.",
        (
            Column("schedule_us", "schedule one, CPU us"),
            Column("cancel_us", "cancel one, CPU us"),
            Column("save_us", "save, additional CPU us"),
            Column("fire_us", "fire one alone, CPU us"),
            Column("sweep_us", "a sweep, CPU us"),
            Column("sweep_near_us", "the same, 1,000 a minute come near"),
            Column("nothing_per_second", "drain, per second", "more"),
            Column("memory_mb", "worker memory, MB"),
            Column("redis_bytes", "bytes in Redis for each pending"),
            Column("database_bytes", "bytes in PostgreSQL for each row"),
            Column("connections", "connections to the database"),
        ),
        whole=_growth,
        minutes=3,
    ),
    BEHIND,
    Work(
        "idle",
        "An idle worker, per minute",
        "The workers of all contestants run at the same time, and wait; that of django-delayq has one process "
        "(`--processes 1`). It has many pending timeouts, a tenth of them without Redis, its rivals none. Memory is"
        " that of all processes of a worker, added up. Below: the transactions of django-delayq by the function "
        "that begins them.",
        (
            Column("pending", "pending", ""),
            Column("cpu_s", "CPU seconds"),
            Column("commands", "Redis commands"),
            Column("transactions", "transactions"),
            Column("memory_mb", "memory, MB"),
        ),
        whole=_idle,
        plot="cpu_s",
        minutes=1.6,
    ),
)
