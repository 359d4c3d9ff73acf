"""The pages of the shop, as a customer, a merchant and a courier use them. Nothing is due during a test."""

from __future__ import annotations

import json

import pytest

from tests.shop.conftest import Shop, on_sqlite
from tests.shop.visitor import Visitor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), on_sqlite]


@pytest.fixture
def visitor(calm_shop: Shop) -> Visitor:
    """Someone new."""
    return Visitor(calm_shop.url)


@pytest.mark.parametrize(
    ("steps", "note", "badge"),
    [
        ("pay accept hand-over deliver", "Delivered.", "delivered"),
        ("deliver", "cannot be delivered: it is unpaid", "unpaid"),
        ("pay pay", "cannot be paid: it is paid", "paid"),
        ("pay accept hand-over hand-over", "already has this parcel", "accepted"),
        ("pay cancel accept", "it was cancelled: by the customer", "cancelled"),
    ],
)
def test_a_step_is_taken_in_its_turn_or_refused_in_words(visitor: Visitor, steps: str, note: str, badge: str) -> None:
    order = visitor.place_order()
    pages = [visitor.post(f"{order}{step}/") for step in steps.split()]
    assert note in pages[-1].notes[0]
    assert pages[-1].status_badge == badge


def test_a_delivered_order_is_reviewed_once(visitor: Visitor) -> None:
    order = visitor.place_order()
    for step in ("pay", "accept", "deliver"):
        visitor.post(f"{order}{step}/")
    assert visitor.post(f"{order}review/", score="9").notes == ["Please choose one to five stars."]
    page = visitor.post(f"{order}review/", score="4", text="Strong & good")
    assert page.notes == ["Thank you for your review."]
    assert "Strong &amp; good" in page.text
    assert visitor.post(f"{order}review/", score="5").notes == ["This order already has a review."]


def test_who_placed_an_order_may_ask_how_long_is_left_to_pay(visitor: Visitor) -> None:
    order = visitor.place_order()
    assert f'data-sync="{order}time-to-pay/"' in visitor.get(order).text
    shown = json.loads(visitor.get(f"{order}time-to-pay/").text)
    assert shown["state"] == "pending"
    assert 0 < shown["seconds_left"] <= 3600
    visitor.post(f"{order}pay/")
    assert json.loads(visitor.get(f"{order}time-to-pay/").text)["state"] == "cancelled"
    stranger = Visitor(visitor.url)
    assert stranger.get(f"{order}time-to-pay/").status == 404
    assert stranger.get("/api/delayq/timeouts/").status in (401, 403)
    assert order not in stranger.get("/").text


def test_actions_need_a_post_with_a_token(visitor: Visitor) -> None:
    order = visitor.place_order()
    for path in (f"{order}pay/", "/plays/break-sms/", "/sms/repair/"):
        assert visitor.get(path).status == 405
        assert Visitor(visitor.url).post(path).status == 403
    assert visitor.get(order).status_badge == "unpaid"


def test_the_shop_passes_its_own_tests_and_its_bulk_writes_arm(shop: Shop) -> None:
    assert "Found 8 test(s)." in shop.manage("test", "--no-input", "shop")
    found = shop.ask(
        "[each.id for each in run_checks(tags=['django_delayq'], include_deployment_checks=True)]",
        "from django.core.checks import run_checks",
    )
    assert "django_delayq.I002" not in found


LOGIN = """
from django.contrib.auth.models import User
from django.test import Client, override_settings
User.objects.create_superuser("demo")

def is_logged_in(debug, address, path):
    client = Client(REMOTE_ADDR=address, HTTP_HOST="localhost")
    with override_settings(DEBUG=debug):
        client.get(path)
        return client.get("/admin/").status_code == 200
"""


def test_only_the_demo_with_debug_on_this_machine_logs_its_visitor_in(shop: Shop) -> None:
    shop.environment |= {"DJANGO_SETTINGS_MODULE": "config.demo", "DJANGO_SUPERUSER_USERNAME": "demo"}
    tried = [
        (True, "127.0.0.1", "/"),
        (True, "10.0.0.1", "/"),
        (False, "127.0.0.1", "/"),
        (True, "127.0.0.1", "/admin/"),
    ]
    assert shop.ask(f"[is_logged_in(*each) for each in {tried}]", LOGIN) == [True, False, False, False]
