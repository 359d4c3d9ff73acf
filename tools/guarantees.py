"""Check the tests of `docs/guarantees-tests.md` against the results of the last run of the suite.

    .venv/bin/python tools/guarantees.py check     each promise and failure has tests, and all of them passed
    .venv/bin/python tools/guarantees.py fill      the same, and write the results into the page

`make test` leaves its results in `.results/`, one file of JUnit XML per command and database. The promises and
failures are those of `docs/guarantees.md`: the first cells of its first two tables.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / ".results"
PAGE = ROOT / "docs" / "guarantees-tests.md"
PROMISES = ROOT / "docs" / "guarantees.md"
STAGES = {"sqlite": "SQLite", "postgresql": "PostgreSQL", "mariadb": "MariaDB"}
FAILURE = ("what happens",)
TEST = re.compile(r"`(?P<file>tests/[\w/]+\.py)::(?P<name>test_\w+)`")


@dataclass(frozen=True)
class Row:
    """One promise or failure of the page: its line number, its cells, and the tests that it names."""

    line: int
    cells: tuple[str, ...]

    @property
    def tests(self) -> list[str]:
        return [f"{match['file']}::{match['name']}" for match in TEST.finditer(self.cells[1])]


def rows(text: str) -> Iterator[Row]:
    """Yield the rows of every table whose columns end with `tests` and `last result`."""
    return _rows(text, lambda header: header[1:] == ("tests", "last result"))


def missing(text: str, promises: str) -> list[str]:
    """Return the promises and failures of `docs/guarantees.md` that have no row in `text`, and rows without one."""
    expected = {row.cells[0] for row in _rows(promises, lambda header: header[0] == "promise" or header[1:] == FAILURE)}
    found = {row.cells[0] for row in rows(text)}
    return [f"no tests for: {name}" for name in sorted(expected - found)] + [
        f"not a promise or failure: {name}" for name in sorted(found - expected)
    ]


def _rows(text: str, wanted: Callable[[tuple[str, ...]], bool]) -> Iterator[Row]:
    header: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines()):
        cells = tuple(cell.strip() for cell in line.strip().strip("|").split("|"))
        if not line.startswith("|"):
            header = ()
        elif not header:
            header = cells
        elif wanted(header) and not set(line) <= set("|- "):
            yield Row(number, cells)


def read_results(folder: Path) -> dict[str, dict[str, Counter[str]]]:
    """Return for each test and each stage how many of its cases passed, failed or were skipped."""
    found: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for file in sorted(folder.glob("*.xml")):
        stage = file.stem.partition("-")[0]
        # Our own pytest has just written this file, so the parser needs no protection.
        for case in ET.parse(file).iter("testcase"):
            name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name', '').partition('[')[0]}"
            outcomes = {child.tag for child in case}
            outcome = "failed" if outcomes & {"failure", "error"} else "skipped" if "skipped" in outcomes else "passed"
            found[name][stage][outcome] += 1
    return found


def verdict(row: Row, results: dict[str, dict[str, Counter[str]]]) -> tuple[str, list[str]]:
    """Return the result of the last run for one row as text, and the complaints about it."""
    wrong = [] if row.tests else ["no test is named"]
    passed: Counter[str] = Counter()
    for test in row.tests:
        stages = results.get(test, {})
        wrong += [f"{test} failed on {stage}" for stage, cases in stages.items() if cases["failed"]]
        if not any(cases["passed"] for cases in stages.values()):
            wrong.append(f"{test} was not run")
        passed.update({stage: cases["passed"] for stage, cases in stages.items() if cases["passed"]})
    words = ", ".join(f"{label} {passed[stage]}" for stage, label in STAGES.items() if passed[stage])
    return (f"passed: {words}" if not wrong else "failed"), wrong


def main(verb: str, folder: Path = RESULTS, page: Path = PAGE, promises: Path = PROMISES) -> int:
    text = page.read_text(encoding="utf-8")
    results = read_results(folder)
    if not results:
        print(f"guarantees: there are no results in {folder.name}/: run `make test` first")
        return 1
    lines, wrong = text.splitlines(), missing(text, promises.read_text(encoding="utf-8"))
    for row in rows(text):
        words, complaints = verdict(row, results)
        wrong += [f"{page.name}:{row.line + 1}: {complaint}" for complaint in complaints]
        lines[row.line] = "| " + " | ".join((*row.cells[:2], words)) + " |"
    if verb == "fill":
        filled = "\n".join(lines) + "\n"
        today = datetime.now(UTC).date().isoformat()
        page.write_text(re.sub(r"(?<=<!-- filled -->)[\d-]+", today, filled), encoding="utf-8")
    print(*wrong, sep="\n")
    print(f"guarantees: {len(list(rows(text)))} rows, {len(wrong)} complaints")
    return 1 if wrong else 0


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in ("check", "fill"):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
