"""A project with a dozen other apps, in a process with its own settings."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.slow

FOLDER = ROOT / "tests" / "beside" / "apps"


def test_deadlines_work_beside_other_apps() -> None:
    """On SQLite: which database it is makes no difference to what these apps do with models."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"DJANGO_SETTINGS_MODULE": "tests.beside.project.settings", "DELAYQ_TEST_DB": "sqlite"}
    options = ["--nomigrations", "-p", "no:cacheprovider", "-p", "no:randomly"]
    command = [sys.executable, "-m", "pytest", *options, str(FOLDER)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
