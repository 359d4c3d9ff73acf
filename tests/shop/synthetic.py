"""Made-up orders and reviews in the columns of the public Olist files; the same ones for the same seed.

Datetimes are naive here on purpose: the files contain local times.
"""

# ruff: noqa: DTZ001

from __future__ import annotations

import csv
import random
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

ORDER_COLUMNS = (
    "order_id",
    "customer_id",
    "order_status",
    "order_purchase_timestamp",
    "order_approved_at",
    "order_delivered_carrier_date",
    "order_delivered_customer_date",
    "order_estimated_delivery_date",
)
REVIEW_COLUMNS = ("review_id", "order_id", "review_score", "review_creation_date", "review_answer_timestamp")
START = datetime(2017, 9, 20, 9, 0, 0)
MINUTES = [1, 4, 12, 29, 30, 31, 90, 2000]  # from the order to its payment: before, at and after the deadline


@dataclass
class Files:
    """The rows of both files, as strings."""

    orders: list[dict[str, str]] = field(default_factory=list)
    reviews: list[dict[str, str]] = field(default_factory=list)

    def add(
        self,
        placed: datetime,
        paid: datetime | None = None,
        accepted: datetime | None = None,
        delivered: datetime | None = None,
        promised: datetime | None = None,
        *reviewed: datetime | None,
        name: str = "",
        customer: str = "",
    ) -> str:
        """Add an order with one review for each given datetime; return its id."""
        order_id = name or f"{len(self.orders):032x}"
        row = (order_id, customer or f"c{order_id}", "delivered", placed, paid, accepted, delivered, promised)
        self.orders.append(dict(zip(ORDER_COLUMNS, map(_text, row), strict=True)))
        for moment in reviewed:
            review = (f"r{len(self.reviews)}", order_id, "4", delivered, moment)
            self.reviews.append(dict(zip(REVIEW_COLUMNS, map(_text, review), strict=True)))
        return order_id

    def write(self, directory: Path) -> tuple[Path, Path]:
        """Write both files; return their paths."""
        orders, reviews = directory / "orders.csv", directory / "reviews.csv"
        for path, columns, rows in ((orders, ORDER_COLUMNS, self.orders), (reviews, REVIEW_COLUMNS, self.reviews)):
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, columns, extrasaction="ignore")
                writer.writeheader()
                writer.writerows(rows)
        return orders, reviews


def random_orders(count: int, seed: int = 1) -> Files:
    """`count` orders over some weeks, two changes of the clocks among them, with every way an order can go."""
    dice = random.Random(seed)
    files = Files()
    for _ in range(count):
        placed = START + timedelta(minutes=dice.randrange(60 * 24 * 45))
        paid = _maybe(dice, 0.9, placed + timedelta(minutes=dice.choice(MINUTES)))
        accepted = _maybe(dice, 0.85, (paid or placed) + timedelta(hours=dice.choice([-1, 0, 5, 40, 71, 72, 73, 200])))
        delivered = _maybe(dice, 0.8, (accepted or placed) + timedelta(hours=dice.choice([-3, 0, 24, 200, 400])))
        promised = (placed + timedelta(days=dice.choice([-1, 2, 9, 17]))).replace(hour=0, minute=0)
        asked = delivered or placed
        count_of_reviews = dice.choice([0, 1, 1, 1, 3])
        reviews = [asked + timedelta(days=dice.choice([-30, -1, 0, 1, 6, 7, 8])) for _ in range(count_of_reviews)]
        files.add(placed, paid, accepted, delivered, promised, *reviews)
    return files


