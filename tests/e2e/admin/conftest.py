"""The shop's admin in a real browser, logged in; a stock of orders from which each test takes its own."""

from __future__ import annotations

import base64
import contextlib
import importlib.resources
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.shop.conftest import Shop, calm_shop, shop, shop_database

webdriver = pytest.importorskip("selenium.webdriver")
from selenium.webdriver import Chrome  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.ui import Select, WebDriverWait  # noqa: E402

__all__ = ["calm_shop", "shop", "shop_database"]
PATIENCE_SECONDS = 60
DESKTOP, PHONE = 1280, 390
SCREENS = {"desktop": (DESKTOP, False), "dark phone": (PHONE, True)}
each_screen = pytest.mark.parametrize(("width", "dark"), SCREENS.values(), ids=SCREENS)
FIRST_PAGE = "/admin/django_delayq/"
LIST, POLICIES = f"{FIRST_PAGE}timeout/", f"{FIRST_PAGE}policycontrol/"
PICTURES = os.environ.get("DELAYQ_TEST_SCREENS", "")
STOCK = """
from django.contrib.auth.models import User
from django.utils import timezone
User.objects.create_superuser("boss", "", "secret")
customer = Customer.objects.create(name="Ada Byron", phone="+44 20 7946 0000")
orders = [Order.objects.place(customer, "Moka pot", 1999) for _ in range(20)]
rows = {int(row.object_id): row.pk for row in Timeout.objects.filter(policy="shop.order.cancel_unpaid")}
stock = [(order.pk, rows[order.pk], order.reference) for order in orders]
error = {"at": timezone.now().isoformat(), "what": "failed", "error": "GatewayError", "message": "503",
         "traceback": "Traceback (most recent call last):\\n  GatewayError: 503"}
dead = [pk for _, pk, _ in stock[15:]]
Timeout.objects.filter(pk__in=dead).update(state="dead", cause="retries", settled_at=timezone.now(), slot_taken=None,
                                           attempts=9, history=[error], payload={"basket": ["one", "two"]})
"""

HISTORY = """
from datetime import timedelta
from django.utils import timezone
customer, now = Customer.objects.create(name="Grace Hopper", phone="+44 20 7946 0001"), timezone.now()
for number in range(58):  # on each of 29 days: one that was paid in time, and one that fired, each second time
    order, at = Order.objects.place(customer, "Kettle", 7900), now - timedelta(days=number // 2, minutes=10)
    is_fired = number % 4 == 3
    due_at = at - timedelta(seconds=2) if is_fired else at + timedelta(minutes=8)
    Timeout.objects.filter(object_id=order.pk, policy="shop.order.cancel_unpaid").update(
        state="fired" if is_fired else "cancelled", cause="due" if is_fired else "condition", settled_at=at,
        slot_taken=None, due_at=due_at, run_at=due_at, first_due_at=due_at, created_at=at - timedelta(minutes=22),
        since_at=at - timedelta(minutes=22),
    )
"""


@dataclass
class Stock:
    """Orders with a pending timeout each, and orders whose timeout is dead."""

    pending: list[tuple[int, int, str]]
    dead: list[tuple[int, int, str]]


