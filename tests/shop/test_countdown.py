"""The countdown endpoint of the shop: only for the browser that placed the order."""

from __future__ import annotations

import json

import pytest

from tests.shop.conftest import Shop, on_sqlite
from tests.shop.visitor import Visitor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), on_sqlite]


def test_who_placed_an_order_may_ask_how_long_is_left_to_pay(calm_shop: Shop) -> None:
    visitor = Visitor(calm_shop.url)
    order = visitor.place_order()
    page = visitor.get(order).text
    assert f'data-sync="{order}time-to-pay/"' in page
    shown = json.loads(visitor.get(f"{order}time-to-pay/").text)
    assert shown["state"] == "pending"
    assert 0 < shown["seconds_left"] <= 3600
    visitor.post(f"{order}pay/")
    assert json.loads(visitor.get(f"{order}time-to-pay/").text)["state"] == "cancelled"
    stranger = Visitor(calm_shop.url)
    assert stranger.get(f"{order}time-to-pay/").status == 404
    assert stranger.get("/orders/NONE/time-to-pay/").status == 404
    assert stranger.get("/api/delayq/timeouts/").status in (401, 403)
