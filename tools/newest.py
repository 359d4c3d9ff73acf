"""Unit and integration tests on SQLite, with the newest Python and Django that this machine can have.

`make test` runs on the Python that is there, and so on the oldest supported one where that is Debian's. This is
the other end. Without a newer Python there is nothing to do, and one line says so: also with `CI=true`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".venv-newest"
VERSIONS = ("3.13", "3.12")
DJANGO = "Django>=6.1,<6.2"
FOLDERS = ("tests/unit", "tests/engine", "tests/integration")


def find_python() -> str | None:
    """The newest supported Python above our own: on PATH, or one that pyenv keeps."""
    for version in VERSIONS:
        if tuple(map(int, version.split("."))) <= sys.version_info[:2]:
            continue
        pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
        candidates = [*map(str, reversed(pyenv)), shutil.which(f"python{version}")]
        if found := next((path for path in candidates if path and _runs(path)), None):
            return found
    return None


def main() -> int:
    python = find_python()
    if python is None:
        print(f"newest: left out, no Python {' or '.join(VERSIONS)} above this {sys.version.split()[0]} was found")
        return 0
    environment = {**os.environ, "DELAYQ_VENV": str(HOME)}
    if subprocess.run([python, "tools/environment.py", "test"], cwd=ROOT, env=environment, check=False).returncode:
        return 1
    inside = str(HOME / "bin" / "python")
    subprocess.run([inside, "-m", "pip", "install", "--quiet", DJANGO], cwd=ROOT, check=True)
    folders = [folder for folder in FOLDERS if (ROOT / folder).is_dir()]
    tests = [inside, "-m", "pytest", "-n", "2", "-m", "not browser", *folders]
    print(f"newest: {python} with {DJANGO}", flush=True)
    servers = [inside, "tests/servers.py", "run", "--only", "redis", "--", *tests]
    return subprocess.run(servers, cwd=ROOT, check=False).returncode


def _runs(path: str) -> bool:
    return subprocess.run([path, "-c", "import venv, ensurepip"], capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
