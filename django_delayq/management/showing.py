"""What commands print: tables for people, JSON for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.utils import timezone

from django_delayq.ledger.controls import PolicyState
from django_delayq.ledger.search import Count
from django_delayq.monitoring.doctor import Level


def as_json(value: Any) -> str:
    """`value` and all that is in it, as JSON: moments in ISO form, lengths in seconds."""
    return json.dumps(plain(value), indent=2, ensure_ascii=False)


def plain(value: Any) -> Any:
    """`value` as JSON has it."""
    for kind, shown in _SHOWN.items():
        if isinstance(value, kind):
            return shown(value)
    return _fields(value) if dataclasses.is_dataclass(value) else value


def _fields(value: Any, leave_out: str = "") -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(value) if field.name != leave_out]
    return {name: plain(getattr(value, name)) for name in names}


def _state(state: PolicyState) -> dict[str, Any]:
    own = {"label": state.label, "model": state.policy.concrete_model._meta.label, "delay": plain(state.delay)}
    return {**own, **_fields(state, "policy")}


_SHOWN: dict[Any, Callable[[Any], Any]] = {
    Count: lambda count: {"value": count.value, "is_capped": count.is_capped},
    Level: lambda level: level.name.lower(),
    datetime: lambda moment: moment.isoformat(),
    timedelta: lambda length: length.total_seconds(),
    PolicyState: _state,
    dict: lambda found: {str(name): plain(each) for name, each in found.items()},
    (list, tuple): lambda found: [plain(each) for each in found],
}
"""By kind, the special before the general."""


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines with columns as wide as what is in them."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(head, *texts, strict=True)]
    padded = ((cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [[*head], *texts])
    return ["  ".join(cells).rstrip() for cells in padded]


def local(moment: datetime | None) -> str:
    """Local time, to the second."""
    if moment is None:
        return ""
    return f"{timezone.localtime(moment) if timezone.is_aware(moment) else moment:%Y-%m-%d %H:%M:%S}"


def seconds(value: float | None) -> str:
    """A length of time, as short as it can be said."""
    if value is None:
        return "-"
    return f"{value:.3f} s" if value < 10 else f"{value:.0f} s"
