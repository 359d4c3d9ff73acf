"""The tools that run the tests: no process outlives its launcher, and no failure or missing server is hidden."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import suite

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("in_ci", "code", "printed"), [("", 0, "ran\n"), ("true", 2, "")])
def test_a_missing_program_is_named_and_in_ci_nothing_may_be_missing(
    tmp_path: Path, in_ci: str, code: int, printed: str
) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DELAYQ_TEST_")}
    command = [sys.executable, "tests/servers.py", "run", "--only", "chromium", "--", sys.executable, "-c"]
    environment = {**clean, "PATH": str(tmp_path), "CI": in_ci}
    done = subprocess.run(
        [*command, "print('ran')"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (code, printed)
    assert done.stderr.startswith("servers: left out: chromium (no chromium or ")


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
    (folder / "tests").mkdir(exist_ok=True)
    (folder / "tests" / "test_some.py").write_text(FAILS_ONCE.format(count=count, steady=steady))
    stages = [suite.Stage("some", "a few tests", (), [["pytest", "tests"]])]
    monkeypatch.setattr(suite, "_stages", lambda *, everything: stages)
    return suite.run([])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "steady", "code"), [(suite.UNSTEADY_LIMIT, True, 0), (suite.UNSTEADY_LIMIT + 1, True, 1), (1, False, 1)]
)
def test_a_few_tests_that_fail_once_are_named_and_neither_many_nor_one_that_lasts_are_forgiven(
    folder: Path, monkeypatch: pytest.MonkeyPatch, count: int, steady: bool, code: int
) -> None:
    assert run(folder, monkeypatch, count, steady=steady) == code
    names = [f"some-0: tests/test_some.py::test_unsteady[{number}]" for number in range(count)]
    assert (suite.UNSTEADY.read_text().splitlines() if suite.UNSTEADY.exists() else []) == ([] if code else names)


def test_every_place_that_the_suite_names_exists() -> None:
    """Pytest does not report a path to ignore that does not exist."""
    stages = [*suite._stages(), *suite._stages(everything=True)]
    commands = [command for stage in stages for command in [*stage.computing, *stage.waiting]]
    named = {word.removeprefix("--ignore=") for command in commands for word in command}
    places = {word for word in named if word.startswith(("tests/", ".github/"))} | set(suite.NO_SECOND_RUN)
    assert len(places) > 15
    assert [place for place in sorted(places) if not (ROOT / place).exists()] == []
