"""Measure the CPU time and memory that the app adds to the start of a web process.

python benchmarks/startup.py [--times 15] [--against ../other-checkout]

Each figure is the median of fresh processes, which alternate, minus that of the same project without the app.
"started" has loaded apps, models, receivers, admin and URLs (`tests/startup/process.py`); "saved" has also saved an
object with a policy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.ground import show  # noqa: E402
from tests.servers import serving  # noqa: E402


def start(folder: Path, file: str, *parts: str) -> dict[str, Any]:
    """Run a fresh process; `folder` contains the version of the app that it imports."""
    command = [sys.executable, "-m", "tests.startup.process", file, *parts]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return {} if parts == ("prepare",) else json.loads(done.stdout)


def measure(folders: Sequence[Path], file: str, parts: Sequence[str], more: Sequence[str], times: int) -> list[Any]:
    """Return for each folder the medians of a process with `parts` and `more`, minus those with `parts` alone."""
    for folder in folders:
        start(folder, file, *parts, *more)  # so that the first run does not compile modules for the others
    runs: dict[Path | None, list[dict[str, Any]]] = {}
    for _ in range(times):
        runs.setdefault(None, []).append(start(folders[0], file, *parts))
        for folder in folders:
            runs.setdefault(folder, []).append(start(folder, file, *parts, *more))

    def middle(of: Path | None, step: str, unit: str) -> float:
        return statistics.median(run[step][unit] for run in runs[of])

    found = []
    for folder in folders:
        added = {"alone ms": round(middle(None, "started", "ms")), "alone MB": round(middle(None, "started", "mb"), 1)}
        for step in ("started", "saved"):
            for unit in ("ms", "mb"):
                added[f"{step} {unit}"] = round(middle(folder, step, unit) - middle(None, step, unit), 1)
        found.append(added)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=15)
    parser.add_argument("--against", type=Path, help="another checkout, measured in turn with this one")
    options = parser.parse_args()
    checkouts = [*([options.against.resolve()] if options.against else []), ROOT]
    with serving(["redis"]) as addresses, tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary, str(number)) for number in range(len(checkouts))]
        for folder, checkout in zip(folders, checkouts, strict=True):
            folder.mkdir()
            (folder / "tests").symlink_to(ROOT / "tests")
            (folder / "django_delayq").symlink_to(checkout / "django_delayq")
        file = str(Path(temporary) / "startup.sqlite3")
        start(folders[-1], file, "prepare")
        redis = f"redis={ {**os.environ, **addresses}['DELAYQ_TEST_REDIS_URL'] }"
        rows: dict[str, tuple[list[str], list[str]]] = {
            "models": ([], ["delayq"]),
            "models, Redis": ([], ["delayq", redis]),
            "admin": (["admin"], ["delayq"]),
            "REST": (["rest"], ["delayq"]),
            "admin, REST": (["admin", "rest"], ["delayq"]),
            "admin, REST, Redis": (["admin", "rest"], ["delayq", redis]),
        }
        figures: dict[str, Any] = {}
        for name, (parts, more) in rows.items():
            found = measure(folders, file, parts, more, options.times)
            names = [f"{name} (before)", name] if options.against else [name]
            figures |= dict(zip(names, found, strict=True))
        show("start of a web process, minus the same project without the app", figures)


if __name__ == "__main__":
    main()
