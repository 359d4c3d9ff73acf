"""The pages in the admin themes unfold and jazzmin: what Django's own theme has, they have, too."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.e2e.admin.conftest import LIST, POLICIES, Admin, Stock, served_as
from tests.shop.conftest import on_sqlite

pytest.importorskip("selenium.webdriver")
from selenium.webdriver.common.by import By

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(300), on_sqlite]
STYLE = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
EXCESS = "const page = document.documentElement; return page.scrollWidth - page.clientWidth"
EDGE = "borderInlineStartColor"


@pytest.mark.parametrize("theme", ["unfold", "jazzmin"])
def test_an_action_is_confirmed_and_the_pages_have_their_buttons_and_colours(
    admin: Admin, stock: Stock, theme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(theme) is None:
        pytest.skip(f"{theme} is not installed")
    pending, dead = stock.pending.pop()[1], stock.dead[0][1]
    for url in served_as(admin.shop, tmp_path, DELAYQ_TEST_THEME=theme):
        monkeypatch.setattr(admin.shop, "url", url)
        admin.open(LIST)
        row = admin.browser.find_element(By.CSS_SELECTOR, f"input[name=_selected_action][value='{pending}']")
        admin.browser.execute_script("arguments[0].click()", row)  # a bar of the theme may cover it
        admin.browser.execute_script("document.querySelector('select[name=action]').value = 'cancel_timeouts'")
        admin.browser.find_element(By.CSS_SELECTOR, "button[name=index]").click()
        admin.wait_for("Cancel these timeouts?")
        admin.type("reason", "in another theme")
        admin.press("Cancel the timeout")
        admin.wait_for("1 timeout was cancelled.")
        assert admin.browser.execute_script(STYLE, ".delayq-cancelled", EDGE) == "rgb(128, 128, 128)"
        admin.open(f"{LIST}{dead}/change/")
        for name in ("Cancel the timeout", "Retry the timeout", "Fire the timeout again"):
            button = admin.browser.find_element(By.XPATH, f"//a[normalize-space()='{name}']")
            assert button.is_displayed() and button.value_of_css_property("border-top-style") != "none"
        assert admin.browser.execute_script(STYLE, ".delayq-badge", EDGE) == "rgb(212, 63, 58)"
        admin.open(POLICIES)
        assert admin.browser.execute_script(STYLE, ".delayq-buttons a", "borderTopStyle") == "solid"
        assert admin.browser.execute_script(EXCESS) <= 0
