"""Which tests are repeated on a second database: those of `DIALECT` always, of the others a sample that moves each day.

All tests run on SQLite. Most of them execute statements that others execute on each database, too, so a run repeats one
in three of them; `make test-all` repeats all.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIALECT = tuple(
    f"tests/{path}"
    for path in (
        *("e2e/chaos/", "e2e/crashes/test_kills", "e2e/databases/", "e2e/races/"),
        *("integration/arming/test_bulk_writes", "integration/arming/test_table_sync"),
        *("integration/data/", "integration/firing/test_batch_by", "integration/firing/test_confirm"),
        *("integration/firing/test_crashes", "integration/firing/test_locks", "integration/firing/test_lost_"),
        *("integration/firing/test_mark_at_once", "integration/firing/test_query_plans"),
        *("integration/firing/test_returned", "integration/firing/test_settling", "integration/held/test_races"),
        *("integration/ledger/", "integration/matrix/test_keys", "integration/operations/test_query_plans"),
        *("integration/scheduling/test_clock", "integration/scheduling/test_lock_order"),
        *("integration/scheduling/test_many_rows", "integration/scheduling/test_query_"),
        *("integration/test_migrations", "integration/worker/test_connections"),
        *("integration/worker/test_locked_ledger", "integration/worker/test_query_plans"),
    )
)
"""Locks, races, query plans, types and statements of one dialect. The beginnings of node ids."""
SIZE = os.environ.get("DELAYQ_TEST_SAMPLE", "")
"""Of how many tests one is kept; empty: all are."""
SEED = os.environ.get("DELAYQ_TEST_SEED") or datetime.now(UTC).date().isoformat()
"""Another sample each day: within days all tests have run on each database."""


def sample(names: Iterable[str], size: int, seed: str = SEED, always: Sequence[str] = DIALECT) -> set[str]:
    """Return those of `names`, ids of tests, that are kept: one in `size`, and all of `always` and of the guarantees.

    The cases of a test are chosen one by one.
    """
    names = list(names)
    guaranteed = set(re.findall(r"`(tests/[\w/]+\.py::test_\w+)`", _page().read_text(encoding="utf-8")))
    kept = {name for name in names if zlib.crc32(f"{seed} {name}".encode()) % size == 0}
    return kept | {name for name in names if name.startswith(tuple(always)) or name.partition("[")[0] in guaranteed}


def _page() -> Path:
    return ROOT / "docs" / "guarantees-tests.md"
