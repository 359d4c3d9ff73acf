"""The suite repeats a few failed tests once, names those that pass then, and hides no failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import guarantees, suite

pytestmark = pytest.mark.slow

FAILS_ONCE = """
from pathlib import Path

import pytest


@pytest.mark.parametrize("number", range({count}))
def test_unsteady(number):
    before = Path(__file__).with_name(f"ran-{{number}}")
    if not before.exists():
        before.touch()
        pytest.fail("the first time")


def test_steady():
    assert {steady}
"""

MARKED = """
import pytest


@pytest.mark.dialect
def test_marked():
    pass


@pytest.mark.dialect
@pytest.mark.skip(reason="of another database")
def test_skipped():
    pass


@pytest.mark.parametrize("number", [0, 1])
def test_other(number):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a project with one file of tests, on which the whole suite runs."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setattr(suite, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(suite, "UNSTEADY", tmp_path / "results" / "unsteady.txt")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\nmarkers = dialect\n")
    return tmp_path


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, count: int, *, steady: bool = True) -> int:
    """Run a suite in which `count` tests fail once; `steady`: whether one more passes."""
    (folder / "tests").mkdir(exist_ok=True)
    (folder / "tests" / "test_some.py").write_text(FAILS_ONCE.format(count=count, steady=steady))
    command = ["pytest", "tests"]
    stages = [suite.Stage("some", "a few tests", (), [command]), suite.Stage("other", "computes", [["python", "-V"]])]
    monkeypatch.setattr(suite, "_stages", lambda *, everything: stages)
    return suite.run([])


def test_a_few_tests_that_fail_once_pass_and_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, monkeypatch, suite.UNSTEADY_LIMIT) == 0
    names = [f"some-0: tests/test_some.py::test_unsteady[{number}]" for number in range(suite.UNSTEADY_LIMIT)]
    assert suite.UNSTEADY.read_text().splitlines() == names
    said = capfd.readouterr().out
    assert f"UNSTEADY  {names[0]}: failed, then passed alone" in said
    assert "passed    other: computes" in said
    results = guarantees.read_results(suite.RESULTS)
    assert results["tests/test_some.py::test_unsteady"]["some"] == {"passed": suite.UNSTEADY_LIMIT}
    assert results["tests/test_some.py::test_steady"]["some"] == {"passed": 1}


def test_neither_many_failures_nor_one_that_is_a_defect_are_repeated(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(folder, monkeypatch, suite.UNSTEADY_LIMIT + 1) == 1
    monkeypatch.setattr(suite, "NO_SECOND_RUN", ("tests/test_some.py",))
    for ran in (folder / "tests").glob("ran-*"):
        ran.unlink()
    assert run(folder, monkeypatch, 1) == 1
    assert not suite.UNSTEADY.exists()


def test_a_test_that_fails_twice_fails_the_suite(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(folder, monkeypatch, 1, steady=False) == 1
    assert not suite.UNSTEADY.exists()
    assert guarantees.read_results(suite.RESULTS)["tests/test_some.py::test_steady"]["some"]["failed"] == 2


def test_every_place_that_the_suite_names_exists() -> None:
    """Pytest does not report a path to ignore that does not exist."""
    stages = [*suite._stages(), *suite._stages(everything=True)]
    commands = [command for stage in stages for command in [*stage.computing, *stage.waiting]]
    named = {word.removeprefix("--ignore=") for command in commands for word in command}
    places = {word for word in named if word.startswith(("tests/", ".github/"))} | set(suite.NO_SECOND_RUN)
    assert len(places) > 15
    assert [place for place in sorted(places) if not (guarantees.ROOT / place).exists()] == []


def test_what_marks_leave_out_is_listed_by_room_and_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    rooms = [folder / "tests" / "integration" / room for room in ("admin", "rest")]
    for room in rooms:
        room.mkdir(parents=True)
        (room / "test_some.py").write_text(MARKED)
    command = ["pytest", "-p", "tests.support.left_out", "-m", "dialect", "tests"]
    stages = [suite.Stage("server", "what depends on it", [command])]
    monkeypatch.setattr(suite, "_stages", lambda *, everything: stages)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # the stage would take itself for a part of this run
    assert suite.run([]) == 0
    printed = capfd.readouterr().out
    assert "left out  server: 4 tests (integration/admin 2, integration/rest 2), see results/server-left" in printed
    assert "left out  everywhere: tests/integration/admin/test_some.py::test_skipped was skipped on server" in printed
    names = (folder / "results" / "server-left-out.txt").read_text().splitlines()
    assert names[:2] == [f"tests/integration/admin/test_some.py::test_other[{number}]" for number in (0, 1)]


@pytest.mark.usefixtures("folder")
def test_the_oracle_runs_only_if_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(suite, "_run_lanes", lambda jobs: ran.extend(job.stage.name for job in jobs))
    suite.run([])
    assert "sqlite" in ran
    assert not any(name.startswith("oracle-") for name in ran)
    suite.run(["oracle-sqlite"])
    assert ran[-2:] == ["oracle-sqlite"] * 2


def test_the_oracle_has_the_same_tests_on_each_database() -> None:
    stages = [stage for stage in suite._stages() if stage.name.startswith("oracle-")]
    assert [stage.environment["DELAYQ_TEST_DB"] for stage in stages] == ["sqlite", "postgresql", "mariadb"]
    for stage in stages:
        names = {word for command in (*stage.computing, *stage.waiting) for word in command}
        assert {"tests/e2e", "tests/shop", "tests/integration/scheduling/test_query_plans.py"} <= names
