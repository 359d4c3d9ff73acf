"""Pyright finds a wrong model, `minuts=` and `"kep"`: `api.py` marks where. Mypy checks it with all files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_pyright_reports_the_marked_mistakes_and_infers_the_same_types(tmp_path: Path) -> None:
    """It reports an excuse for a line in which it finds no mistake. It needs no plugin."""
    shutil.copy(Path(__file__).with_name("api.py"), tmp_path)
    options = {"typeCheckingMode": "standard", "reportUnnecessaryTypeIgnoreComment": "error"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({**options, "extraPaths": [str(ROOT)]}))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--project", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
