"""The replay of recorded orders counts what an oracle works out from the files alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests import settings as test_settings
from tests.shop.conftest import Shop, on_sqlite
from tests.shop.oracle import expected_counts
from tests.shop.synthetic import Files, broken_rows, odd_orders, random_orders

pytestmark = pytest.mark.slow


def _replay(shop: Shop, orders: Path, reviews: Path, *more: str) -> dict[str, dict[str, int]]:
    return shop.counts(
        "replay_orders", "--virtual", "--json", "--orders", str(orders), "--reviews", str(reviews), *more
    )


@pytest.mark.dialect
def test_a_virtual_replay_counts_what_the_oracle_counts(shop: Shop, tmp_path: Path) -> None:
    """Also one that finds what another has left pending, and of orders some of which cannot be read."""
    orders = random_orders(60, seed=5).write(tmp_path)
    counts = _replay(shop, *orders, "--limit", "4")
    assert counts == expected_counts(*orders, 4)
    assert any("pending" in states for states in counts.values())
    assert _replay(shop, *orders) == expected_counts(*orders)
    others = broken_rows(odd_orders()).write(tmp_path)
    assert _replay(shop, *others, "--until-settled") == expected_counts(*others, until_settled=True)


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("paid-at-the-deadline", {"cancel_unpaid": "fired"}),
        ("paid-a-second-before", {"cancel_unpaid": "cancelled", "cancel_unaccepted": "cancelled"}),
        ("accepted-before-the-payment", {"cancel_unaccepted": "cancelled"}),
        ("accepted-at-the-deadline", {"cancel_unaccepted": "fired"}),
        ("delivered-at-the-promised-time", {"remind_late_delivery": "fired"}),
        ("late-and-delivered-at-the-acceptance", {"remind_late_delivery": "fired"}),
        ("reviewed-at-the-deadline", {"review_by_default": "fired"}),
        ("in-the-hour-that-is-not", {"cancel_unpaid": "cancelled"}),
        ("paid-beyond-that-hour", {"cancel_unpaid": "cancelled"}),
    ],
)
def test_the_oracle_itself_knows_the_edges(name: str, outcome: dict[str, str], tmp_path: Path) -> None:
    """Worked out by hand, so that replay and oracle cannot be wrong in the same way about these."""
    all_orders = odd_orders()
    last = all_orders.orders[-1]
    kept = Files([row for row in all_orders.orders if row["order_id"] == name] + [last], all_orders.reviews)
    counts = expected_counts(*kept.write(tmp_path), until_settled=True)
    alone = expected_counts(*Files([last], []).write(tmp_path), until_settled=True)
    for policy, state in outcome.items():
        assert counts[policy].get(state, 0) - alone.get(policy, {}).get(state, 0) == 1


def test_lived_through_two_real_workers_each_order_has_one_outcome(shop: Shop, tmp_path: Path) -> None:
    orders, reviews = random_orders(60).write(tmp_path)
    paths = ("--orders", str(orders), "--reviews", str(reviews))
    output = shop.manage("replay_orders", *paths, "--seconds", "0.3", "--pace", "20", "--check", "--json")
    assert "60 orders: each has one outcome" in output
    counts = json.loads(output.splitlines()[-1])["cancel_unpaid"]
    assert set(counts) <= {"cancelled", "fired", "skipped"}
    assert sum(counts.values()) == 60


CONTRADICTION = """
from shop.replay.checking import contradictions
from shop.replay.records import OrderRecord
from shop.replay.results import Ledger
from shop.replay.steps import Life
order = Order.objects.filter(cancel_reason="unaccepted").first()
life = Life(OrderRecord(order_id="x", customer_id=order.customer.reference, placed_at=order.placed_at), order)
before = contradictions([life], Ledger(0))
Order.objects.filter(pk=order.pk).update(status="accepted", cancelled_at=None, cancel_reason="")
"""


@on_sqlite
def test_an_order_that_contradicts_its_ledger_is_found(shop: Shop, tmp_path: Path) -> None:
    """The check of the live replay must be able to fail."""
    orders, reviews = random_orders(12).write(tmp_path)
    _replay(shop, orders, reviews, "--until-settled", "--check")
    before, after = shop.ask("[before, contradictions([life], Ledger(0))]", CONTRADICTION)
    assert before == []
    assert any("cancel_unaccepted is fired, expected in time" in words for words in after)


@pytest.mark.real_orders
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not os.environ.get("ORDERS"), reason="ORDERS and REVIEWS name no files")
def test_real_orders_count_what_the_oracle_counts(shop: Shop) -> None:
    """All of them on SQLite; on the servers, where each step takes a round trip, the first 400."""
    orders, reviews = Path(os.environ["ORDERS"]), Path(os.environ["REVIEWS"])
    limit = None if test_settings.DB == "sqlite" else 400
    more = () if limit is None else ("--limit", str(limit))
    assert _replay(shop, orders, reviews, *more) == expected_counts(orders, reviews, limit)
