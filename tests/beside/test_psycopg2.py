"""Where psycopg2 is installed and psycopg 3 is not, the statements of the library are the same."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT, _address

pytestmark = pytest.mark.slow

TESTS = (
    "ledger/test_statements.py",
    "ledger/test_settling.py",
    "firing/test_together.py",
    "firing/test_time_limit.py",
    "firing/test_leftovers.py::test_only_a_setting_that_does_not_end_with_the_transaction_costs_the_connection",
    "matrix/test_keys.py::test_joins_along_the_relation",
    "matrix/test_keys.py::test_the_single_verbs",
    "scheduling/test_many_rows.py",
    "worker/test_worker.py::test_several_workers_fire_each_timeout_once",
)
"""Statements of each kind, locks, types of keys, connections that are cut, and a worker."""


@pytest.mark.timeout(300)
def test_the_library_works_with_psycopg2() -> None:
    _address("DELAYQ_TEST_POSTGRESQL_URL")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"DJANGO_SETTINGS_MODULE": "tests.beside.psycopg2_settings", "DELAYQ_TEST_DB": "postgresql"}
    tests = [str(ROOT / "tests" / "integration" / name) for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
