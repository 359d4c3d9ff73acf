"""Settled rounds of some months, and a plain recount of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from django.contrib.contenttypes.models import ContentType

from django_delayq.models import Timeout
from django_delayq.monitoring.reports import Figures
from tests.testapp.models import Order

ENDS = [
    ("cancelled", "condition"),
    ("skipped", "condition"),
    ("fired", "due"),
    ("fired", "due"),
    ("skipped", "handler"),
    ("skipped", "shadow"),
    ("cancelled", "hand"),
    ("cancelled", "gone"),
    ("dead", "retries"),
]


def settled_row(
    settled_at: datetime, state: str = "fired", cause: str = "due", *, label: str = "testapp.order.told", **columns: Any
) -> Timeout:
    """A settled row, which is not saved."""
    due_at = columns.pop("due_at", settled_at - timedelta(seconds=1))
    times = {"due_at": due_at, "run_at": due_at, "first_due_at": due_at, "created_at": due_at - timedelta(hours=1)}
    values: dict[str, Any] = {"object_id": "1", "slot": f"{random.getrandbits(128):032x}", **times, **columns}
    kind = ContentType.objects.get_for_model(Order)
    ends = {"state": state, "cause": cause, "settled_at": settled_at, "slot_taken": None}
    return Timeout(policy=label, content_type=kind, **ends, **values)


def random_rows(count: int, until: datetime, days: int, labels: list[str], seed: int = 7) -> list[Timeout]:
    """So many settled rows of the last days."""
    draw, rows = random.Random(seed), []
    for _ in range(count):
        settled_at = until - timedelta(seconds=draw.uniform(0, days * 86_400))
        late = timedelta(seconds=draw.choice([draw.expovariate(1), draw.expovariate(1 / 3600), 0.0]))
        state, cause = draw.choice(ENDS)
        is_early = cause == "condition" and draw.random() < 0.8
        due_at = settled_at + late if is_early else settled_at - late
        since_at = None if draw.random() < 0.1 else due_at - timedelta(minutes=draw.choice([5, 30, 4000]))
        columns: dict[str, Any] = {"due_at": due_at, "since_at": since_at, "attempts": draw.choice([0, 1, 1, 3])}
        columns["created_at"] = min(settled_at, due_at) - timedelta(seconds=draw.uniform(0, 9000))
        columns["ready_at"] = draw.choice([None, None, min(settled_at, due_at + late / 2)])
        if cause == "condition" and draw.random() < 0.1:
            columns |= {"remaining": timedelta(minutes=3), "keeps_deadline": draw.random() < 0.5}
        rows.append(settled_row(settled_at, state, cause, label=draw.choice(labels), **columns))
    return rows


def recount(rows: Iterable[Timeout], name_of: Callable[[Timeout], str]) -> dict[str, dict[str, Any]]:
    """Count the rows one by one, without the library, with exact quantiles."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        counts = found.setdefault(name_of(row), {"lateness": [], "waits": []})
        assert row.settled_at is not None
        if row.cause == "condition":
            is_stopped = row.remaining is not None and not row.keeps_deadline
            end = "in_time" if is_stopped or row.settled_at <= row.due_at else "ended_late"
        else:
            end = "shadow" if row.cause == "shadow" else row.state
        counts[end] = counts.get(end, 0) + 1
        if end == "in_time":
            counts["waits"].append((row.settled_at - (row.since_at or row.created_at)).total_seconds())
        if end == "fired":
            counts["lateness"].append(max(0.0, row.lateness() or 0.0))
    return found


def assert_equals(line: Figures, counts: dict[str, Any]) -> None:
    """The line has these counts, and quantiles to 2.5 %."""
    names = ("in_time", "ended_late", "fired", "shadow", "skipped", "cancelled", "dead")
    assert {name: getattr(line, name) for name in names} == {name: counts.get(name, 0) for name in names}
    assert line.rounds == sum(counts.get(name, 0) for name in names)
    assert line.share == counts.get("in_time", 0) / line.rounds
    for value, durations, share in (
        (line.late_p50, counts["lateness"], 0.5),
        (line.late_p99, counts["lateness"], 0.99),
        (line.time_to_event, counts["waits"], 0.5),
    ):
        exact = sorted(durations)[int(len(durations) * share)] if durations else None
        assert (value is None) == (exact is None)
        if value is not None and exact is not None:
            assert abs(value - max(exact, 0.001)) <= 0.025 * max(exact, 0.001) + 1e-9


def local_day(moment: datetime | None, zone: str) -> date:
    assert moment is not None
    return moment.astimezone(ZoneInfo(zone)).date()


def utc(*parts: int) -> datetime:
    return datetime(*parts, tzinfo=UTC)  # type: ignore[arg-type, misc] # year, month, day and so on
