"""The pages of the shop, as a customer, a merchant and a courier use them. Nothing is due during a test."""

from __future__ import annotations

from typing import Any

import pytest

from tests.shop.conftest import Shop, on_sqlite

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), on_sqlite]
VISITOR = """
import html, re
from django.test import Client

class Visitor:
    def __init__(self):
        self.client, self.token = Client(enforce_csrf_checks=True, HTTP_HOST="localhost"), ""

    def get(self, path):
        return self._seen(self.client.get(path, follow=True))

    def post(self, path, **fields):
        return self._seen(self.client.post(path, {"csrfmiddlewaretoken": self.token, **fields}, follow=True))

    def _seen(self, page):
        self.text = html.unescape(page.content.decode())
        self.token = (re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', self.text) or [0, self.token])[1]
        return page.status_code

    def note(self, path, **fields):
        self.post(path, **fields)
        badge = re.search(r'<h1[^>]*>.*?<span class="badge (\\w+)"', self.text, re.DOTALL)[1]
        return [re.search(r'<li class="note [^"]*">(.*?)</li>', self.text)[1], badge]

    def place(self):
        self.get("/")
        self.post("/plays/pay-late/")
        return re.search(r'<a href="(/orders/[^/]+/)">', self.text)[1]

def took(*steps):
    visitor = Visitor()
    order = visitor.place()
    return [visitor.note(f"{order}{step}/") for step in steps][-1]

def reviewed(*scores):
    visitor = Visitor()
    order = visitor.place()
    for step in ("pay", "accept", "deliver"):
        visitor.post(f"{order}{step}/")
    return [visitor.note(f"{order}review/", score=score, text="Strong & good")[0] for score in scores]

visitor, stranger = Visitor(), Visitor()
order = visitor.place()
shown = visitor.client.get(f"{order}time-to-pay/").json()
"""
STEPS = {
    "pay accept hand-over deliver": ("Delivered.", "delivered"),
    "deliver": ("cannot be delivered: it is unpaid", "unpaid"),
    "pay pay": ("cannot be paid: it is paid", "paid"),
    "pay accept hand-over hand-over": ("already has this parcel", "accepted"),
    "pay cancel accept": ("it was cancelled: by the customer", "cancelled"),
}


def ask(shop: Shop, expression: str) -> Any:
    shop.wait_at_most()
    return shop.ask(expression, VISITOR)


def test_a_step_is_taken_in_its_turn_or_refused_in_words_and_a_delivered_order_is_reviewed_once(shop: Shop) -> None:
    taken = ask(shop, f"[*(took(*steps.split()) for steps in {list(STEPS)}), reviewed(9, 4, 5)]")
    for (note, badge), (words, status) in zip(taken, STEPS.values(), strict=False):
        assert words in note and badge == status
    assert taken[-1] == [
        "Please choose one to five stars.", "Thank you for your review.", "This order already has a review."
    ]  # fmt: skip


def test_only_who_placed_an_order_sees_it_and_actions_need_a_post_with_a_token(shop: Shop) -> None:
    paths = '[f"{order}pay/", "/plays/break-sms/", "/sms/repair/"]'
    shown, is_listed, *statuses = ask(
        shop,
        "[shown, order in (stranger.get('/'), stranger.text)[1], stranger.get(f'{order}time-to-pay/'), "
        f"stranger.get('/api/delayq/timeouts/'), *map(visitor.get, {paths}), *map(Visitor().post, {paths})]",
    )
    assert shown["state"] == "pending" and 0 < shown["seconds_left"] <= 3600
    assert not is_listed
    assert statuses[0] == 404 and statuses[1] in (401, 403)
    assert statuses[2:] == [405] * 3 + [403] * 3


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
