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
"""


@pytest.mark.parametrize(
    ("inside", "complaint"),
    [
        ("", ""),
        ("<failure/>", "test_stop failed on postgresql"),
        ("<error/>", "test_stop failed on postgresql"),
        ("<skipped/>", "test_stop was not run"),
    ],
)
def test_results_are_written_into_their_row_and_a_test_that_did_not_pass_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], inside: str, complaint: str
) -> None:
    page, promises = tmp_path / "guarantees-tests.md", tmp_path / "guarantees.md"
    page.write_text(PAGE)
    promises.write_text(PROMISES)
    assert guarantees.main("check", tmp_path, page, promises) == 1, "there are no results"
    cases = {"test_kill[begun]": "", "test_kill[locked]": "", "test_stop": inside}
    body = "".join(
        f'<testcase classname="tests.e2e.test_a" name="{name}">{each}</testcase>' for name, each in cases.items()
    )
    (tmp_path / "postgresql-1.xml").write_text(f"<testsuites><testsuite>{body}</testsuite></testsuites>")
    assert guarantees.main("fill", tmp_path, page, promises) == bool(complaint)
    assert complaint in capsys.readouterr().out
    assert page.read_text().splitlines()[-1].endswith("| failed |" if complaint else "| passed: PostgreSQL 3 |")


def test_a_failure_without_tests_is_reported_and_so_are_tests_of_none() -> None:
    promises = PROMISES.replace("a worker", "Redis")
    assert guarantees.missing(PAGE, promises) == ["no tests for: Redis dies", "not a promise or failure: a worker dies"]


def test_the_pages_name_the_same_promises_and_failures() -> None:
    pages = (path.read_text(encoding="utf-8") for path in (guarantees.PAGE, guarantees.PROMISES))
    assert guarantees.missing(*pages) == []


def test_every_test_that_the_page_names_exists() -> None:
    named = [test for row in guarantees.rows(guarantees.PAGE.read_text(encoding="utf-8")) for test in row.tests]
    assert named
    sources = {file: guarantees.ROOT / file for file, _, _ in (test.partition("::") for test in named)}
    found = {file: path.read_text(encoding="utf-8") if path.is_file() else "" for file, path in sources.items()}
    assert [test for test in named if f"def {test.partition('::')[2]}(" not in found[test.partition("::")[0]]] == []
