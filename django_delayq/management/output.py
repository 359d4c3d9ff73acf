"""Output of the commands: tables for people, JSON for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from django.utils import timezone

from django_delayq.ledger.controls import PolicyState


def as_json(value: Any) -> str:
    """Return JSON: datetimes in ISO format, durations in seconds, dataclasses and named tuples as objects."""
    return json.dumps(_plain(value), indent=2, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, PolicyState):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        del fields["policy"]
        own = {"label": value.label, "model": value.policy.concrete_model._meta.label, "delay": value.delay}
        return _plain(own | fields)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a table with aligned columns."""
    texts = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in texts]


def local(at: datetime | None) -> str:
    """Return local time to the second; empty for None."""
    if at is None:
        return ""
    return f"{timezone.localtime(at) if timezone.is_aware(at) else at:%Y-%m-%d %H:%M:%S}"


def seconds(value: float | None) -> str:
    """Return a duration in seconds; "-" for None."""
    if value is None:
        return "-"
    return f"{value:.3f} s" if value < 10 else f"{value:.0f} s"
