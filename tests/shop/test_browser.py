"""The front page of the demo in a real browser, with the operator's first page beside it."""

from __future__ import annotations

import importlib.resources
import re
from typing import Any

import pytest

from tests.shop.conftest import Shop

pytest.importorskip("selenium.webdriver")
pytest.importorskip("selenium_axe_python")
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from tests.e2e.admin.conftest import DESKTOP, PHONE, Admin, chrome

__all__ = ["chrome"]
pytestmark = [pytest.mark.browser, pytest.mark.slow]
PATIENCE_SECONDS = 90
DEMO = {
    "DJANGO_SETTINGS_MODULE": "config.demo",
    "DJANGO_SUPERUSER_USERNAME": "admin",
    "DJANGO_SUPERUSER_PASSWORD": "demo",
    "DJANGO_SUPERUSER_EMAIL": "admin@example.com",
}


@pytest.fixture
def visitor(chrome: Chrome, shop: Shop) -> Admin:
    axe = importlib.resources.files("selenium_axe_python") / "axe-core" / "axe.min.js"
    someone = Admin(chrome, shop, axe.read_text(encoding="utf-8"))
    someone.show_on(DESKTOP)
    return someone


def _wait_for(browser: Chrome, pattern: str, *, gone: bool = False) -> str:
    """Wait until the page contains the pattern, or no longer contains it, and return the found words."""

    def found(driver: Chrome) -> Any:
        match = re.search(pattern, str(driver.execute_script("return document.body ? document.body.innerText : ''")))
        return not match if gone else match and match[0]

    return str(WebDriverWait(browser, PATIENCE_SECONDS).until(found, pattern))


def _wait_for_operator(browser: Chrome, pattern: str, *, gone: bool = False) -> None:
    browser.switch_to.frame(browser.find_element(By.TAG_NAME, "iframe"))
    _wait_for(browser, pattern, gone=gone)
    browser.switch_to.default_content()


def test_a_visitor_plays_and_sees_what_the_operator_sees(visitor: Admin, shop: Shop) -> None:
    shop.environment |= DEMO
    shop.manage("createsuperuser", "--no-input")
    shop.start_server()
    shop.start_worker()
    visitor.open("/")
    for words in ("Pay in time", "Pay now", "Pay late", "Let the merchant sleep", "Break the SMS provider"):
        visitor.press(words)
    browser = visitor.browser
    assert re.fullmatch(r"00:\d\d", browser.find_element(By.CSS_SELECTOR, ".clock").text)
    _wait_for(browser, r"Attempt \d failed: ConnectionError: The SMS provider does not answer\.")
    _wait_for_operator(browser, "has failing timeouts")
    visitor.press("Repair the SMS provider")
    late = r"\d+ m?s late"
    _wait_for(browser, rf"Text message sent, {late}, with attempt \d+\.")
    _wait_for(browser, r"Paid, \d+ s before the deadline\.")
    _wait_for(browser, rf"Cancelled as not accepted, \d+ s after the payment, {late}\.")
    _wait_for(browser, rf"Cancelled as unpaid, \d+ s after the order, {late}\.")
    assert "Moka pot: Cancelled." in str(browser.find_element(By.ID, "announcer").get_attribute("textContent"))
    visitor.press("Pay all the same")
    _wait_for(browser, "Sorry, this came too late: the deadline was")
    _wait_for_operator(browser, "has failing timeouts", gone=True)
    for width, dark in ((PHONE, False), (DESKTOP, True)):
        visitor.show_on(width, dark=dark)
        assert visitor.faults("iframe") == []  # the frame has its own tests
