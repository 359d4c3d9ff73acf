"""Run the suite in stages, and end with a list of the stages that ran, and of the tests that were left out.

    python3 tests/servers.py run -- .venv/bin/python tools/suite.py            all on SQLite, `dialect` on each server
    python3 tests/servers.py run -- .venv/bin/python tools/suite.py all        everything everywhere
    python3 tests/servers.py run -- .venv/bin/python tools/suite.py lint       one stage, or several; also with `all`

Two lanes run side by side. Tests that compute run in one of them, at a lower priority; tests that start processes, and
mostly wait, run in the other one. So neither core is idle, and no process waits long for a core. When the second lane
is empty, it takes what is last in the first one.

A failed stage does not stop the next one: a formatting slip should not hide a failing test.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

if __package__ in (None, ""):  # run as a script, from this folder
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.guarantees import read_results
from tools.moved_clock import DAY, DAYS
from tools.newest import find_python

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / ".results"
WORKERS = os.environ.get("PYTEST_WORKERS", str(min(4, os.cpu_count() or 1)))
IN_THREADS = str(2 * int(WORKERS))
SPREAD = ("-n", WORKERS, "--dist", "worksteal")
"""Each process has whole files, so that what a file prepares is prepared once; only the last ones are divided."""
PYTHONPATH = os.pathsep.join([str(ROOT), str(ROOT / "example_project")])
NICENESS = "5"
MINUTE = 60
THREADS = "tests/integration/worker"
PROCESSES = ("tests/e2e", "tests/shop")
PLANS = tuple(f"tests/integration/{room}/test_query_plans.py" for room in ("admin", "scheduling", "worker"))
NOT_OF_REPLICAS = (*PLANS, "tests/integration/firing", "tests/integration/matrix")
"""No replica changes a query plan or the type of a key. What a firing reads, the workers in threads read, too."""
NOT_OF_CONNECTIONS = tuple(f"{THREADS}/test_{name}.py" for name in ("locked_ledger", "query_plans"))
"""No kind of connection changes them."""
TESTS_FAILED = 1
"""The exit code of pytest after a complete run in which tests failed."""
UNSTEADY = RESULTS / "unsteady.txt"
UNSTEADY_LIMIT = 3
NO_SECOND_RUN = (
    "tests/e2e/chaos",
    "tests/e2e/crashes",
    "tests/e2e/races",
    "tests/engine/test_invariants.py",
    "tests/engine/test_model.py",
)
"""One failure here in a hundred runs is a defect: these tests provoke what happens rarely."""
Command = Sequence[str]
EVERYTHING = "all"
SCHEMA, TEMPLATES = ("check-jsonschema", "--builtin-schema"), ".github/ISSUE_TEMPLATE"
LINT: Sequence[Command] = (
    ("ruff", "check"),
    ("ruff", "format", "--check"),
    ("mypy",),
    ("mypy", "--config-file", "example_project/mypy.ini"),
    ("lint-imports",),
    ("django-admin", "makemigrations", "--check", "--dry-run"),
    (*SCHEMA, "vendor.github-workflows", ".github/workflows/tests.yml", ".github/workflows/matrix.yml"),
    (*SCHEMA, "vendor.github-issue-forms", f"{TEMPLATES}/defect.yml", f"{TEMPLATES}/proposal.yml"),
    (*SCHEMA, "vendor.github-issue-config", f"{TEMPLATES}/config.yml"),
    ("zizmor", "--offline", "--quiet", ".github"),
    ("sphinx-build", "-W", "--keep-going", "-q", "-d", "build/doctrees", "docs", "build/docs"),
)
LINT_SETTINGS = {"DJANGO_SETTINGS_MODULE": "tests.settings"}
NO_RECORDED_ORDERS = "not real_orders"
"""They take minutes, and are replayed once."""
NO_BROWSER = f"not browser and {NO_RECORDED_ORDERS}"
"""Pages are the same on each database."""
LEFT_OUT = "DELAYQ_TEST_DESELECTED"
"""Names the file into which `tests/support/left_out.py` writes the tests that marks leave out."""
MUTANTS: Command = ("python", "tools/mutants.py", "--sample", "3", "--workers", "1")
REAL_ORDERS: Command = ("pytest", "-m", "real_orders", "tests/shop")


@dataclass(frozen=True)
class Stage:
    """Commands that pass or fail together: those that compute, and those that mostly wait.

    `alone`: they never run side by side, because a server counts something for all of its databases.
    `is_optional`: it may be left out in CI, too. `is_on_demand`: it runs only if it is named.
    """

    name: str
    words: str
    computing: Sequence[Command] = ()
    waiting: Sequence[Command] = ()
    environment: dict[str, str] = field(default_factory=dict)
    needs_variable: str | None = None
    needs_module: str | None = None
    alone: bool = False
    is_optional: bool = False
    is_on_demand: bool = False

    def lacking(self) -> str | None:
        """Return why it cannot run here; None if it can."""
        if not self.computing and not self.waiting:
            return "there is nothing to run"
        if self.needs_variable and not os.environ.get(self.needs_variable):
            return f"{self.needs_variable} is not set"
        if self.needs_module and importlib.util.find_spec(self.needs_module) is None:
            return f"the Python package {self.needs_module} is not installed"
        if self.name == "newest" and find_python() is None:
            return f"no Python newer than {sys.version.split()[0]} was found"
        return None


class Job:
    """One command of a stage. A test run writes its results into `results`, for `tools/guarantees.py`."""

    def __init__(self, stage: Stage, command: Command, number: int, *, computes: bool) -> None:
        self.stage = stage
        self.computes = computes
        self.results = RESULTS / f"{stage.name}-{number}.xml"
        self.left_out = self.results.with_suffix(".left-out")
        self.environment = {**os.environ, **stage.environment, "PYTHONPATH": PYTHONPATH, LEFT_OUT: str(self.left_out)}
        self.environment.pop("PYTHONDONTWRITEBYTECODE", None)  # some 100 processes would compile all tests
        while "=" in command[0]:  # as in a shell
            name, _, value = command[0].partition("=")
            self.environment[name], command = value, command[1:]
        self.command = command
        self.is_test_run = command[0] in ("pytest", "newest")
        self.passed = False
        self.code = 0
        self.seconds = 0.0
        self.cpu_seconds = 0.0
        """User and system time of the command and its descendants, without the servers. A busy machine adds little."""

    def run(self, printing: threading.Lock) -> None:
        """Run the command; print its output in one piece, because the other lane prints too."""
        log = RESULTS / f"{self.results.stem}.log"
        options = [f"--junitxml={self.results}"] if self.is_test_run else []
        began = time.monotonic()
        with log.open("wb") as output:
            self.code = self._call([*self.command, *options], output)
        self.seconds = time.monotonic() - began
        self.passed = self.code == 0
        with printing:
            print(f"\n--- {self.stage.name}: {' '.join(self.command)} ({_total([self])})", flush=True)
            print(log.read_text(encoding="utf-8", errors="replace"), flush=True)

    def pass_alone(self) -> bool:
        """Run a few failed tests once more, with nothing beside them; record those that pass then as unsteady.

        A slow machine may break a test that waits; the second run distinguishes this. The summary names the test.
        """
        tree = ET.parse(self.results)
        cases = [(suite, case) for suite in tree.iter("testsuite") for case in suite.iter("testcase")]
        failed = [(suite, case) for suite, case in cases if {child.tag for child in case} & {"failure", "error"}]
        names = sorted({f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}" for _, case in failed})
        if not 0 < len(names) <= UNSTEADY_LIMIT or any(name.startswith(NO_SECOND_RUN) for name in names):
            return False
        again = self.results.with_name(f"{self.results.stem}-again.xml")
        print(f"\n--- {self.stage.name}, once more: {' '.join(names)}", flush=True)
        if self._call([self.command[0], *names, f"--junitxml={again}"]) != 0:
            return False
        for suite, case in failed:  # tools/guarantees.py finds the second result in the other file
            suite.remove(case)
        tree.write(self.results)
        with UNSTEADY.open("a", encoding="utf-8") as file:
            file.writelines(f"{self.results.stem}: {name}\n" for name in names)
        return True

    def _call(self, command: Command, output: object = None) -> int:
        folder = Path(sys.executable).parent
        newest = [sys.executable, str(ROOT / "tools" / "newest.py")]
        program = newest if command[0] == "newest" else [str(folder / command[0])]
        words = [*(["nice", "-n", NICENESS] if self.computes else []), *program, *command[1:]]
        process = subprocess.Popen(  # type: ignore[call-overload]
            words, cwd=ROOT, env=self.environment, stdout=output, stderr=output and subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        self.cpu_seconds += usage.ru_utime + usage.ru_stime
        return int(process.returncode)


def _computing(*paths: str, marks: str = "", ignored: Command = ()) -> Command:
    """Return the command for tests that compute: with more processes than cores they would get in each other's way."""
    return ["pytest", *SPREAD, "-m", marks, *_ignore((THREADS, *PROCESSES, *ignored)), *paths]


