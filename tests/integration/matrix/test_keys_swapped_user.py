"""The matrix once more for a project's own user, in a process with its own settings."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.dialect,
    pytest.mark.skipif(
        os.environ.get("DELAYQ_TEST_DB", "sqlite") != "sqlite",
        reason="the user's model is the same on each database, and each runs the matrix itself",
    ),
]


def test_every_verb_works_with_a_swapped_user() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    matrix = str(ROOT / "tests" / "integration" / "matrix" / "test_keys.py")
    options = ["--ds=tests.swapped.settings", "-v", "-p", "no:cacheprovider", "-p", "no:randomly"]
    command = [sys.executable, "-m", "pytest", *options, matrix]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "[Member] PASSED" in done.stdout, done.stdout[-4000:]
