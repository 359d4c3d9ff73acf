"""The suite repeats a few failed tests once, names those that pass then, and hides no failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import guarantees, suite

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


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a project with one file of tests, on which the whole suite runs."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setattr(suite, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(suite, "UNSTEADY", tmp_path / "results" / "unsteady.txt")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    return tmp_path


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, count: int, *, steady: bool = True) -> int:
    """Run a suite in which `count` tests fail once; `steady`: whether one more passes."""
    (folder / "tests").mkdir()
    (folder / "tests" / "test_some.py").write_text(FAILS_ONCE.format(count=count, steady=steady))
    command = ["pytest", "tests"]
    stages = [suite.Stage("some", "a few tests", (), [command]), suite.Stage("other", "computes", [["python", "-V"]])]
    monkeypatch.setattr(suite, "_stages", lambda: stages)
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


def test_many_failures_are_not_repeated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(folder, monkeypatch, suite.UNSTEADY_LIMIT + 1) == 1
    assert not suite.UNSTEADY.exists()


def test_a_test_that_fails_twice_fails_the_suite(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(folder, monkeypatch, 1, steady=False) == 1
    assert not suite.UNSTEADY.exists()
    assert guarantees.read_results(suite.RESULTS)["tests/test_some.py::test_steady"]["some"]["failed"] == 2


def test_where_one_failure_is_a_defect_nothing_is_repeated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "NO_SECOND_RUN", ("tests/test_some.py",))
    assert run(folder, monkeypatch, 1) == 1
    assert not suite.UNSTEADY.exists()


def test_every_place_that_the_suite_names_exists() -> None:
    """Pytest does not report a path to ignore that does not exist."""
    commands = [command for stage in suite._stages() for command in [*stage.computing, *stage.waiting]]
    named = {word.removeprefix("--ignore=") for command in commands for word in command}
    places = {word for word in named if word.startswith("tests/")} | set(suite.NO_SECOND_RUN)
    assert len(places) > 15
    assert [place for place in sorted(places) if not (guarantees.ROOT / place).exists()] == []


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
