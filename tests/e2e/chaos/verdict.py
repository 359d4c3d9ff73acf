"""What the oracle may say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Violation:
    """A violated guarantee; `kind` in a word or two, `words` with the details."""

    kind: str
    words: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.words}"
