"""Tests that need other settings than the suite, in processes of their own: other apps, and another driver."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT, _address

pytestmark = [pytest.mark.slow]

WITH_PSYCOPG2 = (
    "ledger/test_statements.py",
    "firing/test_transactions.py",
    "firing/test_time_limit.py",
    "matrix/test_keys.py::test_the_single_verbs",
    "worker/test_worker.py::test_several_workers_fire_each_timeout_once",
)
"""Statements of each kind, locks, types of keys, connections that are cut, and a worker."""


def run(settings: str, database: str, *arguments: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"DJANGO_SETTINGS_MODULE": f"tests.beside.{settings}", "DELAYQ_TEST_DB": database}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_deadlines_work_beside_other_apps() -> None:
    """On SQLite: which database it is makes no difference to what these apps do with models."""
    run("project.settings", "sqlite", "--nomigrations", str(ROOT / "tests" / "beside" / "apps"))


def test_where_psycopg2_is_installed_and_psycopg_3_is_not_the_statements_are_the_same() -> None:
    _address("DELAYQ_TEST_POSTGRESQL_URL")
    run("psycopg2_settings", "postgresql", *(str(ROOT / "tests" / "integration" / name) for name in WITH_PSYCOPG2))
