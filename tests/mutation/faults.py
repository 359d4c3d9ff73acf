"""Small deliberate faults in the Python core, each of which a test of its room must notice.

`python tools/mutants.py` plants them one at a time. A fault names the file, a text that occurs in it exactly once, the
text planted instead, and the tests of the room that must fail.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LEDGER = ("tests/integration/scheduling",)


@dataclass(frozen=True)
class Fault:
    """One fault: `new` in place of `old` in `file` of the package, which `tests` must notice."""

    room: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def complaint(self, package: Path) -> str:
        """Return what is wrong with this entry; empty if its text occurs exactly once."""
        found = (package / self.file).read_text(encoding="utf-8").count(self.old)
        return "" if found == 1 else f"{self.room}: {self.name}: {self.old!r} occurs {found} times in {self.file}"


FAULTS = [
    Fault(
        "ledger",
        "a new round keeps the attempts of the old one",
        "ledger/writing.py",
        '    "attempts",\n    "payload",',
        '    "payload",',
        LEDGER,
    ),
    Fault(
        "ledger",
        "cancel also cancels settled rows",
        "ledger/writing.py",
        "pk__in=list(entries), slot_taken=1)\n    cancelled",
        "pk__in=list(entries))\n    cancelled",
        LEDGER,
    ),
]
