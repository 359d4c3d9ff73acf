"""Run pytest with the newest Python and Django that this machine can have: `tools/newest.py <arguments of pytest>`.

`make test` runs on the Python that is there, and so on the oldest supported one where that is Debian's. This is
the other end. The stage `newest` of `tools/suite.py` uses it, and is left out where there is no newer Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # run as a script, from this folder
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.environment import PURPOSES

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".venv-newest"
VERSIONS = ("3.13", "3.12")


def find_python() -> str | None:
    """Return the newest supported Python above our own; None: there is none."""
    newer = (version for version in VERSIONS if tuple(map(int, version.split("."))) > sys.version_info[:2])
    return next(filter(None, map(find_version, newer)), None)


def find_version(version: str) -> str | None:
    """Return a Python of this version, such as "3.12": on PATH, or one that pyenv keeps; None: there is none."""
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    candidates = [*map(str, reversed(pyenv)), shutil.which(f"python{version}")]
    return next((path for path in candidates if path and _runs(path)), None)


def main(arguments: Sequence[str]) -> int:
    """Set up an environment of its own, and run pytest there; returns the exit code."""
    python = find_python()
    if python is None:
        print(f"newest: no Python {' or '.join(VERSIONS)} above this {sys.version.split()[0]} was found")
        return 2
    environment = {**os.environ, "DELAYQ_VENV": str(HOME)}
    if subprocess.run([python, "tools/environment.py", "newest"], cwd=ROOT, env=environment, check=False).returncode:
        return 2
    inside = str(HOME / "bin" / "python")
    print(f"newest: {python} with {' '.join(PURPOSES['newest'])}", flush=True)
    return subprocess.run([inside, "-m", "pytest", *arguments], cwd=ROOT, check=False).returncode


def _runs(path: str) -> bool:
    return subprocess.run([path, "-c", "import venv, ensurepip"], capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
