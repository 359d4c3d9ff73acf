"""What another limit would have done to recorded orders is what it does when they are replayed with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.shop.conftest import Shop
from tests.shop.oracle import expected_counts
from tests.shop.synthetic import random_orders

pytestmark = pytest.mark.slow

MINUTES = {"cancel_unpaid": (20, 45), "cancel_unaccepted": (2880, 5760)}
"""A shorter and a longer limit than that of the replay: half an hour, and three days."""
REPLAYS = """
from datetime import timedelta
from django.db.models import F
from django_delayq.monitoring.whatif import what_if
from shop.replay.arguments import REPLAY_DELAYS
from shop.replay.checking import forget
from shop.replay.records import read_records
from shop.replay.virtual import VirtualPlay

def replay(**delays):
    records = read_records(ORDERS, REVIEWS).records
    forget((one.order_id for one in records), (one.customer_id for one in records))
    play = VirtualPlay(records, {**REPLAY_DELAYS, **delays})
    play.run(lambda: None, until_settled=True)
    return play.ledger.counts()

def answer(name, minutes):
    found = what_if(f"shop.order.{name}", timedelta(minutes=minutes), last=timedelta(days=7300))
    names = ("rounds", "in_time", "fired", "ended_first", "would_fire", "would_fire_at_most", "unknown", "hand_set")
    # Paid in the second of the other deadline: in time for a report, but the replay lets the deadline be first.
    ended = Timeout.objects.filter(policy=f"shop.order.{name}", cause="condition")
    ties = ended.filter(settled_at=F("since_at") + timedelta(minutes=minutes)).count()
    return {"ties": ties, **{name: getattr(found, name) for name in names}}

Timeout.objects.all().delete()
first = replay()
answers = [(name, minutes, answer(name, minutes)) for name, all in MINUTES.items() for minutes in all]
again = [replay(**{name: timedelta(minutes=minutes)})[name].get("fired", 0) for name, minutes, _ in answers]
"""


def test_made_up_orders(shop: Shop, tmp_path: Path) -> None:
    orders, reviews = random_orders(40).write(tmp_path)
    given = f"from pathlib import Path\nORDERS, REVIEWS = map(Path, {[str(orders), str(reviews)]})\n"
    given += f"MINUTES = {MINUTES}\n"
    first, answers, again = shop.ask("[first, answers, again]", given + REPLAYS)
    assert first == expected_counts(orders, reviews, until_settled=True)
    asked: list[tuple[str, int, dict[str, Any]]] = answers
    for (name, minutes, answer), fired in zip(asked, again, strict=True):
        states = first[name]
        assert (answer["rounds"], answer["fired"]) == (sum(states.values()), states.get("fired", 0))
        assert (answer["unknown"], answer["hand_set"]) == (0, 0)
        if minutes == MINUTES[name][0]:
            assert answer["would_fire"] == answer["would_fire_at_most"] == fired - answer["ties"]
            assert answer["ended_first"] == answer["would_fire"] - answer["fired"] > 0
        else:
            assert answer["ended_first"] == 0
            assert answer["would_fire"] <= fired <= answer["would_fire_at_most"] == answer["fired"]
    assert len(answers) == 4
