"""One thing that the doctor has looked at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Level(IntEnum):
    """How bad it is. An error: timeouts are late, or will be, or are lost sight of. A warning: somebody should look."""

    OK = 0
    WARNING = 1
    ERROR = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, how bad it is, what was found, and what to do."""

    name: str
    level: Level
    text: str
    hint: str = ""


def ok(name: str, text: str) -> Finding:
    """All is well."""
    return Finding(name, Level.OK, text)


def warning(name: str, text: str, hint: str = "") -> Finding:
    """Somebody should look."""
    return Finding(name, Level.WARNING, text, hint)


def error(name: str, text: str, hint: str = "") -> Finding:
    """Timeouts are late, or will be, or are lost sight of."""
    return Finding(name, Level.ERROR, text, hint)