class Admin:
    """A browser in the shop's admin, and what a person does there."""

    def __init__(self, browser: Chrome, shop: Shop, axe: str) -> None:
        self.browser, self.shop, self._axe = browser, shop, axe
        self._seen_on, self._seen = "", 0

    def show_on(self, width: int, *, dark: bool = False) -> None:
        """Open pages from now on with this width, in light or dark mode."""
        screen = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        self._seen_on = f"{width}-{'dark' if dark else 'light'}"

    def open(self, path: str) -> None:
        self.browser.get(f"{self.shop.url}{path}")

    def log_in(self) -> None:
        self.open("/admin/login/?next=/admin/")
        self.type("username", "boss")
        self.type("password", "secret")
        self.press("Log in")
        self.wait_for("Site administration")

    def type(self, name: str, words: str) -> None:
        field = self.browser.find_element(By.NAME, name)
        field.clear()
        field.send_keys(words)

    def unfold(self) -> None:
        """Open all that can be opened."""
        self.browser.execute_script("for (const each of document.querySelectorAll('details')) each.open = true")

    def choose(self, name: str, value: str) -> None:
        Select(self.browser.find_element(By.NAME, name)).select_by_value(value)

    def press(self, words: str) -> None:
        """Press the button or follow the link with this label, and wait for the next page."""
        said = f"normalize-space()='{words}' or @value='{words}'"
        kinds = "self::button or self::a or self::input[@type='submit']"
        (found, *_) = self.browser.find_elements(By.XPATH, f"//*[{kinds}][{said}]")
        before = self.browser.find_element(By.TAG_NAME, "html")
        found.click()
        WebDriverWait(self.browser, PATIENCE_SECONDS).until(lambda _: _is_gone(before))

    def tick(self, *timeouts: int) -> None:
        for pk in timeouts:
            self.browser.find_element(By.CSS_SELECTOR, f"input[name=_selected_action][value='{pk}']").click()

    def wait_for(self, *words: str, is_said: bool = True) -> None:
        """Wait until the page shows all the words, or none of them."""

        def is_there(driver: Chrome) -> bool:
            text = str(driver.execute_script("return document.body ? document.body.innerText : ''"))
            return all((each in text) is is_said for each in words)

        verb = "does not show" if is_said else "still shows"
        WebDriverWait(self.browser, PATIENCE_SECONDS).until(is_there, f"the page {verb} {words!r}")

    def message(self) -> str:
        """Return the message at the top of the page."""
        (found, *_) = self.browser.find_elements(By.CSS_SELECTOR, ".messagelist li")
        return found.text

    def state_shown(self) -> str:
        return self.browser.find_element(By.CSS_SELECTOR, ".field-state_badge .delayq-badge").text

    def inspect(self, path: str, *left_out: str) -> list[str]:
        """Open a page and return its `faults`."""
        self.open(path)
        return self.faults(*left_out)

    def faults(self, *left_out: str) -> list[str]:
        """Return the serious and critical faults that axe-core finds, except in `left_out` and Django's search box.

        Also report whether the page is wider than the screen, so that readers would have to scroll sideways.
        """
        loaded = "return document.readyState === 'complete'"
        WebDriverWait(self.browser, PATIENCE_SECONDS).until(lambda driver: driver.execute_script(loaded))
        self._photograph()
        script = """const done = arguments[1], options = {resultTypes: ["violations"]};
            axe.run({exclude: arguments[0]}, options).then(done, (e) => done({error: String(e)}))
        """
        self.browser.execute_script(self._axe)
        found: dict[str, Any] = self.browser.execute_async_script(
            script, [[selector] for selector in ("#searchbar", *left_out)]
        )
        assert "error" not in found, found
        assert found["passes"], "axe-core has checked nothing"
        page = "document.documentElement"
        excess = self.browser.execute_script(f"return {page}.scrollWidth - {page}.clientWidth")
        return [f"wider than the screen by {excess} px"] * (excess > 0) + [
            f"{fault['impact']}: {fault['id']}: {node['html'][:200]}"
            for fault in found["violations"]
            if fault["impact"] in {"serious", "critical"}
            for node in fault["nodes"]
        ]

    def _photograph(self) -> None:
        """Save a screenshot of the page, if a folder is set."""
        if not PICTURES:
            return
        name = re.sub(r"\W+", "-", self.browser.current_url.partition(self.shop.url)[2]).strip("-") or "index"
        self._seen += 1
        self.save_picture(Path(PICTURES) / f"{self._seen:03}-{name}-{self._seen_on}.png", 4000)

    def save_picture(self, path: Path, max_height: int) -> None:
        height = self.browser.execute_script("return document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": self.browser.execute_script("return innerWidth"), "scale": 1}
        options = {"captureBeyondViewport": True, "clip": {**clip, "height": min(height, max_height)}}
        taken = self.browser.execute_cdp_cmd("Page.captureScreenshot", options)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(taken["data"]))


def _is_gone(element: Any) -> bool:
    from selenium.common.exceptions import WebDriverException

    try:
        element.is_enabled()
    except WebDriverException:
        return True
    return False


@contextlib.contextmanager
def served_as(shop: Shop, directory: Path, **looks: str) -> Iterator[str]:
    """Yield the address of another server for the same shop, with the settings in `looks`."""
    environment = {**shop.environment, "DJANGO_SETTINGS_MODULE": "tests.e2e.admin.looks", **looks}
    served = Shop(directory, environment.pop("DATABASE_URL"), **environment)
    try:
        served.start_server()
        yield served.url
    finally:
        served.stop()


@pytest.fixture(scope="module")
def stock(calm_shop: Shop) -> Stock:
    rows = [(order, timeout, reference) for order, timeout, reference in calm_shop.ask("stock", STOCK)]
    return Stock(pending=rows[:15], dead=rows[15:])


@pytest.fixture(scope="module")
def history(calm_shop: Shop) -> None:
    """Settle timeouts of the last 29 days."""
    calm_shop.ask("None", HISTORY)


@pytest.fixture(scope="module")
def chrome(chromium: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location, driver = chromium
    flags = "headless no-sandbox disable-gpu no-first-run disable-background-networking disable-component-update "
    flags += f"disable-sync window-size=1300,1000 user-data-dir={tmp_path_factory.mktemp('chromium')}"
    for flag in flags.split():
        options.add_argument(f"--{flag}")
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    started.set_script_timeout(PATIENCE_SECONDS * 2)
    yield started
    started.quit()


@pytest.fixture(scope="session")
def axe() -> str:
    """Return the script of axe-core."""
    pytest.importorskip("selenium_axe_python")
    script = importlib.resources.files("selenium_axe_python") / "axe-core" / "axe.min.js"
    return script.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def _logged_in(chrome: Chrome, calm_shop: Shop, stock: Stock, axe: str) -> Admin:
    admin = Admin(chrome, calm_shop, axe)
    admin.log_in()
    return admin


@pytest.fixture
def admin(_logged_in: Admin) -> Admin:
    """Yield the admin on its first page, with the data of earlier tests."""
    _logged_in.show_on(DESKTOP)
    _logged_in.open("/admin/")
    return _logged_in
