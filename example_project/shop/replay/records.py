"""Orders and reviews of the public Olist format, as one `OrderRecord` for each order.

Times in the files are local wall-clock times of Brazil. Daylight saving time began and ended at midnight
there, so one hour a year does not exist and one occurs twice. A time that occurs twice is read as its first
occurrence. A time that does not exist is read with the offset before the gap, that is, as one hour later. Deadlines
count in UTC, so that a change of clocks does not change them.

Inconsistent rows are read as follows:

* No step takes effect before the step that it needs. A payment before the order counts from the order; an
  acceptance before the payment counts from the payment; a delivery before the acceptance counts from there.
  A step whose predecessor never happens does not happen.
* The earliest answered review of an order counts, but not before the order was placed.
* An empty value and a missing column mean: never. A row without an order id or a time of purchase, or with an
  unreadable time, is omitted and reported; so is a second row of the same order.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

BRAZIL = ZoneInfo("America/Sao_Paulo")
REQUIRED_OF_ORDERS = ("order_id", "order_purchase_timestamp")
REQUIRED_OF_REVIEWS = ("order_id", "review_answer_timestamp")
Row = dict[str, str | None]


class UnreadableFile(Exception):
    """The file does not exist, or has another format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderRecord:
    """The times of the steps of one order; None: never. No step is before the previous one."""

    order_id: str
    customer_id: str
    placed_at: datetime
    paid_at: datetime | None = None
    accepted_at: datetime | None = None
    promised_at: datetime | None = None
    delivered_at: datetime | None = None
    reviewed_at: datetime | None = None
    score: int = 5


@dataclass(slots=True)
class Reading:
    """The records of both files, in the order of the file, and descriptions of the omitted rows."""

    records: list[OrderRecord] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def read_records(orders: Path, reviews: Path | None, *, limit: int | None = None) -> Reading:
    """Read the first `limit` orders of the file (by default all) with their reviews.

    Raises:
        UnreadableFile: one of the files cannot be read, or lacks a required column.
    """
    reading = Reading()
    answers = _earliest_answers(reviews, reading.left_out) if reviews else {}
    seen: set[str] = set()
    for where, row in _rows(orders, REQUIRED_OF_ORDERS):
        if limit is not None and len(reading.records) >= limit:
            break
        try:
            record = _record(row, answers)
        except ValueError as error:
            reading.left_out.append(f"{where}: {error}")
            continue
        if record.order_id in seen:
            reading.left_out.append(f"{where}: order {record.order_id} is there already")
            continue
        seen.add(record.order_id)
        reading.records.append(record)
    return reading


def moment_of(value: str | None) -> datetime | None:
    """Convert a local time of Brazil to a datetime in UTC; return None for an empty value.

    Raises:
        ValueError: it cannot be read.
    """
    if not (value or "").strip():
        return None
    local = datetime.fromisoformat(str(value).strip())
    if local.tzinfo is None:
        local = local.replace(tzinfo=BRAZIL, fold=0)
    # Python compares two datetimes of one zone by local time; only UTC gives the real difference.
    return local.astimezone(UTC)


def _record(row: Row, answers: dict[str, tuple[datetime, int]]) -> OrderRecord:
    order_id = (row["order_id"] or "").strip()
    placed = moment_of(row["order_purchase_timestamp"])
    if not order_id or placed is None:
        raise ValueError("no order id or no time of purchase")
    paid = _not_before(placed, moment_of(row.get("order_approved_at")))
    accepted = _not_before(paid, moment_of(row.get("order_delivered_carrier_date")))
    delivered = _not_before(accepted, moment_of(row.get("order_delivered_customer_date")))
    reviewed, score = answers.get(order_id, (None, 5))
    return OrderRecord(
        order_id=order_id,
        customer_id=(row.get("customer_id") or "").strip() or order_id,
        placed_at=placed,
        paid_at=paid,
        accepted_at=accepted,
        promised_at=moment_of(row.get("order_estimated_delivery_date")),
        delivered_at=delivered,
        reviewed_at=_not_before(placed, reviewed),
        score=score,
    )


def _not_before(floor: datetime | None, moment: datetime | None) -> datetime | None:
    if floor is None or moment is None:
        return None
    return max(floor, moment)


def _earliest_answers(path: Path, left_out: list[str]) -> dict[str, tuple[datetime, int]]:
    answers: dict[str, tuple[datetime, int]] = {}
    for where, row in _rows(path, REQUIRED_OF_REVIEWS):
        try:
            moment = moment_of(row["review_answer_timestamp"])
        except ValueError as error:
            left_out.append(f"{where}: {error}")
            continue
        order_id = (row["order_id"] or "").strip()
        if moment is not None and (order_id not in answers or moment < answers[order_id][0]):
            answers[order_id] = (moment, _score(row.get("review_score")))
    return answers


def _score(value: str | None) -> int:
    digits = (value or "").strip()
    return int(digits) if digits in {"1", "2", "3", "4", "5"} else 5


def _rows(path: Path, required: Iterable[str]) -> Iterator[tuple[str, Row]]:
    """Yield each row with its place for messages."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = [name for name in required if name not in (reader.fieldnames or ())]
            if missing:
                raise UnreadableFile(f"{path} has no column {' and no column '.join(missing)}.")
            for row in reader:
                yield f"{path.name}, line {reader.line_num}", row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UnreadableFile(f"{path} cannot be read: {error}") from error