def odd_orders() -> Files:
    """One order for each way in which a row can be at an edge, or at odds with itself."""
    files = Files()
    t, minute, hour, day = START, timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
    paid, taken, home, promise = t + minute, t + day, t + 4 * day, t + 9 * day
    files.add(t, t + 30 * minute, taken, home, promise, home + day, name="paid-at-the-deadline")
    files.add(t, t + 30 * minute - timedelta(seconds=1), taken, home, promise, name="paid-a-second-before")
    files.add(t, t, t, t, t, t, name="all-at-once")
    files.add(t, t - hour, taken, home, promise, name="paid-before-it-was-placed")
    files.add(t, None, taken, home, promise, home + day, name="never-paid-yet-delivered")
    files.add(t, paid, t - hour, home, promise, name="accepted-before-the-payment")
    files.add(t, paid, paid + 3 * day, home, promise, name="accepted-at-the-deadline")
    files.add(t, paid, paid + 5 * day, t + 6 * day, promise, t + 7 * day, name="cancelled-and-then-delivered")
    files.add(t, paid, None, home, promise, home + day, name="delivered-without-acceptance")
    files.add(t, paid, taken, taken - hour, promise, name="delivered-before-the-acceptance")
    files.add(t, paid, taken, home, home, name="delivered-at-the-promised-time")
    files.add(t, paid, taken, home, t - day, name="promised-before-the-acceptance")
    files.add(t, paid, taken, taken, t - day, name="late-and-delivered-at-the-acceptance")
    files.add(t, paid, taken, None, promise, name="never-delivered")
    files.add(t, paid, taken, home, None, name="nothing-promised")
    files.add(t, paid, taken, home, promise, home + 7 * day, name="reviewed-at-the-deadline")
    files.add(t, paid, taken, home, promise, home, name="reviewed-at-the-delivery")
    files.add(t, paid, taken, home, promise, t - 9 * day, name="reviewed-before-it-was-placed")
    files.add(t, paid, taken, home, promise, home + 9 * day, home + day, None, name="several-reviews")
    files.add(t, paid, taken, None, promise, t + 2 * day, name="reviewed-but-never-delivered")
    files.add(t, None, None, None, None, t + minute, name="reviewed-and-then-cancelled")
    files.add(t, paid, taken, home, promise, None, name="review-without-an-answer")
    for name, placed in (("first", t), ("soon-after", t + day), ("much-later", t + 9 * day)):
        files.add(placed, placed + minute, placed + hour, placed + day, placed + 2 * day, name=name, customer="regular")
    # Clocks go forward at midnight before 2017-10-15, and back at midnight after 2018-02-17.
    gap, twice = datetime(2017, 10, 15, 0, 10), datetime(2018, 2, 17, 23, 45)
    files.add(gap, gap + 29 * minute, gap + day, gap + 2 * day, gap + 3 * day, name="in-the-hour-that-is-not")
    files.add(gap - 20 * minute, gap + hour, name="paid-beyond-that-hour")
    files.add(twice, twice + 20 * minute, twice + 3 * day, name="in-the-hour-that-is-twice")
    files.add(t + 200 * day, t + 200 * day + minute, name="the-last-step")
    return files


def broken_rows(files: Files) -> Files:
    """Rows that must be left out, added to `files`."""
    name = files.orders[0]["order_id"]
    files.orders.append({**files.orders[0], "order_purchase_timestamp": "2018-01-01 00:00:00"})  # the same id again
    files.orders.append(dict.fromkeys(ORDER_COLUMNS, ""))
    files.orders.append({"order_id": "no-moments", "order_purchase_timestamp": ""})
    files.orders.append({"order_id": "bad-moment", "order_purchase_timestamp": "yesterday"})
    files.orders.append({**files.orders[0], "order_id": "bad-payment", "order_approved_at": "2017-02-30 10:00:00"})
    files.orders.append({"order_id": "short", "order_purchase_timestamp": "2017-10-01 10:00:00"})
    files.reviews.append({"order_id": name, "review_answer_timestamp": "soon"})
    files.reviews.append({"order_id": "nobody", "review_answer_timestamp": "2017-10-01 10:00:00"})
    return files


def _maybe(dice: random.Random, chance: float, moment: datetime) -> datetime | None:
    return moment if dice.random() < chance else None


def _text(value: object) -> str:
    return "" if value is None else str(value)
