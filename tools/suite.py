"""The whole suite, stage by stage, ending in a list of what ran and what was left out.

    python3 tests/servers.py run -- .venv/bin/python tools/suite.py            everything
    python3 tests/servers.py run -- .venv/bin/python tools/suite.py lint       one stage; more may be named

A failed stage does not stop the next one: a formatting slip should not hide a failing test.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / ".results"
WORKERS = os.environ.get("PYTEST_WORKERS", str(min(4, os.cpu_count() or 1)))
PYTHONPATH = os.pathsep.join([str(ROOT), str(ROOT / "example_project")])
MINUTE = 60
OF_PROCESSES = ("tests/e2e", "tests/shop")
TOUCH_THE_DATABASE = ("tests/integration", *OF_PROCESSES)
UNSTEADY = RESULTS / "unsteady.txt"
UNSTEADY_LIMIT = 3
TESTS_FAILED = 1
"""The exit code of pytest after a complete run in which tests failed."""
NO_SECOND_RUN = (
    "tests/e2e/chaos",
    "tests/e2e/crashes",
    "tests/e2e/races",
    "tests/engine/test_invariants.py",
    "tests/engine/test_model.py",
    "tests/engine/test_random_faults.py",
)
"""One failure here in a hundred runs is a defect: these tests provoke what happens rarely."""


@dataclass(frozen=True)
class Stage:
    """Some commands that pass or fail together."""

    name: str
    words: str
    commands: Sequence[Sequence[str]]
    environment: dict[str, str] = field(default_factory=dict)
    needs_variable: str | None = None
    needs_module: str | None = None

    def lacking(self) -> str | None:
        """Why it cannot run here; None if it can."""
        if not self.commands:
            return "there is nothing to run"
        if self.needs_variable and not os.environ.get(self.needs_variable):
            return f"{self.needs_variable} is not set"
        if self.needs_module and importlib.util.find_spec(self.needs_module) is None:
            return f"the Python package {self.needs_module} is not installed"
        return None

    def run(self) -> bool:
        """Run all its commands, also after one failed."""
        environment = {**os.environ, **self.environment, "PYTHONPATH": PYTHONPATH}
        results = [RESULTS / f"{self.name}-{number}.xml" for number in range(len(self.commands))]
        return all([_succeeds(*pair, environment) for pair in zip(self.commands, results, strict=True)])  # noqa: C419


def _succeeds(command: Sequence[str], results: Path, environment: dict[str, str]) -> bool:
    """Run one command, which may begin with variables of its own, as in a shell. pytest writes into `results`."""
    while "=" in command[0]:
        name, _, value = command[0].partition("=")
        environment, command = {**environment, name: value}, command[1:]
    if command[0] != "pytest":
        return _run(command, environment) == 0
    code = _run([*command, f"--junitxml={results}"], environment)
    return code == 0 or (code == TESTS_FAILED and _pass_alone(results, environment))


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    print(f"\n--- {' '.join(command)}", flush=True)
    program = Path(sys.executable).with_name(command[0])
    return subprocess.run([program, *command[1:]], cwd=ROOT, env=environment, check=False).returncode


def _pass_alone(results: Path, environment: dict[str, str]) -> bool:
    """Run a few failed tests once more, without others beside them; record those that pass then as unsteady.

    A slow machine may break a test that waits. A second run tells this from a defect, and the summary names the test.
    """
    tree = ET.parse(results)
    cases = [(suite, case) for suite in tree.iter("testsuite") for case in suite.iter("testcase")]
    failed = [(suite, case) for suite, case in cases if {child.tag for child in case} & {"failure", "error"}]
    names = sorted({f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}" for _, case in failed})
    if not 0 < len(names) <= UNSTEADY_LIMIT or any(name.startswith(NO_SECOND_RUN) for name in names):
        return False
    again = results.with_name(f"{results.stem}-again.xml")
    if _run(["pytest", *names, f"--junitxml={again}"], environment) != 0:
        return False
    for suite, case in failed:  # tools/guarantees.py finds the second result in the other file
        suite.remove(case)
    tree.write(results)
    with UNSTEADY.open("a", encoding="utf-8") as file:
        file.writelines(f"{results.stem}: {name}\n" for name in names)
    return True


def _pytest(*paths: str, options: Sequence[str] = ()) -> list[list[str]]:
    """Return commands for most tests, for workers in threads, and for what starts and kills processes of its own.

    The workers in threads mostly wait, so twice as many run at a time. More than two files of the last kind would crowd
    the machine with workers, servers and browsers.
    """
    waiting = "tests/integration/worker"
    ignored = [f"--ignore={path}" for path in (waiting, *OF_PROCESSES)]
    light = [path for path in paths if path not in OF_PROCESSES]
    return [
        ["pytest", "-n", WORKERS, *options, *ignored, *light],
        ["pytest", "-n", str(2 * int(WORKERS)), *options, waiting],
        ["pytest", "-n", "2", "--dist", "loadfile", *options, *OF_PROCESSES],
    ]


def _stages() -> list[Stage]:
    django = {"DJANGO_SETTINGS_MODULE": "tests.settings"}
    lint = [
        ["ruff", "check"],
        ["ruff", "format", "--check"],
        ["mypy"],
        ["mypy", "--config-file", "example_project/mypy.ini"],
        ["lint-imports"],
        ["django-admin", "makemigrations", "--check", "--dry-run"],
    ]
    on_server = _pytest(*TOUCH_THE_DATABASE, options=["-m", "not browser"])  # a page looks the same on each
    return [
        Stage("lint", "style, types, import rules, migrations", lint, django),
        Stage("sqlite", "all tests, on SQLite", _pytest("tests"), {"DELAYQ_TEST_DB": "sqlite"}),
        Stage(
            "routers",
            "decisions and answers behind a replica that is always stale, on SQLite",
            _pytest("tests/integration", options=["-m", "not browser"])[:2],
            {"DELAYQ_TEST_DB": "sqlite", "DELAYQ_TEST_ROUTER": "replica"},
        ),
        Stage(
            "postgresql",
            "what touches the database, on PostgreSQL",
            on_server,
            {"DELAYQ_TEST_DB": "postgresql"},
            needs_variable="DELAYQ_TEST_POSTGRESQL_URL",
            needs_module="psycopg",
        ),
        Stage(
            "mariadb",
            "what touches the database, on MariaDB (server at +08:00)",
            on_server,
            {"DELAYQ_TEST_DB": "mariadb"},
            needs_variable="DELAYQ_TEST_MARIADB_URL",
            needs_module="MySQLdb",
        ),
        _connections(),
    ]


def _connections() -> Stage:
    """Workers on real connection pools: in threads of the test, and as processes."""
    on_two = ["pytest", "-n", "2"]
    processes = ["tests/e2e/crashes", "-k", "not crashes or slept or lost or polled"]
    in_threads = ["tests/integration/worker/test_worker.py"]
    return Stage(
        "connections",
        "workers with pools of several sizes and through PgBouncer",
        [
            ["DELAYQ_TEST_POOL=true", *on_two, *in_threads],
            ["DELAYQ_TEST_POOL=20", *on_two, *in_threads],
            ["DELAYQ_TEST_POOL=2", *on_two, *processes],
            ["DELAYQ_TEST_POOLER=pgbouncer", *on_two, *in_threads, *processes],
        ],
        {"DELAYQ_TEST_DB": "postgresql"},
        needs_variable="DELAYQ_TEST_POSTGRESQL_URL",
        needs_module="psycopg_pool",
    )


def run(names: Sequence[str]) -> int:
    """Run the stages called `names`, or all; returns the exit code and prints what happened to each."""
    stages = _stages()
    if unknown := set(names) - {stage.name for stage in stages}:
        print(f"no such stage: {', '.join(sorted(unknown))}; there are {', '.join(stage.name for stage in stages)}")
        return 2
    lines: list[str] = []
    failed = 0
    UNSTEADY.unlink(missing_ok=True)
    for stage in (stage for stage in stages if not names or stage.name in names):
        for file in RESULTS.glob(f"{stage.name}-*.xml"):  # of an earlier run: they must not pass for those of this one
            file.unlink()
        print(f"\n=== {stage.name}: {stage.words}", flush=True)
        if lacking := stage.lacking():
            lines.append(f"left out  {stage.name}: {lacking}")
            failed += os.environ.get("CI") == "true"
            continue
        began = time.monotonic()
        passed = stage.run()
        minutes, seconds = divmod(round(time.monotonic() - began), MINUTE)
        lines.append(f"{'passed' if passed else 'FAILED':9} {stage.name}: {stage.words} ({minutes}:{seconds:02d})")
        failed += not passed
    lines += [f"left out  {missing}" for missing in os.environ.get("DELAYQ_TEST_LEFT_OUT", "").splitlines()]
    if UNSTEADY.exists():
        lines += [f"UNSTEADY  {line}: failed, then passed alone" for line in UNSTEADY.read_text().splitlines()]
    print("\n=== summary", *lines, sep="\n", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
