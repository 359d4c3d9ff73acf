"""Run the whole suite in stages, and end with a list of the stages that ran and those that were left out.

    python3 tests/servers.py run -- .venv/bin/python tools/suite.py            everything
    python3 tests/servers.py run -- .venv/bin/python tools/suite.py lint       one stage; more may be named

Two lanes run side by side. Tests that compute run in one of them, at a lower priority; tests that start processes, and
mostly wait, run in the other one. So neither core is idle, and no process waits long for a core. When the second lane
is empty, it takes what is last in the first one.

A failed stage does not stop the next one: a formatting slip should not hide a failing test.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

if __package__ in (None, ""):  # run as a script, from this folder
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.newest import find_python

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / ".results"
WORKERS = os.environ.get("PYTEST_WORKERS", str(min(4, os.cpu_count() or 1)))
IN_THREADS = str(2 * int(WORKERS))
PYTHONPATH = os.pathsep.join([str(ROOT), str(ROOT / "example_project")])
NICENESS = "5"
MINUTE = 60
THREADS = "tests/integration/worker"
PROCESSES = ("tests/e2e", "tests/shop")
WORDS = tuple(f"{room}/test_{what}" for room in ("admin", "rest") for what in ("languages", "untranslated"))
"""Which words a page has: no database, replica or release of Python decides it, so SQLite answers for all."""
PLANS = tuple(f"{room}/test_query_plans" for room in ("admin", "operations", "rest", "scheduling"))
DATABASES_ONLY = (
    *("commands/test_status_and_doctor", "rest/test_contract"),
    *(f"firing/test_{name}" for name in ("crashes", "time_limit", "time_limit_races")),
    *(f"matrix/test_{name}" for name in ("conditions", "keys", "keys_shown", "keys_swapped_user")),
    *PLANS,
    *WORDS,
)
"""Neither replicas nor a newer Python change them: query plans and words, processes and races between threads, forms of
conditions and types of keys, and requests, commands and faults at random."""
ROOMS_OF_PYTHON = (
    *("admin", "arming", "commands", "firing", "ledger", "matrix", "metrics"),
    *("rest", "routers", "scheduling", "templates"),
)
"""What calls Python and Django directly. Operations and the sweep are built on it, and the engine on redis-py alone, of
which one module is enough."""
NOT_OF_ROUTERS = ("firing", "matrix")
"""What a firing reads: the workers in threads, which run behind the replica too, read it in the same statements."""
NOT_OF_DATABASES = tuple(f"{THREADS}/test_{name}.py" for name in ("breaker", "connections", "transfer", "urls"))
"""Tests of addresses and clients of Redis, which read no database: SQLite's stage runs them."""
NOT_OF_MARIADB = ("matrix/test_keys_shown", "rest/test_contract", *WORDS)
"""Types of keys on pages, and requests at random: they ran on PostgreSQL and SQLite, in the same statements."""
NOT_OF_THREADS = ("executors", "rates", "remote")
"""Tests of workers that mostly wait for handlers: replicas and larger pools do not change their results."""
NOT_OF_CONNECTIONS = (*NOT_OF_THREADS, "installation", "limits", "long_runs", "query_plans", "shares")
"""Others that no kind of connection changes: they run with the smallest pool."""
WORKERS_OF_ONE_DATABASE = (
    *("crashes/test_installation.py", "crashes/test_supervisor.py", "deployments/test_closed_streams.py"),
    *("executors", "fairness", "guard_rails", "operations"),
)
"""Tests of processes whose statements the integration tests run on each database: PostgreSQL's stage runs them."""
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
WHOLE = bool(os.environ.get("WHOLE"))
"""Whether no test is left to another day, as in `make test-all`: see `tests/sampling.py`."""
PARTS = {"postgresql": 1, "mariadb": 2, "connections": 3, "routers": 4, "newest": 5}
"""Which tests a stage has, of six parts, beside those that depend on the database."""
CASES: Command = () if WHOLE else ("DELAYQ_TEST_CASES=0/3",)
TURN: Command = () if WHOLE else ("DELAYQ_TEST_SAMPLE=0/6",)
"""Tests with processes that SQLite's stage has; other databases have other parts."""
FAST = {"DELAYQ_TEST_DB": "sqlite", "DELAYQ_TEST_SAMPLE": "8"}
"""Of `make check`: what two cores run in less than five minutes."""
LINT: Sequence[Command] = (
    ("ruff", "check"),
    ("ruff", "format", "--check"),
    ("mypy",),
    ("mypy", "--config-file", "example_project/mypy.ini"),
    ("lint-imports",),
    ("django-admin", "makemigrations", "--check", "--dry-run"),
    ("sphinx-build", "-W", "--keep-going", "-q", "-d", "build/doctrees", "docs", "build/docs"),
)
LINT_SETTINGS = {"DJANGO_SETTINGS_MODULE": "tests.settings"}
NO_BROWSER: Command = ("-m", "not browser")
"""Pages are the same on each database."""
MUTANTS: Command = ("python", "tools/mutants.py", "--sample", "6", "--workers", "1")
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
        self.environment = {**os.environ, **stage.environment, "PYTHONPATH": PYTHONPATH}
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