def _in_threads(marks: str = "", ignored: Command = ()) -> Command:
    """Return the command for workers in threads of the test. They mostly wait, so twice as many run at a time."""
    return ["pytest", "-n", IN_THREADS, "-m", marks, *_ignore(ignored), THREADS]


def _in_processes(marks: str) -> Command:
    """Return the command for tests that start and kill processes.

    More than three files at a time would fill the machine with workers, servers and browsers.
    """
    return ["pytest", "-n", "3", "--dist", "loadfile", "-m", marks, *PROCESSES]


def _ignore(paths: Sequence[str]) -> list[str]:
    return [f"--ignore={path}" for path in paths]


def _stages(*, everything: bool = False) -> list[Stage]:
    """Return all stages. Their order is that within each lane; the two stages of one server are far from each other.

    `everything`: on servers and connections all tests run that may, otherwise those marked `dialect`.
    """
    marks = NO_BROWSER if everything else f"dialect and {NO_BROWSER}"
    return [
        Stage("lint", "style, types, imports, migrations, workflow files, docs", LINT, environment=LINT_SETTINGS),
        Stage(
            "sqlite",
            "all tests, on SQLite, and a sample of both mutation gates",
            [_computing("tests")],
            [_in_threads(), _in_processes(NO_RECORDED_ORDERS), MUTANTS],
            {"DELAYQ_TEST_DB": "sqlite", "DELAYQ_TEST_MUTANTS_STEP": "5"},
        ),
        _on_server("postgresql", "what depends on the database, on PostgreSQL", "psycopg", marks),
        Stage(
            "routers",
            "decisions and answers behind a replica that is always stale, on SQLite",
            [_computing("tests/integration", marks=marks, ignored=() if everything else NOT_OF_REPLICAS)],
            [_in_threads(marks, NOT_OF_CONNECTIONS)],
            {"DELAYQ_TEST_DB": "sqlite", "DELAYQ_TEST_ROUTER": "replica"},
        ),
        Stage(
            "newest",
            "unit and integration tests on the newest Python and Django, on SQLite",
            (),
            [["newest", *_computing("tests/unit", "tests/integration", marks=NO_BROWSER)[1:]]],
            {"DELAYQ_TEST_DB": "sqlite"},
            is_optional=True,
            is_on_demand=not everything,
        ),
        _on_server("mariadb", "what depends on the database, on MariaDB (at +08:00)", "MySQLdb", marks, alone=True),
        _connections(marks),
        Stage(
            "check",
            "style and types, and the tests that are not slow, on SQLite",
            [["pytest", *SPREAD, "-m", f"not slow and {NO_BROWSER}", *_ignore([THREADS]), "tests"]],
            [*LINT[:3], LINT[4], _in_threads("not slow")],
            {"DELAYQ_TEST_DB": "sqlite"},
            is_on_demand=True,
        ),
        *(_oracle(name) for name in ("sqlite", "postgresql", "mariadb")),
    ]


