"""Measure django-delayq and its rivals side by side: `make bench`, or `python -m benchmarks`.

    make bench                        everything, in at most 25 minutes
    make bench QUICK=1                everything with small sizes, in less than five minutes
    make bench ONLY=schedule,lag      some works; the others keep their figures in docs/benchmarks.md
    make bench BUSY=1                 beside a process that keeps one core busy; prints the targets, and writes no page
    make bench AGAINST=../other       also another checkout of this project, as a contestant
    make bench ORDERS=... REVIEWS=... also the replay of recorded orders

`python -m benchmarks --report` writes the page again from the last results, after a change of its text.

The servers and the databases are temporary. The page docs/benchmarks.md is written after every work, so that a run that
is interrupted keeps the figures of the works that it has completed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.contestants import RIVALS, ROOT, Arena, Failed
from benchmarks.figures import quantile
from benchmarks.harness import FULL, QUICK, Run, measure, say
from benchmarks.works import WORKS
from tools import processes

RESULTS = ROOT / "benchmarks" / "results.json"


def machine(folder: Path) -> dict[str, Any]:
    """Describe the machine without its name: model of the CPU, cores, memory, and the disk below `folder`."""
    model = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cores = len(os.sched_getaffinity(0))
    found = {"cpu": model[1] if model else platform.machine(), "cores": cores, "memory_gb": round(total / 2**30)}
    return found | {"fsync_ms": fsync_ms(folder)}


def fsync_ms(folder: Path) -> float:
    """Return how long fdatasync takes in this folder after 8 kB were written, in ms: the least wait of a commit."""
    took = []
    with (folder / "disk").open("wb", buffering=0) as file:
        for _ in range(50):
            file.write(bytes(8192))
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            took.append((time.perf_counter() - began) * 1000)
    return quantile(took, 0.5)


def versions(arena: Arena) -> dict[str, str]:
    import redis

    server = redis.Redis.from_url(arena.redis("delayq").url).info("server")["redis_version"]
    postgres = str(arena.query("postgres", "SHOW server_version")[0]).partition(" ")[0]
    packages = {
        name: version(package)
        for name, package in (("Django", "Django"), ("psycopg", "psycopg"), ("redis-py", "redis"))
    }
    return {"Python": platform.python_version(), **packages, "PostgreSQL": postgres, "Redis": server}


def contestants(arena: Arena) -> list[dict[str, Any]]:
    """Describe every contestant: title, version, settings with their sources."""
    found = []
    for name in ("delayq", *RIVALS, "procrastinate_pool"):
        try:
            found.append(arena.contestant(name).call("describe"))
        except Failed as error:
            found.append({"title": name, "version": f"failed: {error}", "settings": []})
    return found


def command_of(options: argparse.Namespace) -> str:
    """Return the command that repeats the run, without the paths of this machine."""
    given = [f"ONLY={options.only}" if options.only else "", "QUICK=1" if options.quick else ""]
    named = [f"{name}=..." for name in ("AGAINST", "ORDERS") if os.environ.get(name)]
    return " ".join(["make bench", *filter(None, given), *named])


def run_works(chosen: Sequence[str], options: argparse.Namespace) -> int:
    """Run the chosen works, and write the results after each."""
    against = Path(options.against) if options.against else None
    began = time.monotonic()
    with (
        _busy_core(options.busy),
        tempfile.TemporaryDirectory(prefix="delayq-bench-") as folder,
        Arena(_open_to_servers(folder), against) as arena,
    ):
        run = Run(arena, QUICK if options.quick else FULL, options.quick, dict(os.environ))
        results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"works": {}}
        results |= {"command": command_of(options), "machine": machine(Path(folder))}
        results |= {"versions": versions(arena), "contestants": contestants(arena)}
        for work in WORKS:
            if work.key not in chosen or (work.needs and not os.environ.get(work.needs)):
                continue
            say(f"bench: {work.key}: {work.title} ({time.monotonic() - began:.0f} s)")
            try:
                results["works"][work.key] = measure(work, run)
            except Exception as error:  # noqa: BLE001 - the other works are worth their time
                say(f"bench: {work.key} failed: {type(error).__name__}: {error}")
                continue
            results["capacity"] = report.capacity(report.samples_of(results))
            if not options.busy:
                report.write(results, WORKS, ROOT)
    if options.busy:
        measured = {key: found for key, found in report.samples_of(results).items() if key in chosen}
        print("\n".join(report.targets(measured)))
    say(f"bench: done in {time.monotonic() - began:.0f} s{'' if options.busy else '; see docs/benchmarks.md'}")
    return 0


@contextmanager
def _busy_core(is_wanted: bool) -> Iterator[None]:
    """Keep one core busy at the priority of the contestants until the block ends."""
    if not is_wanted:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def _open_to_servers(folder: str) -> Path:
    Path(folder).chmod(0o711)  # database servers run as other accounts, and must reach their directories in it
    return Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"of {','.join(work.key for work in WORKS)}")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--report", action="store_true", help="write the page again from the last results")
    parser.add_argument("--busy", action="store_true", help="beside a process that keeps one core busy")
    parser.add_argument("--against", help="another checkout of this project")
    options = parser.parse_args()
    keys = [work.key for work in WORKS]
    chosen = options.only.split(",") if options.only else keys
    if unknown := set(chosen) - set(keys):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(keys)}")
    if options.report:
        report.write(json.loads(RESULTS.read_text()), WORKS, ROOT)
        return
    sys.exit(processes.supervised(lambda: run_works(chosen, options)))


if __name__ == "__main__":
    main()
