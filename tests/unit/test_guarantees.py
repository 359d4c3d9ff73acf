"""The page of guarantees says what the last run of the suite says, and complains where it cannot."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools import guarantees

PAGE = """# Faults

| fault | what happens | held by | last result |
| --- | --- | --- | --- |
| a worker dies | it fires once | `tests/e2e/test_a.py::test_kill`, `tests/e2e/test_a.py::test_stop` | not run |
"""


def results(folder: Path, **cases: str) -> None:
    body = "".join(
        f'<testcase classname="tests.e2e.test_a" name="{name}">{inside}</testcase>' for name, inside in cases.items()
    )
    (folder / "postgresql-1.xml").write_text(f"<testsuites><testsuite>{body}</testsuite></testsuites>")


@pytest.fixture
def page(tmp_path: Path) -> Path:
    file = tmp_path / "guarantees.md"
    file.write_text(PAGE)
    return file


def test_results_are_written_into_their_row(tmp_path: Path, page: Path) -> None:
    results(tmp_path, **{"test_kill[begun]": "", "test_kill[locked]": "", "test_stop": ""})
    assert guarantees.main("fill", tmp_path, page) == 0
    assert page.read_text().splitlines()[-1].endswith("| passed: PostgreSQL 3 |")
    assert guarantees.main("check", tmp_path, page) == 0


@pytest.mark.parametrize(
    ("inside", "complaint"),
    [
        ("<failure/>", "test_stop failed on postgresql"),
        ("<error/>", "test_stop failed on postgresql"),
        ("<skipped/>", "test_stop ran nowhere"),
    ],
)
def test_a_test_that_did_not_pass_is_named(
    tmp_path: Path, page: Path, capsys: pytest.CaptureFixture[str], inside: str, complaint: str
) -> None:
    results(tmp_path, test_kill="", test_stop=inside)
    assert guarantees.main("check", tmp_path, page) == 1
    assert complaint in capsys.readouterr().out


def test_a_test_that_is_missing_or_no_run_at_all_is_an_error(tmp_path: Path, page: Path) -> None:
    assert guarantees.main("check", tmp_path, page) == 1
    results(tmp_path, test_kill="")
    assert guarantees.main("check", tmp_path, page) == 1


def test_a_row_that_names_no_test_is_an_error(tmp_path: Path, page: Path) -> None:
    page.write_text(PAGE.replace("::", " "))
    results(tmp_path, test_kill="", test_stop="")
    assert guarantees.main("check", tmp_path, page) == 1


def test_every_test_that_the_page_names_exists() -> None:
    named = [test for row in guarantees.rows(guarantees.PAGE.read_text(encoding="utf-8")) for test in row.tests]
    assert named
    assert [test for test in named if not _exists(*test.split("::"))] == []


def _exists(file: str, name: str) -> bool:
    path = guarantees.ROOT / file
    if not path.is_file():
        return False
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(
        isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name for node in ast.walk(tree)
    )
