"""The mutation gate of the Python core: plant one small fault at a time, and require that a test of its room fails.

    python3 tests/servers.py run -- .venv/bin/python tools/mutants.py                all of them
    ... tools/mutants.py --only ledger                                              those whose name contains a word
    ... tools/mutants.py --sample 6                                                 every n-th, for CI

The faults are listed in `tests/faults.toml`. Each runs in a copy of the checkout, on SQLite, with `pytest -x`. A
fault that no test notices makes the command fail, and so does one whose text does not occur exactly once.

`.results/mutants.json` records the test that noticed each fault. The next run begins with this test.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
FAULTS = ROOT / "tests" / "faults.toml"
PACKAGE = "django_delayq"
COPIED = (PACKAGE, "tests", "tools", "example_project", "docs", "benchmarks", "pyproject.toml")
RECORD = ROOT / ".results" / "mutants.json"
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.*?)(?: - |$)", re.MULTILINE)
SECONDS = 300
TEST_SECONDS = 40
"""A fault that makes a test or a whole run hang for this long counts as noticed."""
NOTHING_RAN = {4, 5}
"""Exit codes of pytest: a test file is missing, or contains no test. Any other code but 0 means that the fault was
noticed, also a signal: an endless loop can fill the memory until the kernel kills the run."""


@dataclass(frozen=True)
class Fault:
    """One fault: `new` in place of `old` in `file` of the package, which `tests` must notice."""

    room: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    is_slow: bool = False
    """Its tests take long, or do not end, so no sample contains it."""

    def complaint(self) -> str:
        """Return what is wrong with this entry; empty if its text occurs once, and the fault is valid Python."""
        text = (ROOT / PACKAGE / self.file).read_text(encoding="utf-8")
        if (found := text.count(self.old)) != 1:
            return f"{self.room}: {self.name}: {self.old!r} occurs {found} times in {self.file}"
        try:
            compile(text.replace(self.old, self.new), self.file, "exec")
        except SyntaxError as error:
            return f"{self.room}: {self.name}: {error}"
        return ""


def read_faults() -> list[Fault]:
    """Return the list."""
    groups = tomllib.loads(FAULTS.read_text(encoding="utf-8"))["group"]
    return [
        Fault(group["room"], tests=tuple(group["tests"]), **{"is_slow": group.get("is_slow", False), **each})
        for group in groups
        for each in group["fault"]
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the gate; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the faults whose room, file or name contains this text")
    parser.add_argument("--sample", type=int, help="run this many, spread evenly over the list")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    faults = read_faults()
    chosen = [fault for fault in faults if options.only in f"{fault.room} {fault.file} {fault.name}"]
    if options.sample:
        chosen = [fault for fault in chosen if not fault.is_slow]
        chosen = chosen[:: max(1, len(chosen) // options.sample)][: options.sample]
    if wrong := [complaint for fault in faults if (complaint := fault.complaint())]:
        print("\n".join(wrong))
        return 2
    began = time.monotonic()
    noticed_by: dict[str, str] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    with _copies(options.workers) as copies:
        tests = sorted({path for fault in chosen for path in fault.tests})
        if not options.sample and not _passes(copies, tests):  # a sample follows the suite, which has just passed
            print("The tests fail without any fault.")
            return 2
        with ThreadPoolExecutor(options.workers) as pool:
            found = pool.map(lambda fault: _survives(copies, fault, noticed_by), chosen)
            survivors = [fault for fault, survives in zip(chosen, found, strict=True) if survives]
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps(noticed_by, indent=1, sort_keys=True), encoding="utf-8")
    minutes = (time.monotonic() - began) / 60
    print(f"{len(chosen)} faults, {len(chosen) - len(survivors)} noticed, {len(survivors)} not, {minutes:.1f} minutes")
    return 1 if survivors else 0


@contextmanager
def _copies(count: int) -> Iterator[SimpleQueue[Path]]:
    """Give `count` copies of what the tests need, so that faults can be tried side by side."""
    with tempfile.TemporaryDirectory(prefix="delayq-mutants-") as directory:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(count):
            copy = Path(directory, str(number))
            copy.mkdir()
            for name in COPIED:
                source = ROOT / name
                if source.is_dir():
                    shutil.copytree(source, copy / name)
                else:
                    shutil.copy(source, copy / name)
            copies.put(copy)
        yield copies


def _passes(copies: SimpleQueue[Path], tests: Sequence[str]) -> bool:
    copy = copies.get()
    try:
        code, output = _pytest(copy, [*tests, "-n", str(os.cpu_count() or 1)])
        if code:
            print(output[-4000:])
        return code == 0
    finally:
        copies.put(copy)


def _survives(copies: SimpleQueue[Path], fault: Fault, noticed_by: dict[str, str]) -> bool:
    """Plant `fault` in a free copy and run its tests; return whether all pass. Record the first that fails."""
    copy = copies.get()
    file = copy / PACKAGE / fault.file
    sound = file.read_text(encoding="utf-8")
    began = time.monotonic()
    key = f"{fault.room}: {fault.name}"
    try:
        _write(file, sound.replace(fault.old, fault.new))
        code, output = _pytest(copy, [noticed_by[key]]) if key in noticed_by else (0, "")
        if code != 1:  # the test passes now, or no longer exists
            code, output = _pytest(copy, fault.tests)
    finally:
        _write(file, sound)
        copies.put(copy)
    if code in NOTHING_RAN:
        raise RuntimeError(f"pytest ended with {code} for {key!r}: {output[-4000:]}")
    if failed := FAILED.search(output):
        noticed_by[key] = failed[1]
    verdict = "noticed" if code else "NOT NOTICED"
    print(f"{verdict:12}{time.monotonic() - began:5.0f} s  {key}", flush=True)
    return code == 0


def _write(file: Path, text: str) -> None:
    """Write a source file, and delete its bytecode, whose time stamp may be the same."""
    file.write_text(text, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)


def _pytest(copy: Path, arguments: Sequence[str]) -> tuple[int, str]:
    """Run pytest in `copy`; return its exit code, and 1 if it does not end in time, and its output."""
    options = ["-x", "-q", "--no-header", "--tb=no", f"--timeout={TEST_SECONDS}", "-p", "no:randomly"]
    command = [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", "-m", "not browser", *arguments]
    environment = {**os.environ, "DELAYQ_TEST_DB": "sqlite"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPATH"] = os.pathsep.join([str(copy), str(copy / "example_project")])
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, check=False, timeout=SECONDS, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        return 1, f"The tests did not end within {SECONDS} s."
    output = f"{done.stdout}{done.stderr}"  # all of it: a long assertion must not push out the line with FAILED
    if done.returncode == 1 and " passed" in output and not FAILED.search(output):
        return 0, output  # only the end of pytest complains, for example of a socket that a test has left open
    return done.returncode, output


if __name__ == "__main__":
    raise SystemExit(main())
