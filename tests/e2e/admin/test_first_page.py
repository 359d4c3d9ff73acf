"""The first page in headless Chromium: while it stays open, it shows what is wrong, and keeps what has been opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from django_delayq.management.commands.delayq_status import WATCH_SECONDS
from django_delayq.monitoring.snapshot import ALIVE
from tests.e2e.admin.burning import BRAKED, STATES, Burning
from tests.e2e.admin.conftest import FIRST_PAGE, SCREENS, Admin
from tests.shop.conftest import Shop
from tools.servers import RedisServer

pytest.importorskip("selenium.webdriver")
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

pytestmark = [pytest.mark.browser, pytest.mark.slow]
TRIAL = "shop.trialmembership.notify_trial_expiry"
REFRESH = "return Number(document.querySelector('[data-delayq-refresh]').dataset.delayqRefresh)"
OPENED = """
const [row, tick] = ["delayq-more-", "tick-"].map((each) => document.getElementById(each + arguments[0]));
return [row.open, tick.checked, document.activeElement.closest("details").id];
"""


def test_the_open_first_page_shows_what_burns_and_keeps_what_is_open_ticked_and_focused(
    chrome: Any, axe: str, shop: Shop, tmp_path: Path
) -> None:
    with RedisServer(tmp_path / "redis") as redis:
        burning, admin = Burning(shop, redis), Admin(chrome, shop, axe)
        burning.do("User.objects.create_superuser('boss', '', 'secret')")
        shop.start_server()
        admin.log_in()
        admin.open(FIRST_PAGE)
        assert max(chrome.execute_script(REFRESH), WATCH_SECONDS, ALIVE.total_seconds()) <= 10
        chrome.find_element(By.ID, f"tick-{TRIAL}").click()
        chrome.find_element(By.CSS_SELECTOR, f"[id='delayq-more-{TRIAL}'] summary").send_keys(Keys.ENTER)
        for happens, *said in STATES:
            admin.wait_for(*said, is_said=False)
            happens(burning)
            admin.wait_for(*said)
            assert chrome.execute_script(OPENED, TRIAL) == [True, True, f"delayq-more-{TRIAL}"]
        assert chrome.find_element(By.CSS_SELECTOR, ".delayq-policies > tbody").get_attribute("id").endswith(BRAKED)
        admin.press("Refresh")
        admin.wait_for(*STATES[-1][1:])
        for width, dark in SCREENS.values():
            admin.show_on(width, dark=dark)
            admin.open(FIRST_PAGE)
            admin.unfold()
            assert admin.faults() == [], (width, dark)
