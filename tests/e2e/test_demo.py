"""`make demo` as a machine without a terminal sees it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import settings as test_settings

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(test_settings.DB != "sqlite", reason="the demo brings its own SQLite"),
]


def test_without_a_terminal_it_lives_through_its_orders_and_ends_well() -> None:
    # What a shell may have for another project must not matter: its database would be migrated.
    others = {"DATABASE_URL": "nonsense://", "REDIS_URL": "nonsense://", "DJANGO_SETTINGS_MODULE": "no.such.module"}
    clean = {**os.environ, **others, "PYTHONPATH": str(ROOT), "ORDERS": "", "REVIEWS": ""}
    streams: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    command = [sys.executable, "example_project/demo.py"]
    done = subprocess.run(command, cwd=ROOT, env=clean, text=True, check=False, **streams)
    assert done.returncode == 0, done.stdout
    assert "Orders and ledger agree." in done.stdout
