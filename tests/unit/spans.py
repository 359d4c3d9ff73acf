"""Objects and spans for tests of spans."""

from __future__ import annotations

from datetime import date, datetime
from types import SimpleNamespace
from typing import Any


def ticket(**team: Any) -> SimpleNamespace:
    return SimpleNamespace(team=SimpleNamespace(**team))


class Answers:
    """A span that returns what it is given."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def end(self, since: datetime | date, obj: Any) -> Any:
        return self.answer

    def __str__(self) -> str:
        return "a broken span"