def _computing(*paths: str, options: Command = (), ignored: Command = ()) -> Command:
    """Return the command for tests that compute: with more processes than cores they would get in each other's way."""
    return ["pytest", "-n", WORKERS, *options, *_ignore((THREADS, *PROCESSES, *ignored)), *paths]


def _waiting(*, browser: bool, ignored: Sequence[str] = ()) -> Sequence[Command]:
    """Return the commands for workers in threads, and for what starts and kills processes of its own.

    The workers in threads mostly wait, so twice as many run at a time. More than three files of the other kind at
    a time would fill the machine with workers, servers and browsers.
    """
    marks = "not real_orders" if browser else "not real_orders and not browser"
    return [
        ["pytest", "-n", IN_THREADS, "-m", marks, *([] if browser else _ignore(NOT_OF_DATABASES)), THREADS],
        ["pytest", "-n", "3", "--dist", "loadfile", "-m", marks, *_ignore(ignored), *PROCESSES],
    ]


def _processes(*names: str) -> list[str]:
    return [f"tests/e2e/{name}" for name in names]


def _threads(*names: str) -> list[str]:
    return [f"{THREADS}/test_{name}.py" for name in names]


def _ignore(paths: Sequence[str]) -> list[str]:
    return [f"--ignore={path}" for path in paths]


def _repeated(stage: str) -> dict[str, str]:
    """Return the environment of a stage beside SQLite's: one test in six, and all that depend on the database.

    Of tests with many cases, it has other ones than SQLite's stage; there they are a third, too.
    """
    part = PARTS[stage]
    return {} if WHOLE else {"DELAYQ_TEST_SAMPLE": f"{part}/6", "DELAYQ_TEST_CASES": f"{part % 3}/3"}


def _stages() -> list[Stage]:
    """Return all stages. Their order is that within each lane; the two stages of one server are far from each other."""
    ignored = [f"tests/integration/{name}.py" for name in DATABASES_ONLY]
    rooms = ["tests/unit", "tests/engine/test_engine.py", *(f"tests/integration/{room}" for room in ROOMS_OF_PYTHON)]
    _, *newest = _computing(*rooms, options=NO_BROWSER, ignored=ignored)
    in_threads, in_processes = _waiting(browser=True, ignored=_processes(*WORKERS_OF_ONE_DATABASE))
    return [
        Stage("lint", "style, types, imports, migrations, docs", LINT, environment=LINT_SETTINGS),
        Stage(
            "sqlite",
            "all tests, on SQLite, and a sample of both mutation gates",
            [[*CASES, *_computing("tests")]],
            [[*CASES, *in_threads], [*CASES, *TURN, *in_processes], MUTANTS],
            {"DELAYQ_TEST_DB": "sqlite", "DELAYQ_TEST_MUTANTS_STEP": "5"},
        ),
        _on_server("postgresql", "what touches the database, on PostgreSQL", "psycopg"),
        _routers(),
        Stage(
            "newest",
            "unit tests and most of integration on the newest Python and Django, on SQLite",
            (),
            [["newest", *newest]],  # it computes, but the other lane has room for it
            {"DELAYQ_TEST_DB": "sqlite", "DELAYQ_TEST_DEPLOYMENTS": "single", **_repeated("newest")},
            is_optional=True,
        ),
        _on_server("mariadb", "what touches the database, on MariaDB (server at +08:00)", "MySQLdb", alone=True),
        _connections(),
        Stage(
            "check",
            "style and types, unit tests, the docs, and one in eight of the other tests, on SQLite",
            [_computing("tests/unit", "tests/typing"), _computing("tests", options=NO_BROWSER, ignored=["tests/unit"])],
            [*LINT[:3], LINT[4], ["pytest", "-n", IN_THREADS, THREADS]],
            FAST,
            is_on_demand=True,
        ),
        *(_oracle(name) for name in ("sqlite", "postgresql", "mariadb")),
    ]


def _on_server(name: str, words: str, module: str, *, alone: bool = False) -> Stage:
    """Return the stage of the tests that touch the database, on a server."""
    ignored = [f"tests/integration/{name}.py" for name in (NOT_OF_MARIADB if name == "mariadb" else WORDS)]
    processes = _processes(*WORKERS_OF_ONE_DATABASE) if name == "mariadb" else []
    # Made-up orders are replayed on each database. Recorded ones need minutes: once, with prepared statements.
    real_orders = [["DELAYQ_TEST_BINDING=server", *REAL_ORDERS]] if name == "postgresql" else []
    return Stage(
        name,
        words,
        [_computing("tests/integration", options=NO_BROWSER, ignored=ignored)],
        [*_waiting(browser=False, ignored=processes), *real_orders],
        {"DELAYQ_TEST_DB": name, **_repeated(name)},
        needs_variable=f"DELAYQ_TEST_{name.upper()}_URL",
        needs_module=module,
        alone=alone,
    )


