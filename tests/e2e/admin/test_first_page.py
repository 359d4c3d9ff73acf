"""The first page in headless Chromium: it refreshes itself, and works with the keyboard."""

from __future__ import annotations

import pytest

from tests.e2e.admin.conftest import Admin

pytest.importorskip("selenium.webdriver")
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(300)]
FIRST_PAGE = "/admin/django_delayq/"
TRIAL = "shop.trialmembership.notify_trial_expiry"
OPENED = """
const [row, tick] = ["delayq-more-", "tick-"].map((each) => document.getElementById(each + arguments[0]));
return [row.open, tick.checked, document.activeElement.closest("details").id];
"""


def test_the_first_page_refreshes_itself_and_keeps_what_is_open_ticked_and_focused(admin: Admin) -> None:
    admin.open(FIRST_PAGE)
    admin.browser.find_element(By.ID, f"tick-{TRIAL}").click()
    summary = admin.browser.find_element(By.CSS_SELECTOR, f"[id='delayq-more-{TRIAL}'] summary")
    summary.send_keys(Keys.ENTER)  # by the keyboard
    change = "from django_delayq import operations; operations."
    admin.shop.ask("1", f"{change}pause({TRIAL!r}, by='cli:ann', reason='an outage')")
    admin.wait_for("By cli:ann: an outage")
    assert admin.browser.execute_script(OPENED, TRIAL) == [True, True, f"delayq-more-{TRIAL}"]
    rows = [row.text for row in admin.browser.find_elements(By.CSS_SELECTOR, ".delayq-policies > tbody > tr > th")]
    assert rows.index(TRIAL) < rows.index("shop.review.review_by_default"), "it has moved before those in order"
    admin.shop.ask("1", f"{change}resume({TRIAL!r}, by='cli:ann', reason='over')")
    admin.press("Refresh")
    assert "an outage" not in admin.browser.find_element(By.ID, "delayq-policies").text