def _on_server(name: str, words: str, module: str, marks: str, *, alone: bool = False) -> Stage:
    """Return the stage of the tests that depend on the database, on a server."""
    # Made-up orders are replayed on each database. Recorded ones need minutes: once, with prepared statements.
    real_orders = [["DELAYQ_TEST_BINDING=server", *REAL_ORDERS]] if name == "postgresql" else []
    return Stage(
        name,
        words,
        [_computing("tests/integration", marks=marks)],
        [_in_threads(marks), _in_processes(marks), *real_orders],
        {"DELAYQ_TEST_DB": name},
        needs_variable=f"DELAYQ_TEST_{name.upper()}_URL",
        needs_module=module,
        alone=alone,
    )


def _connections(marks: str) -> Stage:
    """Return the stage of workers on real connection pools: in threads of the test, and as processes."""
    processes = ["tests/e2e/crashes", "tests/e2e/punctuality/test_bounds.py", "-k", "slept or lost or answer"]
    in_threads = _in_threads(marks, NOT_OF_CONNECTIONS)
    return Stage(
        "connections",
        "workers with pools of several sizes, with prepared statements, and through PgBouncer",
        (),
        [
            ["DELAYQ_TEST_BINDING=server", "DELAYQ_TEST_POOL=2", *in_threads],
            ["DELAYQ_TEST_POOL=true", "pytest", "-n", "2", *processes],
            ["DELAYQ_TEST_POOLER=pgbouncer", *in_threads],
            ["DELAYQ_TEST_POOLER=pgbouncer", "pytest", "-n", "2", *processes],
        ],
        {"DELAYQ_TEST_DB": "postgresql"},
        needs_variable="DELAYQ_TEST_POSTGRESQL_URL",
        needs_module="psycopg_pool",
    )