def _oracle(name: str) -> Stage:
    """Return the stage of the tests that a change of the structure leaves as they are, on one database.

    They see the package from outside: processes, pages, query plans, and the engine beside its model.
    """
    is_first = name == "sqlite"
    plans = [f"tests/integration/{path}.py" for path in PLANS] + _threads("query_plans")
    model = ["tests/engine/test_model.py"] if is_first else []
    ignored = [] if name == "postgresql" else _processes(*WORKERS_OF_ONE_DATABASE)
    *_, processes = _waiting(browser=is_first, ignored=ignored)
    return Stage(
        f"oracle-{name}",
        "what a change of the structure must not change",
        [["pytest", "-n", WORKERS, *NO_BROWSER, *model, *plans]],
        [processes],
        {"DELAYQ_TEST_DB": name},
        needs_variable=None if is_first else f"DELAYQ_TEST_{name.upper()}_URL",
        alone=name == "mariadb",
        is_on_demand=True,
    )


def _routers() -> Stage:
    """Return the stage in which a replica that is always stale answers each read that does not name the writer."""
    ignored = [f"tests/integration/{name}.py" for name in DATABASES_ONLY]
    ignored += [f"tests/integration/{room}" for room in NOT_OF_ROUTERS]
    return Stage(
        "routers",
        "decisions and answers behind a replica that is always stale, on SQLite",
        [_computing("tests/integration", options=NO_BROWSER, ignored=ignored)],
        [["pytest", "-n", IN_THREADS, *_ignore(NOT_OF_DATABASES), *_ignore(_threads(*NOT_OF_THREADS)), THREADS]],
        {"DELAYQ_TEST_DB": "sqlite", "DELAYQ_TEST_ROUTER": "replica", **_repeated("routers")},
    )


def _connections() -> Stage:
    """Return the stage of workers on real connection pools: in threads of the test, and as processes."""
    processes = ["tests/e2e/crashes", "-k", "not crashes or slept or lost or polled"]
    in_threads = ["pytest", "-n", IN_THREADS, *_ignore(NOT_OF_DATABASES), THREADS]
    most = [*in_threads, *_ignore(_threads(*NOT_OF_CONNECTIONS))]
    return Stage(
        "connections",
        "workers with pools of several sizes, with prepared statements, and through PgBouncer",
        (),
        [
            ["DELAYQ_TEST_BINDING=server", "DELAYQ_TEST_POOL=2", *in_threads],
            ["DELAYQ_TEST_POOL=true", "pytest", "-n", "2", *processes],
            ["DELAYQ_TEST_POOLER=pgbouncer", *most],
            ["DELAYQ_TEST_POOLER=pgbouncer", "pytest", "-n", "2", *processes],
        ],
        {"DELAYQ_TEST_DB": "postgresql", **_repeated("connections")},
        needs_variable="DELAYQ_TEST_POSTGRESQL_URL",
        needs_module="psycopg_pool",
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
    """Run the stages called `names`, or all but those on demand; return the exit code and print what happened."""
    stages = _stages()
    if unknown := set(names) - {stage.name for stage in stages}:
        print(f"no such stage: {', '.join(sorted(unknown))}; there are {', '.join(stage.name for stage in stages)}")
        return 2
    wanted = [stage for stage in stages if (stage.name in names if names else not stage.is_on_demand)]
    left_out = {stage.name: lacking for stage in wanted if (lacking := stage.lacking())}
    RESULTS.mkdir(exist_ok=True)
    UNSTEADY.unlink(missing_ok=True)
    for stage in wanted if names else stages:  # results of an earlier run must not pass for those of this one
        for file in RESULTS.glob(f"{stage.name}-*"):
            file.unlink()
    began = time.monotonic()
    jobs = _jobs([stage for stage in wanted if stage.name not in left_out])
    _run_lanes(jobs)
    lines: list[str] = []
    failed = any(os.environ.get("CI") == "true" for stage in wanted if stage.name in left_out and not stage.is_optional)
    for stage in wanted:
        if stage.name in left_out:
            lines.append(f"left out  {stage.name}: {left_out[stage.name]}")
            continue
        own = [job for job in jobs if job.stage is stage]
        passed = all(job.passed for job in own)
        failed |= not passed
        lines.append(f"{'passed' if passed else 'FAILED':9} {stage.name}: {stage.words} ({_total(own)})")
    lines += [f"left out  {missing}" for missing in os.environ.get("DELAYQ_TEST_LEFT_OUT", "").splitlines()]
    if UNSTEADY.exists():
        lines += [f"UNSTEADY  {line}: failed, then passed alone" for line in UNSTEADY.read_text().splitlines()]
    print(
        "\n=== summary",
        *lines,
        f"in all {_clock(time.monotonic() - began)}, CPU {_clock(sum(job.cpu_seconds for job in jobs))}",
        sep="\n",
        flush=True,
    )
    return 1 if failed else 0


def _total(jobs: Sequence[Job]) -> str:
    return f"{_clock(sum(job.seconds for job in jobs))}, CPU {_clock(sum(job.cpu_seconds for job in jobs))}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), MINUTE)
    return f"{minutes}:{rest:02d}"


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
