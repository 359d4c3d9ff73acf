"""One small work of `make bench` with real processes: the library alone, on SQLite and a Redis of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.contestants import Arena, Failed
from benchmarks.harness import QUICK, Run, measure
from benchmarks.works import calls, workers
from tests import settings as test_settings
from tools.servers import RedisServer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(test_settings.DB != "sqlite", reason="it brings its own SQLite"),
    pytest.mark.skipif(RedisServer.missing() is not None, reason="no Redis server"),
]
NAME = "delayq@sqlite"
TINY = replace(QUICK, rounds=2, calls=5, drain_jobs=20, drain_seconds=0.01)


def test_works_measure_calls_in_the_process_of_a_contestant_and_drain_jobs_with_worker_processes(
    tmp_path: Path,
) -> None:
    schedule, drain = (
        next(replace(work, contestants=(NAME,)) for work in works if work.key == key)
        for works, key in ((calls.WORKS, "schedule"), (workers.WORKS, "drain"))
    )
    with Arena(tmp_path) as arena:
        called = measure(schedule, Run(arena, TINY, False, {}))
        with pytest.raises(Failed, match="no_such_operation"):
            arena.contestant(NAME).call("no_such_operation")
        drained = measure(drain, Run(arena, replace(TINY, rounds=1), False, {}))
        assert arena.contestant(NAME).recorded() > 0
    assert called["failed"] == drained["failed"] == {}
    samples = called["samples"][NAME]
    assert samples.keys() == {column.key for column in schedule.columns}
    assert all(len(values) == TINY.rounds for values in samples.values())
    assert drained["samples"][NAME]["batch_jobs"][0] >= 20
    assert drained["samples"][NAME]["settle_server_us"][0] > 0
