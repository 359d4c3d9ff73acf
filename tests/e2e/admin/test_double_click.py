"""A confirmation in the admin is sent once, in headless Chromium."""

from __future__ import annotations

import pytest

from tests.e2e.admin.conftest import Admin, Stock

pytestmark = [pytest.mark.browser, pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.mark.parametrize("path", ["timeout/operate/postpone/?ids={}", "policycontrol/shop.order.cancel_unpaid/hold/"])
def test_a_double_click_on_a_confirmation_sends_it_once(admin: Admin, stock: Stock, path: str) -> None:
    """Otherwise both requests arrive, and the second one postpones a second time, or fires again a second time."""
    admin.open(f"/admin/django_delayq/{path.format(stock.pending[0][1])}")
    event = 'new SubmitEvent("submit", {bubbles: true, cancelable: true})'
    submit = f'return document.querySelector("#content-main form").dispatchEvent({event})'
    assert [admin.browser.execute_script(submit) for _ in range(2)] == [True, False]
