"""Play what each event does to a timeout, and write the table of it into `docs/events.md`: needs Redis.

    .venv/bin/python tests/servers.py run --only redis -- .venv/bin/python tools/states.py
    .venv/bin/python tools/states.py page      write the page only, from the columns that were found before

The tests in `tests/integration/rounds` play the events and compare their columns with `columns.txt`, which they write
here. Read what has changed there: each column is a decision.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = ROOT / "docs" / "events.md"
TESTS: Final = ROOT / "tests" / "integration" / "rounds"
COLUMNS: Final = TESTS / "columns.txt"
SHOWN: Final = ("given", "deadline", "moves", "clock", "attempts", "steps", "round")
"""The groups of the table: the page describes the others."""
BEGIN, END = "<!-- by tools/states.py -->\n", "<!-- end -->\n"

Groups = dict[str, dict[str, list[str]]]
"""The changed groups of an event: by `set`, `reset` and `keep`, their columns."""


def events() -> dict[str, Groups]:
    """Return what each event changes, as the file has it."""
    found: dict[str, Groups] = {}
    for line in COLUMNS.read_text(encoding="utf-8").splitlines():
        if not line.startswith("  "):
            found[line] = {}
            continue
        group, _, verdicts = line.strip().partition(": ")
        found[next(reversed(found))][group] = {
            verdict: names.split() for verdict, _, names in (part.partition(" ") for part in verdicts.split("; "))
        }
    return found


def cell(group: Mapping[str, list[str]] | None) -> str:
    """Return what happens to a group: nothing, `set` or `reset`, or the columns of which this is so."""
    if group is None:
        return ""
    if "keep" not in group:
        return "set" if "set" in group else "reset"
    return ", ".join(f"{verdict} {_code(group[verdict])}" for verdict in ("set", "reset") if verdict in group)


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def legend() -> Iterator[str]:
    """Yield the lines of a table of the groups, with their columns: scheduling a new timeout writes all of them."""
    yield "| group | columns |"
    yield "| --- | --- |"
    for group in SHOWN:
        yield f"| {group} | {_code([name for names in events()['scheduled'][group].values() for name in names])} |"


def table() -> Iterator[str]:
    """Yield the lines of the table: events of pending rows, those that do the same together."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for event, groups in events().items():
        if not event.endswith(("[held]", "[paused]", ", outside a transaction")):
            rows.setdefault(tuple(cell(groups.get(group)) for group in SHOWN), []).append(event)
    yield f"| event | {' | '.join(SHOWN)} |"
    yield f"| --- |{' --- |' * len(SHOWN)}"
    for cells, names in rows.items():
        if any(cells):
            yield f"| {'; '.join(names)} | {' | '.join(cells)} |"


def page() -> str:
    """Return the page with the table."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    lines = [*legend(), "", *table()]
    return f"{before}{BEGIN}\n{chr(10).join(lines)}\n\n{END}{rest.partition(END)[2]}"


def main(arguments: list[str]) -> int:
    """Play the events unless only the `page` is asked for, write it, and return the exit code of the tests."""
    code = 0
    if arguments != ["page"]:
        environment = {**os.environ, "DELAYQ_TEST_WRITE": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", str(TESTS / "test_matrix.py")]
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    PAGE.write_text(page(), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