def _oracle(name: str) -> Stage:
    """Return the stage of the tests that a change of the structure leaves as they are, on one database.

    They see the package from outside: processes, pages, query plans, and the engine beside its model.
    """
    is_first = name == "sqlite"
    model = ["tests/engine/test_model.py"] if is_first else []
    return Stage(
        f"oracle-{name}",
        "what a change of the structure must not change",
        [["pytest", *SPREAD, *model, *PLANS]],
        [_in_processes(NO_RECORDED_ORDERS if is_first else NO_BROWSER)],
        {"DELAYQ_TEST_DB": name},
        needs_variable=None if is_first else f"DELAYQ_TEST_{name.upper()}_URL",
        alone=name == "mariadb",
        is_on_demand=True,
    )


def _jobs(stages: Sequence[Stage]) -> list[Job]:
    """Return the jobs of both lanes. The one that waits begins with MariaDB, with which the other one ends."""
    jobs: list[Job] = []
    for stage in sorted(stages, key=lambda stage: stage.name != "mariadb"):
        for number, command in enumerate(stage.waiting, start=len(stage.computing)):
            jobs.append(Job(stage, command, number, computes=False))
    for stage in stages:
        for number, command in enumerate(stage.computing):
            jobs.append(Job(stage, command, number, computes=True))
    return jobs


def _run_lanes(jobs: Sequence[Job]) -> None:
    """Run both lanes to their ends; afterwards, with nothing beside them, the few tests that failed."""
    printing = threading.Lock()
    alone: dict[str, threading.Lock] = defaultdict(threading.Lock)

    computing, waiting = (deque(job for job in jobs if job.computes is computes) for computes in (True, False))

    def run_lane(next_job: Callable[[], Job]) -> None:
        while True:
            try:
                job = next_job()
            except IndexError:  # none is left
                return
            with alone[job.stage.name if job.stage.alone else job.results.name]:
                job.run(printing)

    other = threading.Thread(target=run_lane, args=(computing.popleft,), daemon=True)
    other.start()
    run_lane(waiting.popleft)
    run_lane(computing.pop)  # the last ones of the other lane, which is longer
    other.join()
    for job in jobs:
        if job.is_test_run and job.code == TESTS_FAILED:
            job.passed = job.pass_alone()


