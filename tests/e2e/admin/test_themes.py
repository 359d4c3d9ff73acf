"""The pages in the admin themes unfold and jazzmin: what Django's own theme has, they have, too."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.e2e.admin.conftest import LIST, POLICIES, Admin, Stock, served_as
from tests.shop.conftest import Shop, on_sqlite

pytest.importorskip("selenium.webdriver")
from selenium.webdriver.common.by import By

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(300), on_sqlite]
STYLE = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
HIDDEN = "return [...document.querySelectorAll('.delayq-hidden')].map((node) => node.getBoundingClientRect().width)"
EXCESS = "const page = document.documentElement; return page.scrollWidth - page.clientWidth"


@pytest.fixture(scope="module", params=["unfold", "jazzmin"])
def themed_address(
    request: pytest.FixtureRequest, calm_shop: Shop, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    yield from served_as(calm_shop, tmp_path_factory.mktemp(request.param), DELAYQ_TEST_THEME=request.param)


@pytest.fixture
def themed(admin: Admin, themed_address: str, stock: Stock, monkeypatch: pytest.MonkeyPatch) -> Admin:
    monkeypatch.setattr(admin.shop, "url", themed_address)
    return admin


def style(admin: Admin, selector: str, name: str) -> str:
    return str(admin.browser.execute_script(STYLE, selector, name))


def test_an_action_is_started_and_confirmed(themed: Admin, stock: Stock) -> None:
    pk = stock.pending.pop()[1]
    themed.open(LIST)
    row = themed.browser.find_element(By.CSS_SELECTOR, f"input[name=_selected_action][value='{pk}']")
    themed.browser.execute_script("arguments[0].click()", row)  # a bar of the theme may cover it
    themed.browser.execute_script("document.querySelector('select[name=action]').value = 'cancel_timeouts'")
    themed.browser.find_element(By.CSS_SELECTOR, "button[name=index]").click()
    themed.wait_for("Cancel these timeouts?")
    assert style(themed, ".submit-row input", "borderTopStyle") != "none"
    themed.type("reason", "in another theme")
    themed.press("Cancel the timeout")
    themed.wait_for("1 timeout was cancelled.")
    assert style(themed, ".delayq-cancelled", "borderInlineStartColor") == "rgb(128, 128, 128)"
    assert style(themed, ".delayq-cancelled", "borderInlineStartStyle") == "solid"
    assert themed.browser.execute_script(EXCESS) <= 0


def test_the_page_of_a_timeout_has_its_buttons_its_story_and_its_links(themed: Admin, stock: Stock) -> None:
    order, dead, _ = stock.dead[0]
    themed.open(f"{LIST}{dead}/change/")
    for name in ("Cancel the timeout", "Retry the timeout", "Fire the timeout again"):
        button = themed.browser.find_element(By.XPATH, f"//a[normalize-space()='{name}']")
        assert button.is_displayed() and button.value_of_css_property("border-top-style") != "none"
    assert style(themed, ".delayq-badge", "borderInlineStartColor") == "rgb(212, 63, 58)"
    assert "rgba(0, 0, 0, 0)" not in style(themed, ".delayq-raw", "borderTopColor")
    assert themed.browser.execute_script(EXCESS) <= 0
    themed.open(f"/admin/shop/order/{order}/change/")
    link = themed.browser.find_element(By.CSS_SELECTOR, ".field-policy_name a")
    assert str(link.get_attribute("href")).endswith(f"{LIST}{dead}/change/")


def test_the_page_of_policies_hides_what_is_meant_for_screen_readers(themed: Admin) -> None:
    themed.open(POLICIES)
    widths = themed.browser.execute_script(HIDDEN)
    assert widths and max(widths) <= 1
    assert style(themed, ".delayq-chart rect", "fill") != "rgb(0, 0, 0)"
    assert style(themed, ".delayq-buttons a", "borderTopStyle") == "solid"
    assert themed.browser.execute_script(EXCESS) <= 0
