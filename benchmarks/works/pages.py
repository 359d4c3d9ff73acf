"""Works that run other programs of the project: the pages of operators, and the replay of recorded orders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

from benchmarks.contestants import ROOT, Contestant, Failed
from benchmarks.harness import Column, Run, Samples, Work

SECONDS = 900


def _pages(run: Run) -> dict[str, dict[str, list[float]]]:
    """Measure the pages of operators in a process with the settings of the tests, and collect what it prints."""
    addresses = {
        "DELAYQ_TEST_DB": "postgresql",
        "DELAYQ_TEST_POSTGRESQL_URL": run.arena.postgres.url,
        "DELAYQ_TEST_REDIS_URL": run.arena.redis("delayq").url,
    }
    times = str(max(3, run.sizes.rounds))
    command = ["-m", "benchmarks.pages", "--rows", str(run.sizes.page_rows), "--times", times]
    samples: dict[str, dict[str, list[float]]] = {}
    for line in _output(command, addresses).splitlines():
        if line.startswith('{"benchmark"'):
            found = json.loads(line)
            part = found.pop("benchmark").partition(",")[0]
            for name, figures in found.items():
                title = f"{part}: {name}".replace("commands: ", "command ")
                samples[title] = {key: [value] for key, value in figures.items() if isinstance(value, int | float)}
    return samples


def _replay(run: Run, contestant: Contestant) -> Samples:
    """Replay recorded orders on a virtual clock with the example shop."""
    files = [run.environment["ORDERS"], run.environment.get("REVIEWS", "")]
    command = ["-m", "benchmarks.works.replaying", *files, str(run.sizes.replay_orders)]
    checkout = run.arena.against if contestant.name == "earlier" and run.arena.against else ROOT
    path = os.pathsep.join([contestant.environment["PYTHONPATH"], str(checkout / "example_project")])
    database = f"bench_replay_{contestant.name}"
    run.arena.query("postgres", f"DROP DATABASE IF EXISTS {database}")
    run.arena.query("postgres", f"CREATE DATABASE {database}")
    address = run.arena.postgres.url.rpartition("/")[0] + f"/{database}"
    figures: Samples = json.loads(_output(command, {"PYTHONPATH": path, "DATABASE_URL": address}).splitlines()[-1])
    return figures


def _output(command: list[str], environment: dict[str, str]) -> str:
    try:
        done = subprocess.run(
            [sys.executable, *command],
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            cwd=tempfile.gettempdir(),  # not ROOT: `python -m` imports packages of the current folder first
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"it took longer than {SECONDS} s") from error
    if done.returncode:
        raise Failed(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}")
    return done.stdout


WORKS = (
    Work(
        "pages",
        "Pages, REST and commands with many rows",
        "Whole requests through a test client, without the network, with 1,000,000 pending and 300,000 settled rows (a "
        "quick run: 5,000 and 1,500). Commands without the start of Python and Django.",
        (
            Column("p50", "p50 ms"),
            Column("max", "max ms"),
            Column("first", "first ms"),
            Column("cpu", "CPU ms"),
            Column("once", "once ms"),
        ),
        whole=_pages,
        minutes=2.5,
    ),
    Work(
        "replay",
        "Virtual replay of recorded orders",
        "The example shop plays recorded orders on a virtual clock, in one process: steps are orders, payments, "
        "parcels and due timeouts. Only with ORDERS (and REVIEWS), the public Olist files.",
        (Column("per_second", "steps per second", "more"), Column("cpu_us", "CPU us a step")),
        ("delayq", "earlier"),
        _replay,
        slow=True,
        needs="ORDERS",
        minutes=1,
    ),
)
