"""The appendix of the guarantees shows the results of the last run, and each promise and failure has tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import guarantees

PAGE = """# Faults

| promise or failure | tests | last result |
| --- | --- | --- |
| a worker dies | `tests/e2e/test_a.py::test_kill`, `tests/e2e/test_a.py::test_stop` | not run |
"""
PROMISES = """# Guarantees

| failure | what happens |
| --- | --- |
| a worker dies | It fires once. |

| failure | bound | measured |
| --- | --- | --- |
| FLUSHALL | 5 s | 4 s |
"""


def results(folder: Path, **cases: str) -> None:
    body = "".join(
        f'<testcase classname="tests.e2e.test_a" name="{name}">{inside}</testcase>' for name, inside in cases.items()
    )
    (folder / "postgresql-1.xml").write_text(f"<testsuites><testsuite>{body}</testsuite></testsuites>")


@pytest.fixture
def page(tmp_path: Path) -> Path:
    file = tmp_path / "guarantees-tests.md"
    file.write_text(PAGE)
    (tmp_path / "guarantees.md").write_text(PROMISES)
    return file


def main(verb: str, folder: Path, page: Path) -> int:
    return guarantees.main(verb, folder, page, folder / "guarantees.md")


def test_results_are_written_into_their_row(tmp_path: Path, page: Path) -> None:
    results(tmp_path, **{"test_kill[begun]": "", "test_kill[locked]": "", "test_stop": ""})
    assert main("fill", tmp_path, page) == 0
    assert page.read_text().splitlines()[-1].endswith("| passed: PostgreSQL 3 |")
    assert main("check", tmp_path, page) == 0


@pytest.mark.parametrize(
    ("inside", "complaint"),
    [
        ("<failure/>", "test_stop failed on postgresql"),
        ("<error/>", "test_stop failed on postgresql"),
        ("<skipped/>", "test_stop was not run"),
        (None, "test_stop was not run"),
    ],
)
def test_a_test_that_did_not_pass_is_named(
    tmp_path: Path, page: Path, capsys: pytest.CaptureFixture[str], inside: str | None, complaint: str
) -> None:
    results(tmp_path, test_kill="", **({} if inside is None else {"test_stop": inside}))
    assert main("check", tmp_path, page) == 1
    assert complaint in capsys.readouterr().out


def test_no_run_at_all_and_a_row_that_names_no_test_are_errors(tmp_path: Path, page: Path) -> None:
    assert main("check", tmp_path, page) == 1
    page.write_text(PAGE.replace("::", " "))
    results(tmp_path, test_kill="", test_stop="")
    assert main("check", tmp_path, page) == 1


@pytest.mark.parametrize(
    ("promise", "complaint"),
    [
        ("| a worker dies | It fires once. |\n| Redis dies | It fires late. |", "no tests for: Redis dies"),
        ("| Redis dies | It fires late. |", "not a promise or failure: a worker dies"),
    ],
)
def test_a_failure_without_tests_is_an_error(
    tmp_path: Path, page: Path, capsys: pytest.CaptureFixture[str], promise: str, complaint: str
) -> None:
    results(tmp_path, test_kill="", test_stop="")
    (tmp_path / "guarantees.md").write_text(PROMISES.replace("| a worker dies | It fires once. |", promise))
    assert main("check", tmp_path, page) == 1
    assert complaint in capsys.readouterr().out


def test_the_pages_name_the_same_promises_and_failures() -> None:
    pages = (path.read_text(encoding="utf-8") for path in (guarantees.PAGE, guarantees.PROMISES))
    assert guarantees.missing(*pages) == []


def test_every_test_that_the_page_names_exists() -> None:
    named = [test for row in guarantees.rows(guarantees.PAGE.read_text(encoding="utf-8")) for test in row.tests]
    assert named
    sources = {file: guarantees.ROOT / file for file, _, _ in (test.partition("::") for test in named)}
    found = {file: path.read_text(encoding="utf-8") if path.is_file() else "" for file, path in sources.items()}
    assert [test for test in named if f"def {test.partition('::')[2]}(" not in found[test.partition("::")[0]]] == []
