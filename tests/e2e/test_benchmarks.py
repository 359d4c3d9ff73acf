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
    pytest.mark.e2e,
    pytest.mark.skipif(test_settings.DB != "sqlite", reason="it brings its own SQLite"),
    pytest.mark.skipif(RedisServer.missing() is not None, reason="no Redis server"),
]
NAME = "delayq@sqlite"
TINY = replace(QUICK, rounds=2, calls=5, drain_jobs=20, drain_seconds=0.01)


def test_a_work_measures_calls_in_the_process_of_a_contestant(tmp_path: Path) -> None:
    work = next(replace(work, contestants=(NAME,)) for work in calls.WORKS if work.key == "schedule")
    with Arena(tmp_path) as arena:
        found = measure(work, Run(arena, TINY, False, {}))
        with pytest.raises(Failed, match="no_such_operation"):
            arena.contestant(NAME).call("no_such_operation")
    assert found["failed"] == {}
    samples = found["samples"][NAME]
    assert samples.keys() == {column.key for column in work.columns}
    assert all(len(values) == TINY.rounds for values in samples.values())


def test_a_work_drains_jobs_with_worker_processes(tmp_path: Path) -> None:
    work = next(replace(work, contestants=(NAME,)) for work in workers.WORKS if work.key == "drain")
    with Arena(tmp_path) as arena:
        run = Run(arena, replace(TINY, rounds=1), False, {})
        found = measure(work, run)
        assert arena.contestant(NAME).recorded() > 0
    assert found["failed"] == {}
    assert found["samples"][NAME]["batch_jobs"][0] >= 20
