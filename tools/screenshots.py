"""Take the screenshots of README and docs: the example shop's admin in headless Chromium.

    .venv/bin/python tools/screenshots.py

Needs Chromium and chromedriver (`DELAYQ_TEST_CHROMIUM`, `DELAYQ_TEST_CHROMEDRIVER`, or both on the PATH).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.by import By

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools import processes  # noqa: E402
from tools.servers import free_port  # noqa: E402

IMAGES = ROOT / "docs" / "images"
PAGES = {
    "admin-timeouts": ("django_delayq/timeout/", 900),
    "admin-policies": ("django_delayq/policycontrol/", 900),
}
WIDTH = 1280
SHOP = """
from datetime import timedelta
from django.contrib.auth.models import User
from django_delayq import cancel_timeout, clock
from django_delayq.models import Timeout
from django_delayq.testing import fire_due
from shop.models import Customer, Order

User.objects.create_superuser("admin", "", "demo")
ada, ben, cleo = (Customer.objects.create(name=name, phone="+44 20 7946 0000") for name in ("Ada", "Ben", "Cleo"))
now = clock.now()
placed = {
    95: (ada, True, True), 80: (ben, False, False), 70: (cleo, True, False), 39: (cleo, False, False),
    35: (ada, True, True), 31: (ben, False, False), 12: (cleo, False, False), 9: (ada, True, True),
    6: (ben, True, False), 3: (cleo, True, True), 2: (ben, True, False), 1: (ada, False, False),
}
for minute in range(100, -1, -1):
    with clock.set_to(now - timedelta(minutes=minute)):
        fire_due()
    if minute in placed:
        customer, paid, accepted = placed[minute]
        with clock.set_to(now - timedelta(minutes=minute, milliseconds=minute % 7 + 2)):
            order = Order.objects.place(customer, "Moka pot", 3490)
            if paid:
                order.pay()
            if accepted:
                order.accept("Roastery", clock.now() + timedelta(minutes=40))
cancel_timeout(order, "cancel_unpaid", reason="paid by invoice")
order = Order.objects.place(ben, "Hand grinder", 5900)
order.pay()
dead = order.timeouts.get(policy="shop.order.cancel_unaccepted").pk
Timeout.objects.filter(pk=dead).update(
    state="dead", cause="retries", attempts=10, settled_at=now, slot_taken=None, due_at=now - timedelta(minutes=40)
)
"""


def main() -> int:
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'example_project'}"}
        environment |= {"DJANGO_SETTINGS_MODULE": "config.settings", "DATABASE_URL": f"sqlite:///{home}/shop.sqlite3"}
        manage = [sys.executable, str(ROOT / "example_project" / "manage.py")]
        for arguments in (["migrate", "-v0"], ["shell", "--no-imports", "-c", SHOP]):
            subprocess.run([*manage, *arguments], env=environment, check=True)
        port = free_port()
        quiet = subprocess.DEVNULL
        server = processes.start(
            [*manage, "runserver", "--noreload", str(port)], env=environment, stdout=quiet, stderr=quiet
        )
        try:
            photograph(f"http://127.0.0.1:{port}/admin/", home)
        finally:
            processes.stop(server, first=signal.SIGTERM)
    return 0


def photograph(admin: str, home: str) -> None:
    """Log in to the admin and write one picture for each of `PAGES`."""
    options = webdriver.ChromeOptions()
    options.binary_location = os.environ.get("DELAYQ_TEST_CHROMIUM") or shutil.which("chromium") or ""
    for flag in ("headless", "no-sandbox", "disable-gpu", "hide-scrollbars", f"user-data-dir={home}/chromium"):
        options.add_argument(f"--{flag}")
    driver = os.environ.get("DELAYQ_TEST_CHROMEDRIVER") or shutil.which("chromedriver")
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        time.sleep(3)  # the development server starts
        browser.get(f"{admin}login/?next=/admin/")
        browser.find_element(By.NAME, "username").send_keys("admin")
        browser.find_element(By.NAME, "password").send_keys("demo")
        browser.find_element(By.CSS_SELECTOR, "[type=submit]").click()
        browser.execute_script("localStorage.setItem('django.admin.navSidebarIsOpen', 'false')")
        IMAGES.mkdir(exist_ok=True)
        for name, (path, height) in PAGES.items():
            browser.set_window_size(WIDTH, height)
            browser.get(admin + path)
            time.sleep(1)  # countdowns are filled in by script
            browser.save_screenshot(str(IMAGES / f"{name}.png"))
    finally:
        browser.quit()


if __name__ == "__main__":
    sys.exit(processes.supervised(main))
