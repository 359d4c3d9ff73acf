"""Run works: rounds over the contestants in turn, noise of the machine beside it, results after each work."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from benchmarks.contestants import Arena, Contestant, Failed
from benchmarks.figures import quantile
from benchmarks.ground import Probe, late_sleep

LEAST_ROUNDS = 3
ROUNDS_OF_OTHER_DATABASES = 2
Samples = dict[str, float]
Step = Callable[["Run", Contestant], Samples]


@dataclass(frozen=True)
class Sizes:
    """How much each work does. `make bench QUICK=1` uses `QUICK`."""

    rounds: int
    calls: int
    bulk: int
    lag_seconds: float
    drain_seconds: float
    drain_jobs: int
    worker_jobs: int
    steady_runs: int
    pending: int
    stored: int
    idle_seconds: float
    page_rows: int
    replay_orders: int


FULL = Sizes(
    rounds=5, calls=300, bulk=50_000, lag_seconds=4.0, drain_seconds=2.0, drain_jobs=10_000, worker_jobs=20_000,
    steady_runs=10, pending=1_000_000, stored=10_000, idle_seconds=60.0, page_rows=1_000_000, replay_orders=400,
)  # fmt: skip
QUICK = Sizes(
    rounds=2, calls=60, bulk=2_000, lag_seconds=1.0, drain_seconds=1.0, drain_jobs=10_000, worker_jobs=2_000,
    steady_runs=2, pending=10_000, stored=2_000, idle_seconds=20.0, page_rows=5_000, replay_orders=40,
)  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A measured figure of a table. `better` is the direction of a better value; "": none is better."""

    key: str
    title: str
    better: Literal["less", "more", ""] = "less"


@dataclass(frozen=True)
class Work:
    """What is measured, for which contestants, and how: `step` returns the samples of one contestant in one round.

    A work with `whole` is measured at once in place of in rounds; it returns all samples by contestant.
    """

    key: str
    title: str
    about: str
    columns: Sequence[Column]
    contestants: Sequence[str] = ()
    step: Step | None = None
    whole: Callable[[Run], dict[str, dict[str, list[float]]]] | None = None
    rounds: Callable[[Sizes], int] = lambda sizes: sizes.rounds
    plot: str = ""
    minutes: float = 1.0
    """No round begins after so many minutes (a tenth of them in a quick run), if `LEAST_ROUNDS` are complete."""
    slow: bool = False
    """Whether other databases are measured in few rounds, and a quick run has one round and PostgreSQL alone."""
    needs: str = ""
    """An environment variable without which the work is omitted."""


@dataclass
class Run:
    """One run of the harness: its servers, its sizes, and what the works have learned from each other."""

    arena: Arena
    sizes: Sizes
    quick: bool
    environment: dict[str, str]
    rates: dict[tuple[str, str], float] = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    began: float = 0.0
    """When the work began, on the monotonic clock."""

    def is_over(self, work: Work) -> bool:
        """Return whether the work has used its time, and shall begin no further round."""
        return time.monotonic() - self.began > work.minutes * (6 if self.quick else 60)

    def contestant(self, name: str) -> Contestant:
        found = self.arena.contestant(name)
        self.titles[name] = found.title
        return found

    def note_failure(self, name: str, error: Exception) -> None:
        """Report that a contestant failed; the work continues without it."""
        self.failed[name] = " ".join(f"{error}".split())[:300] or type(error).__name__
        say(f"    {name} failed: {self.failed[name]}")


def measure(work: Work, run: Run) -> dict[str, Any]:
    """Run one work and return its results, ready for JSON."""
    began, run.failed = time.monotonic(), {}
    run.began = began
    with Probe(late_sleep) as probe:
        samples = work.whole(run) if work.whole else in_rounds(work, run)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "quick": run.quick,
        "seconds": round(time.monotonic() - began, 1),
        "noise_ms": {"p50": quantile(probe.seen, 0.5), "p99": quantile(probe.seen, 0.99)} if probe.seen else {},
        "samples": samples,
        "failed": run.failed,
        "titles": {name: run.titles.get(name, name) for name in [*samples, *run.failed]},
    }


def in_rounds(work: Work, run: Run) -> dict[str, dict[str, list[float]]]:
    """Measure each contestant once a round. Each round begins with another one, so that none is always first."""
    assert work.step is not None
    samples: dict[str, dict[str, list[float]]] = {}
    quickly = work.slow and run.quick
    names = [name for name in work.contestants if run.arena.exists(name) and not ("@" in name and quickly)]
    for number in range(1 if quickly else work.rounds(run.sizes)):
        if number >= LEAST_ROUNDS and run.is_over(work):
            break
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            if name in run.failed or (work.slow and "@" in name and number >= ROUNDS_OF_OTHER_DATABASES):
                continue
            began = time.monotonic()
            try:
                figures = work.step(run, run.contestant(name))
            except Failed as error:
                run.note_failure(name, error)
                continue
            for key, value in figures.items():
                samples.setdefault(name, {}).setdefault(key, []).append(value)
            say(f"    round {number + 1}, {name}: {time.monotonic() - began:.1f} s")
    return {name: samples[name] for name in names if name in samples}


def say(line: str) -> None:
    """Write a line of progress."""
    print(line, file=sys.stderr, flush=True)
