"""What a replay of recorded orders must count, worked out from the files alone.

Imports nothing of the project, plays nothing and keeps no state: for each order a few comparisons of datetimes
determine the outcome of each timeout. The replay processes the events in sequence; this module reads
each life from its end; that both count the same is the point of it.

    python -m tests.shop.oracle ORDERS.csv REVIEWS.csv
"""

from __future__ import annotations

import csv
import itertools
import json
import sys
from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

SAO_PAULO = ZoneInfo("America/Sao_Paulo")
TO_PAY = timedelta(minutes=30)
TO_ACCEPT = timedelta(days=3)
TO_REVIEW = timedelta(days=7)
TRIAL = timedelta(days=3)

Moment = datetime | None
Life = dict[str, Any]
Counts = dict[str, dict[str, int]]


def expected_counts(orders: Path, reviews: Path, limit: int | None = None, *, until_settled: bool = False) -> Counts:
    """`{policy name: {state: count}}` after the last step of these orders, or when all is settled."""
    lives = _lives(orders, limit)
    answers = _first_answers(reviews)
    for life in lives:
        answer = answers.get(life["id"])
        life["reviewed"] = max(answer, life["placed"]) if answer else None
    end = max((moment for life in lives for moment in _steps(life)), default=datetime.min.replace(tzinfo=UTC))
    if until_settled:
        end = datetime.max.replace(tzinfo=UTC)
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for life in lives:
        for policy, due, happened in _timeouts(life):
            counts[policy][_outcome(due, happened, end)] += 1
    for due in _trial_ends(lives):
        counts["notify_trial_expiry"][_outcome(due, None, end)] += 1
    return {policy: dict(states) for policy, states in counts.items()}


def _outcome(due: datetime, happened: Moment, end: datetime) -> str:
    """Return whether a deadline is before an event; at the same time the deadline is first."""
    if happened is not None and happened < due:
        return "cancelled"
    return "fired" if due <= end else "pending"


def _timeouts(life: Life) -> list[tuple[str, datetime, Moment]]:
    """Return all timeouts of this order: the deadline, and the time of the event that would cancel it."""
    armed: list[tuple[str, datetime, Moment]] = []
    armed.append(("cancel_unpaid", life["placed"] + TO_PAY, life["paid"]))
    if life["paid"] is None or life["paid"] >= life["placed"] + TO_PAY:
        return armed
    armed.append(("cancel_unaccepted", life["paid"] + TO_ACCEPT, life["accepted"]))
    if life["accepted"] is None or life["accepted"] >= life["paid"] + TO_ACCEPT:
        return armed
    if life["promised"]:
        armed.append(("remind_late_delivery", max(life["promised"], life["accepted"]), life["delivered"]))
    if life["delivered"] and not (life["reviewed"] and life["reviewed"] <= life["delivered"]):
        armed.append(("review_by_default", life["delivered"] + TO_REVIEW, life["reviewed"]))
    return armed


def _trial_ends(lives: list[Life]) -> list[datetime]:
    """Every order starts the trial of the customer again, so that earlier ends do not count."""
    begins: defaultdict[str, set[datetime]] = defaultdict(set)
    for life in lives:
        begins[life["customer"]].add(life["placed"])
    ends = []
    for moments in begins.values():
        ordered = sorted(moments)
        ends += [a + TRIAL for a, b in itertools.pairwise(ordered) if b >= a + TRIAL]
        ends.append(ordered[-1] + TRIAL)
    return ends


def _steps(life: Life) -> list[datetime]:
    return [life[step] for step in ("placed", "paid", "accepted", "delivered", "reviewed") if life[step]]


def _lives(path: Path, limit: int | None) -> list[Life]:
    lives: dict[str, Life] = {}
    for row in _rows(path):
        if limit is not None and len(lives) == limit:
            break
        try:
            life = _life({name: (value or "").strip() for name, value in row.items() if name})
        except ValueError:
            continue
        if life["id"] and life["placed"] and life["id"] not in lives:
            lives[life["id"]] = life
    return list(lives.values())


def _life(row: dict[str, str]) -> Life:
    placed = _utc(row["order_purchase_timestamp"])
    paid = _utc(row.get("order_approved_at", ""))
    accepted = _utc(row.get("order_delivered_carrier_date", ""))
    delivered = _utc(row.get("order_delivered_customer_date", ""))
    # Nothing comes before what it needs, or without it.
    paid = max(paid, placed) if paid and placed else None
    accepted = max(accepted, paid) if accepted and paid else None
    delivered = max(delivered, accepted) if delivered and accepted else None
    promised = _utc(row.get("order_estimated_delivery_date", ""))
    customer = row.get("customer_id") or row["order_id"]
    return {
        "id": row["order_id"],
        "customer": customer,
        "placed": placed,
        "paid": paid,
        "accepted": accepted,
        "delivered": delivered,
        "promised": promised,
    }


def _first_answers(path: Path) -> dict[str, datetime]:
    found: dict[str, datetime] = {}
    for row in _rows(path):
        try:
            answered = _utc((row["review_answer_timestamp"] or "").strip())
        except ValueError:
            continue
        order = (row["order_id"] or "").strip()
        if answered:
            found[order] = min(answered, found.get(order, answered))
    return found


def _utc(text: str) -> Moment:
    if not text:
        return None
    return datetime.strptime(text, "%Y-%m-%d %H:%M:%S").replace(tzinfo=SAO_PAULO).astimezone(UTC)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(expected_counts(Path(sys.argv[1]), Path(sys.argv[2]))) + "\n")
