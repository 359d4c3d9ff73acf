"""The shop's pages, as a customer, a merchant and a courier use them; deadlines are kept by a real worker."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.shop.conftest import Shop, on_sqlite
from tests.shop.visitor import Page, Visitor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), on_sqlite]

Opened = Callable[..., Visitor]


@pytest.fixture
def visitor(calm_shop: Shop) -> Visitor:
    """Someone new in a shop where nothing is due during a test."""
    return Visitor(calm_shop.url)


@pytest.fixture
def opened(shop: Shop) -> Opened:
    """Open a shop of one's own, with a worker, and with the delays that are given in seconds."""

    def open_shop(**delays: float) -> Visitor:
        shop.wait_at_most(**delays)
        shop.start_server()
        shop.start_worker()
        return Visitor(shop.url)

    return open_shop


def test_an_order_goes_all_its_way(visitor: Visitor) -> None:
    order = visitor.place_order()
    page = visitor.get(order)
    assert page.status_badge == "unpaid"
    assert "Please pay by <time" in page.text
    assert visitor.post(f"{order}pay/").status_badge == "paid"
    assert visitor.post(f"{order}accept/").status_badge == "accepted"
    assert "With the courier" in visitor.post(f"{order}hand-over/").text
    assert visitor.post(f"{order}deliver/").status_badge == "delivered"
    page = visitor.post(f"{order}review/", score="4", text="Strong & good")
    assert page.notes == ["Thank you for your review."]
    assert "Strong &amp; good" in page.text


def test_a_step_out_of_turn_is_refused_in_words(visitor: Visitor) -> None:
    order = visitor.place_order()
    assert "cannot be delivered: it is unpaid" in visitor.post(f"{order}deliver/").notes[0]
    visitor.post(f"{order}pay/")
    assert "cannot be paid: it is paid" in visitor.post(f"{order}pay/").notes[0]
    assert visitor.post(f"{order}cancel/").status_badge == "cancelled"
    assert "it was cancelled: by the customer" in visitor.post(f"{order}accept/").notes[0]


def test_an_unpaid_order_cancels_itself_and_a_late_payment_is_refused(opened: Opened, shop: Shop) -> None:
    visitor = opened(cancel_unpaid=0.5)
    order = visitor.place_order()
    page = visitor.wait_for(order, lambda page: page.status_badge == "cancelled")
    assert "not paid in time" in page.text
    refused = visitor.post(f"{order}pay/")
    assert re.search(r"this came too late: the deadline was [0-9:]{8} UTC\.", refused.notes[0])
    assert refused.status_badge == "cancelled"


def test_an_order_that_no_merchant_accepts_cancels_itself(opened: Opened, shop: Shop) -> None:
    visitor = opened(cancel_unaccepted=0.5)
    order = visitor.place_order()
    visitor.post(f"{order}pay/")
    page = visitor.wait_for(order, lambda page: page.status_badge == "cancelled")
    assert "not accepted by the merchant in time" in page.text


def test_a_late_parcel_brings_one_text_message(opened: Opened, shop: Shop) -> None:
    visitor = opened(promised_delivery=0.5)
    order = visitor.place_order()
    visitor.post(f"{order}pay/")
    visitor.post(f"{order}accept/")
    visitor.wait_for(order, lambda page: "late at the promised time" in page.text)
    assert shop.ask(f"TextMessage.objects.filter(recipient={visitor.phone!r}).count()") == 1
    assert f"SMS to {visitor.phone}: Your order" in shop.log()


def test_silence_after_the_delivery_counts_as_five_stars(opened: Opened, shop: Shop) -> None:
    visitor = opened(review_by_default=0.5)
    order = visitor.place_order()
    for step in ("pay", "accept", "deliver"):
        visitor.post(f"{order}{step}/")
    visitor.wait_for(order, lambda page: "5 of 5 stars, by default" in page.text)
    assert "this came too late" in visitor.post(f"{order}review/", score="1", text="").notes[0]


def test_a_trial_ends_with_a_text_message(opened: Opened, shop: Shop) -> None:
    visitor = opened(notify_trial_expiry=0.5)
    customer = _customer_of(visitor.get(visitor.place_order()))
    visitor.wait_for(customer, lambda page: "Expired" in page.text and "Your free trial is over." in page.text)
    assert "this came too late" in visitor.post(f"{customer}convert/").notes[0]
    assert shop.ask(f"TextMessage.objects.filter(recipient={visitor.phone!r}).count()") == 1


def test_who_joins_in_time_gets_no_message(visitor: Visitor, calm_shop: Shop) -> None:
    customer = _customer_of(visitor.get(visitor.place_order()))
    visitor.get(customer)
    assert "Welcome!" in visitor.post(f"{customer}convert/").notes[0]
    trial = f"TrialMembership.objects.get(customer__reference={customer.split('/')[2]!r})"
    assert calm_shop.ask(f"[row.state for row in {trial}.timeouts.all()]") == ["cancelled"]


def test_actions_need_a_post_with_a_token(visitor: Visitor) -> None:
    order = visitor.place_order()
    assert visitor.get(f"{order}pay/").status == 405
    assert Visitor(visitor.url).post(f"{order}pay/").status == 403
    assert visitor.get(order).status_badge == "unpaid"


@pytest.mark.parametrize("path", ["/orders/NONE-SUCH/", "/customers/NONE-SUCH/"])
def test_what_is_not_there_is_not_found(visitor: Visitor, path: str) -> None:
    assert visitor.get(path).status == 404


def test_what_a_form_lacks_is_named(visitor: Visitor) -> None:
    visitor.get("/")
    page = visitor.post("/orders/", name="Ada", phone="none of your business", product="Moka pot")
    assert page.status == 400
    assert "Please enter digits" in page.text


def test_the_admin_shows_the_shop(visitor: Visitor, calm_shop: Shop) -> None:
    calm_shop.environment["DJANGO_SUPERUSER_PASSWORD"] = "a demo's password"
    calm_shop.manage("createsuperuser", "--no-input", "--username", "boss", "--email", "boss@example.com")
    visitor.place_order()
    visitor.get("/admin/login/")
    visitor.post("/admin/login/?next=/admin/", username="boss", password="a demo's password")
    for model in ("order", "customer", "trialmembership", "delivery", "review", "textmessage"):
        assert visitor.get(f"/admin/shop/{model}/").status == 200


def _customer_of(page: Page) -> str:
    """Return the path of the customer whose order the page shows."""
    found = re.search(r"/customers/[^/]+/", page.text)
    assert found, page.text[:2000]
    return found[0]
