"""Type checkers find a wrong model, `minuts=` and `"kep"`: `api.py` marks where; strict mypy and pyright check it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
API = Path(__file__).with_name("api.py")


MISTAKES = ["    dq.schedule_timeout(parcel", "    dq.cancel_timeout(parcel", "minuts=30", '"kep"']


def mypy(*files: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *map(str, files)]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.timeout(300)
def test_the_public_interface_is_typed_as_promised_and_each_mistake_that_is_not_excused_is_reported(
    tmp_path: Path,
) -> None:
    """One run for all: most of its time goes into the models and their stubs."""
    files, expected = [API], set()
    for count, mistake in enumerate(MISTAKES):
        lines = API.read_text().splitlines()
        (number,) = (number for number, line in enumerate(lines) if mistake in line and "await" not in line)
        lines[number] = lines[number].partition("  # type: ignore")[0]
        files.append(tmp_path / f"api_without_excuse_{count}.py")
        files[-1].write_text("\n".join(lines))
        expected.add((files[-1].name, number + 1))
    done = mypy(*files)
    found = {
        (Path(name).name, int(line)) for name, line in re.findall(r"^(.*?):(\d+): error", done.stdout, re.MULTILINE)
    }
    assert (done.returncode, found) == (1, expected), done.stdout + done.stderr


@pytest.mark.timeout(300)
def test_pyright_reports_the_same_mistakes_and_infers_the_same_types(tmp_path: Path) -> None:
    """It reports an excuse for a line in which it finds no mistake. It needs no plugin."""
    shutil.copy(API, tmp_path)
    options = {"typeCheckingMode": "standard", "reportUnnecessaryTypeIgnoreComment": "error"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({**options, "extraPaths": [str(ROOT)]}))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--project", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
