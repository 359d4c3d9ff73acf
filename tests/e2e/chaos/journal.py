"""A producer's journal on disk: what it is about to do, what it is about to commit, and what came of it.

Each line is written and handed to the system before the next step, so that it outlives the process. Steps of an
operation, in order:

    begin       it is about to do it
    commit      it has done it in its transaction, and asks for COMMIT; `claims` say what is then true
    done        COMMIT was answered
    undone      it was rolled back on purpose, or refused by an answer of the product; `error` names it
    uncertain   the connection was lost, so the outcome is unknown
    resolved    the database showed the outcome afterwards: `committed`
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


class Journal:
    """Appends to one file. For one thread."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def write(self, operation: str, step: str, **what: Any) -> None:
        """Write the line and flush it to the system."""
        line = {"operation": operation, "step": step, "at": time.time(), **what}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def read(path: Path) -> list[dict[str, Any]]:
    """All lines; a last one that was cut off by a SIGKILL is left out."""
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in whole.splitlines()]
