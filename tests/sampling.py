"""Which tests a run leaves to other days, so that CI takes less than twenty minutes; `make test-all` leaves out none.

| tests | a run has |
| --- | --- |
| of a guarantee | all, on each database; those that start processes on PostgreSQL, with some of many cases |
| of the dialect (`DIALECT`) | all, on PostgreSQL and MariaDB; those without processes on SQLite, too |
| that start processes | half of them, each on one of the three databases |
| in a browser | half of them |
| with recorded orders | all |
| others | each on SQLite, and one in six again on each other database |
| with many cases (`MANY`), in `MATRICES` | on each database another third of their cases |
| that draw examples, orders or races at random | a quarter of them, see `drawn` |

Which ones is decided by the name of the test and the date: within weeks all have run everywhere.
"""

from __future__ import annotations

import os
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIALECT = tuple(
    f"tests/{path}"
    for path in (
        *("e2e/databases/test_connections", "e2e/databases/test_grants", "e2e/databases/test_locked", "e2e/races/"),
        *("integration/arming/test_bulk_writes", "integration/arming/test_table_sync"),
        *("integration/data/", "integration/firing/test_batch_by", "integration/firing/test_confirm"),
        *("integration/firing/test_crashes", "integration/firing/test_locks", "integration/firing/test_lost_"),
        *("integration/firing/test_mark_at_once", "integration/firing/test_query_plans"),
        *("integration/firing/test_returned", "integration/held/test_races"),
        *("integration/ledger/", "integration/matrix/test_keys", "integration/operations/test_query_plans"),
        *("integration/scheduling/test_clock", "integration/scheduling/test_lock_order"),
        *("integration/scheduling/test_many_rows", "integration/scheduling/test_query_"),
        *("integration/test_migrations", "integration/worker/test_connections"),
        *("integration/worker/test_locked_ledger", "integration/worker/test_query_plans"),
    )
)
"""Locks, races, query plans, types and statements of one dialect. The beginnings of node ids."""
SQLITE = (
    *("tests/e2e/databases/test_sqlite", "tests/e2e/test_demo"),
    *("tests/e2e/deployments/test_failovers", "tests/e2e/deployments/test_open_slots"),
)
"""Tests with processes that no other database has."""
MATRICES = ("tests/e2e/", "tests/engine/", "tests/integration/")
"""Rooms whose cases are combinations: of kinds of keys, edges, conditions, servers, options, themes. Cases elsewhere,
such as the pages of the docs, have nothing in common."""
PROCESSES = ("tests/e2e/", "tests/shop/")
"""Rooms of tests that start processes."""
MANY = 2
"""A test with no more cases keeps all of them."""
SHARE = os.environ.get("DELAYQ_TEST_SAMPLE", "")
"""Of how many tests one is kept, `3`, or which of so many parts, `0/3`; empty: all are."""
CASES = os.environ.get("DELAYQ_TEST_CASES", "")
"""As `SHARE`, for the cases of a test with many."""
SEED = os.environ.get("DELAYQ_TEST_SEED") or datetime.now(UTC).date().isoformat()
"""Other tests each day."""


def sample(
    names: Iterable[str], share: str, seed: str = SEED, always: Sequence[str] = DIALECT, *, only_threads: bool = False
) -> set[str]:
    """Return those of `names`, ids of tests, that are kept: one in so many, and all of `always` and of the guarantees.

    The cases of a test are chosen one by one. `share`: see `SHARE`. The parts of one size have no test in common.
    `only_threads`: of the guarantees only tests without processes; another database has all.
    """
    names = list(names)
    guaranteed = {test for test in _guaranteed() if not (only_threads and test.startswith(PROCESSES))}
    kept = {name for name in names if _is_in(name, share, seed)}
    return kept | {name for name in names if name.startswith(tuple(always)) or name.partition("[")[0] in guaranteed}


def sample_cases(names: Iterable[str], share: str, seed: str = SEED) -> set[str]:
    """Return those of `names` that are kept: of each test with many cases its part, and one case at least."""
    cases = defaultdict[str, list[str]](list)
    for name in names:
        cases[name.partition("[")[0]].append(name)
    guaranteed = {test for test in _guaranteed() if not test.startswith(PROCESSES)}
    kept = set[str]()
    for test, found in cases.items():
        if len(found) <= MANY or not test.startswith(MATRICES) or test in guaranteed:
            kept.update(found)
            continue
        kept.add(min(found, key=lambda name: _number(name, seed)))
        kept.update(name for name in found if _is_in(name, share, seed))
    return kept


def number_of_the_run() -> int:
    """Return where numbered examples begin: with a sample elsewhere each day, otherwise at 0."""
    return zlib.crc32(SEED.encode()) if SHARE or CASES else 0


def _is_in(name: str, share: str, seed: str) -> bool:
    part, _, size = share.rpartition("/")
    return _number(name, seed) % int(size) == int(part or 0)


def drawn(number: int, part: int = 4) -> int:
    """Return how many of `number` things that are drawn at random a run has: with a sample one in `part`."""
    return number // part if SHARE or CASES else number


def _number(name: str, seed: str) -> int:
    return zlib.crc32(f"{seed} {name}".encode())


def _guaranteed() -> set[str]:
    """Return the tests that a promise or a failure names."""
    return set(re.findall(r"`(tests/[\w/]+\.py::test_\w+)`", _page().read_text(encoding="utf-8")))


def _page() -> Path:
    return ROOT / "docs" / "guarantees-tests.md"
