"""Generated orders for the demo, with all possible outcomes in realistic proportions."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

from shop.replay.records import OrderRecord

BEGIN = datetime(2025, 3, 3, 9, 0, tzinfo=UTC)
PROMISED = timedelta(days=2)


def made_up_records(count: int, seed: int = 7) -> list[OrderRecord]:
    """Return `count` records, the same ones for the same seed."""
    dice = random.Random(seed)
    return [_record(number, dice) for number in range(count)]


def _record(number: int, dice: random.Random) -> OrderRecord:
    placed = BEGIN + timedelta(minutes=number)
    paid = accepted = promised = delivered = reviewed = None
    if dice.random() < 0.8:
        paid = placed + timedelta(minutes=dice.randint(1, 20))
    if paid and dice.random() < 0.85:
        accepted = paid + timedelta(minutes=dice.randint(1, 3))
        promised = accepted + PROMISED
        delivered = accepted + timedelta(hours=dice.choice([18, 24, 30, 36, 72]))  # the last one is late
    if delivered and dice.random() < 0.6:
        reviewed = delivered + timedelta(days=dice.randint(1, 4))
    return OrderRecord(
        order_id=f"demo-{number:04d}",
        customer_id=f"demo-{number:04d}",
        placed_at=placed,
        paid_at=paid,
        accepted_at=accepted,
        promised_at=promised,
        delivered_at=delivered,
        reviewed_at=reviewed,
        score=dice.randint(3, 5),
    )
