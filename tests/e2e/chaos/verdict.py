"""What the oracle may say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that was broken; `kind` in a word or two, `words` with what one needs to look further."""

    kind: str
    words: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.words}"