def run(names: Sequence[str]) -> int:
    """Run the stages called `names`, or all but those on demand; return the exit code and print what happened.

    The name `all` does not select stages: it lets each of them run all of its tests.
    """
    stages = _stages(everything=EVERYTHING in names)
    names = [name for name in names if name != EVERYTHING]
    if unknown := set(names) - {stage.name for stage in stages}:
        print(f"no such stage: {', '.join(sorted(unknown))}; there are {', '.join(stage.name for stage in stages)}")
        return 2
    wanted = [stage for stage in stages if (stage.name in names if names else not stage.is_on_demand)]
    missing = {stage.name: lacking for stage in wanted if (lacking := stage.lacking())}
    RESULTS.mkdir(exist_ok=True)
    UNSTEADY.unlink(missing_ok=True)
    for stage in wanted if names else stages:  # results of an earlier run must not pass for those of this one
        for file in RESULTS.glob(f"{stage.name}-*"):
            file.unlink()
    began = time.monotonic()
    jobs = _jobs([stage for stage in wanted if stage.name not in missing])
    _run_lanes(jobs)
    lines: list[str] = []
    failed = any(os.environ.get("CI") == "true" for stage in wanted if stage.name in missing and not stage.is_optional)
    for stage in wanted:
        if stage.name in missing:
            continue
        own = [job for job in jobs if job.stage is stage]
        passed = all(job.passed for job in own)
        failed |= not passed
        lines.append(f"{'passed' if passed else 'FAILED':9} {stage.name}: {stage.words} ({_total(own)})")
    if UNSTEADY.exists():
        lines += [f"UNSTEADY  {line}: failed, then passed alone" for line in UNSTEADY.read_text().splitlines()]
    omitted = [f"{name}: {lacking}" for name, lacking in missing.items()]
    omitted += os.environ.get("DELAYQ_TEST_LEFT_OUT", "").splitlines()
    omitted += [*_left_out(jobs), *([] if names else _left_out_of_all(stages))]
    print(
        "\n=== summary",
        *lines,
        *(f"left out  {line}" for line in omitted),
        f"in all {_clock(time.monotonic() - began)}, CPU {_clock(sum(job.cpu_seconds for job in jobs))}",
        sep="\n",
        flush=True,
    )
    return 1 if failed else 0


def _left_out(jobs: Sequence[Job]) -> Iterator[str]:
    """Yield for each stage how many tests of each room its marks left out; a file has their names."""
    for stage, own in itertools.groupby(sorted(jobs, key=lambda job: job.stage.name), key=lambda job: job.stage):
        files = [job.left_out for job in own if job.left_out.exists()]
        if names := sorted({name for file in files for name in file.read_text(encoding="utf-8").splitlines()}):
            file = RESULTS / f"{stage.name}-left-out.txt"
            file.write_text("\n".join(names), encoding="utf-8")
            rooms = Counter("/".join(name.partition("::")[0].split("/")[1:-1]) for name in names)
            most = ", ".join(f"{room or 'tests'} {count}" for room, count in sorted(rooms.items()))
            yield f"{stage.name}: {len(names)} tests ({most}), see {file.parent.name}/{file.name}"


def _left_out_of_all(stages: Sequence[Stage]) -> Iterator[str]:
    """Yield what no stage of this run has: tests that were skipped wherever they ran, and other commands."""
    for name, outcomes in sorted(read_results(RESULTS).items()):
        if not any(cases["passed"] or cases["failed"] for cases in outcomes.values()):
            yield f"everywhere: {name} was skipped on {', '.join(sorted(outcomes))}"
    for stage in stages:
        if stage.name == "newest" and stage.is_on_demand:
            yield f"{stage.name}: {stage.words}: make test-all"
    yield "mutants: all but a sample of the faults: make mutants"
    if not os.environ.get(DAY):
        yield f"days: {', '.join(DAYS)}: make test-all DAY=..."


def _total(jobs: Sequence[Job]) -> str:
    return f"{_clock(sum(job.seconds for job in jobs))}, CPU {_clock(sum(job.cpu_seconds for job in jobs))}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), MINUTE)
    return f"{minutes}:{rest:02d}"


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
