"""The shop's story in a real browser: the countdown runs, and the page turns by itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from tests.shop.conftest import Shop

webdriver = pytest.importorskip("selenium.webdriver")
from selenium.webdriver import Chrome  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.ui import Select, WebDriverWait  # noqa: E402

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]
PATIENCE_SECONDS = 60


@pytest.fixture
def browser(chromium: tuple[str, str], tmp_path: Path) -> Iterator[Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location, driver = chromium
    for flag in (
        "headless",
        "no-sandbox",
        "disable-gpu",
        "disable-quic",
        "no-first-run",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
        "window-size=1200,900",
        f"user-data-dir={tmp_path / 'chromium'}",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield started
    started.quit()


@pytest.fixture
def open_shop(shop: Shop, browser: Chrome) -> Callable[..., None]:
    """Open the first page of a shop with a worker, where nothing is due within an hour but what is given in seconds."""

    def open_with(**delays: float) -> None:
        shop.wait_at_most(**delays)
        shop.start_server()
        shop.start_worker()
        browser.get(shop.url)

    return open_with


def _place_order(browser: Chrome) -> None:
    browser.find_element(By.NAME, "name").send_keys("Grace Hopper")
    browser.find_element(By.NAME, "phone").send_keys("+1 212 5550100")
    Select(browser.find_element(By.NAME, "product")).select_by_index(1)
    _button(browser, "Place order")


def _button(browser: Chrome, words: str) -> None:
    browser.find_element(By.XPATH, f"//button[normalize-space()='{words}']").click()


def _wait_for(browser: Chrome, words: str) -> None:
    def is_there(driver: Chrome) -> bool:
        return words in str(driver.execute_script("return document.body.innerText"))

    WebDriverWait(browser, PATIENCE_SECONDS).until(is_there, f"the page does not say {words!r}")


def _complaints(browser: Chrome) -> list[str]:
    """Return the errors of the scripts of the page."""
    lines: list[dict[str, str]] = cast("Any", browser).get_log("browser")
    return [line["message"] for line in lines if line["level"] == "SEVERE"]


def test_the_countdown_ends_and_the_page_turns_to_cancelled(browser: Chrome, open_shop: Callable[..., None]) -> None:
    open_shop(cancel_unpaid=6)
    _place_order(browser)
    clock = browser.find_element(By.CSS_SELECTOR, ".clock")
    assert re.fullmatch("00:0[1-6]", clock.text)
    address = browser.current_url
    _wait_for(browser, "This order was cancelled: not paid in time.")
    assert browser.current_url == address
    assert browser.find_element(By.CSS_SELECTOR, "h1 .badge").text == "Cancelled"
    assert browser.find_element(By.ID, "announcer").get_attribute("textContent") == "Now: Cancelled"
    assert not browser.find_elements(By.XPATH, "//button[normalize-space()='Pay now']")
    assert not _complaints(browser)


def test_a_countdown_whose_clock_is_stopped_shows_what_is_left_and_does_not_count(
    browser: Chrome, open_shop: Callable[..., None], shop: Shop
) -> None:
    open_shop(cancel_unpaid=15)
    _place_order(browser)
    shop.ask(
        "hold_timeout(Order.objects.latest('pk'), 'cancel_unpaid').state", "from django_delayq import hold_timeout"
    )
    _wait_for(browser, "stopped, ")  # it has asked when its own time was over
    shown = browser.find_element(By.CSS_SELECTOR, ".clock").text
    assert re.fullmatch(r"stopped, \d+ seconds? left", shown)
    assert not _complaints(browser)
    browser.refresh()
    _wait_for(browser, shown)
    assert browser.find_elements(By.XPATH, "//button[normalize-space()='Pay now']")


def test_who_pays_in_time_has_paid(browser: Chrome, open_shop: Callable[..., None]) -> None:
    open_shop()
    _place_order(browser)
    _button(browser, "Pay now")
    _wait_for(browser, "Paid, thank you.")
    _wait_for(browser, "Time left to accept")
    assert browser.find_element(By.CSS_SELECTOR, "h1 .badge").text == "Paid"
    _wait_for(browser, "59:5")


def test_who_pays_too_late_is_told_so(browser: Chrome, open_shop: Callable[..., None]) -> None:
    open_shop(cancel_unpaid=4)
    _place_order(browser)
    # A page that was left open: its script does not run, and its button is still there.
    browser.execute_script("for (let id = 0; id < 10000; id += 1) { clearTimeout(id); clearInterval(id); }")
    browser.execute_script("fetch = () => new Promise(() => {});")
    first = browser.current_window_handle
    address = browser.current_url
    browser.switch_to.new_window("tab")
    browser.get(address)
    _wait_for(browser, "This order was cancelled")
    browser.close()
    browser.switch_to.window(first)
    _button(browser, "Pay now")
    _wait_for(browser, "Sorry, this came too late")
    assert browser.find_element(By.CSS_SELECTOR, "h1 .badge").text == "Cancelled"
