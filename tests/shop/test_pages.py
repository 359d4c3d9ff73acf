"""Who may see and do what on the pages of the shop. What its steps do: `example_project/shop/tests.py`."""

from __future__ import annotations

import pytest

from tests.shop.conftest import Shop, on_sqlite

pytestmark = [pytest.mark.slow, on_sqlite]
PAGES = """
import re
from django.test import Client

def client():
    return Client(enforce_csrf_checks=True, HTTP_HOST="localhost")

visitor, stranger = client(), client()
token = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', visitor.get("/").content.decode())[1]
placed = visitor.post("/plays/pay-late/", {"csrfmiddlewaretoken": token}, follow=True).content.decode()
order = re.search(r'<a href="(/orders/[^/]+/)">', placed)[1]
time = f"{order}time-to-pay/"
actions = [f"{order}pay/", "/plays/break-sms/", "/sms/repair/"]
answers = {
    "to the visitor": visitor.get(time).json(),
    "to a stranger": [stranger.get(path).status_code for path in (time, "/api/delayq/timeouts/")],
    "is listed": order in stranger.get("/").content.decode(),
    "not posted": [visitor.get(path).status_code for path in actions],
    "without a token": [visitor.post(path).status_code for path in actions],
}
"""


def test_only_who_placed_an_order_sees_it_and_actions_need_a_post_with_a_token(shop: Shop) -> None:
    shop.wait_at_most()
    answers = shop.ask("answers", PAGES)
    left = answers.pop("to the visitor")
    assert left["state"] == "pending" and 0 < left["seconds_left"] <= 3600
    assert answers.pop("to a stranger") in ([404, 401], [404, 403])
    assert answers == {"is listed": False, "not posted": [405] * 3, "without a token": [403] * 3}


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
