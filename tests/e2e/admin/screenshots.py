"""The pictures of README and docs, taken by `make screenshots`: the admin of the example shop, and its terminal."""

from __future__ import annotations

import html
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from contextlib import suppress

import pytest
from selenium.webdriver import Chrome

from tests.e2e.admin.burning import NO_WORKER, STATES, Burning
from tests.e2e.admin.conftest import DESKTOP, FIRST_PAGE, LIST, PHONE, Admin, served_as
from tests.shop.conftest import ROOT, Shop
from tools import processes
from tools.servers import RedisServer

IMAGES = ROOT / "docs" / "images"
MAX_HEIGHT = {DESKTOP: 900, PHONE: 844}
STORY = """
from datetime import timedelta
from django.contrib.auth.models import User
from django_delayq import cancel_timeout, clock, operations
from django_delayq.models import WorkerSeen
from django_delayq.testing import fire_due

User.objects.create_superuser("boss", "", "secret")
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
    state="dead", cause="retries", attempts=10, settled_at=clock.now(), slot_taken=None,
    due_at=now - timedelta(minutes=40),
)
order = Order.objects.place(cleo, "Kettle", 7900)
operations.postpone(order.timeouts.all(), hours=2, by="admin:boss", reason="the customer called")
operations.pause("shop.delivery.remind_late_delivery", by="admin:boss", reason="the provider is down")
WorkerSeen.objects.create(  # otherwise each page would say that no worker is running
    id="pictures", host="shop1", pid=7, concurrency=4, version="1", uses_redis=True, started_at=now,
    seen_at=now + timedelta(hours=1), passed_at=now,
)
"""
MOVED = "Order.objects.latest('pk').timeouts.get().pk"
ORDER = "Order.objects.latest('pk').pk"
SOON = """
from datetime import timedelta
from django_delayq import clock
from django_delayq.models import WorkerSeen
from tests.e2e.admin.provider import BUSY, NONE, UNKNOWN

def before(seconds, **length):
    return clock.set_to(now - timedelta(**length) + timedelta(seconds=seconds))

WorkerSeen.objects.all().delete()
now = clock.now()
customer = Customer.objects.create(name="Dora", phone="+44 20 7946 0001")
for seconds in (12, 21, 60):
    with before(seconds, minutes=30):
        Order.objects.place(customer, "Moka pot", 3490)
with before(33, minutes=5):
    Order.objects.place(customer, "Kettle", 7900).pay()
for seconds, phone in ((27, BUSY), (41, NONE), (52, UNKNOWN)):
    with before(seconds, days=3):
        eve = Customer.objects.create(name="Eve", phone=phone)
        TrialMembership.objects.create(customer=eve, started_at=clock.now())
"""
COLUMNS, LINES = 118, 40
TERMINAL = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Terminal</title><style>
body {{ margin: 0; background: #1c2128; }}
pre {{ margin: 0; padding: 16px 20px; width: {columns}ch; font: 14px/1.5 "DejaVu Sans Mono", monospace; color: #d5dae1;
  white-space: pre-wrap; overflow-wrap: anywhere; }}
.c31 {{ color: #ff7b72; }} .c32 {{ color: #7ee787; }} .c33 {{ color: #f2cc60; }}
</style><pre>{text}</pre></html>"""
CLOSED = "localStorage.setItem('django.admin.navSidebarIsOpen', 'false')"
SIZE = (
    "const box = document.querySelector('pre').getBoundingClientRect(); return [box.width, box.height].map(Math.ceil)"
)


@pytest.fixture
def chinese_font() -> None:
    fonts = subprocess.run(["fc-list", ":lang=zh"], capture_output=True, check=True).stdout
    assert fonts, "Install a Chinese font, such as fonts-noto-cjk: the Chinese page would show boxes."


@pytest.mark.usefixtures("chinese_font")
def test_the_pictures_are_taken(shop: Shop, chrome: Chrome, tmp_path_factory: pytest.TempPathFactory) -> None:
    timeout, order = shop.ask(f"[{MOVED}, {ORDER}]", STORY)
    shop.start_server()
    admin = Admin(chrome, shop, axe="")
    admin.log_in()
    chrome.execute_script(CLOSED)
    for name, path, width, dark in (
        ("admin-timeouts", LIST, DESKTOP, False),
        ("admin-timeouts-dark", LIST, DESKTOP, True),
        ("admin-timeouts-phone", LIST, PHONE, False),
        ("admin-timeout", f"{LIST}{timeout}/change/", DESKTOP, False),
        ("admin-timeout-dark", f"{LIST}{timeout}/change/", DESKTOP, True),
        ("admin-timeout-phone", f"{LIST}{timeout}/change/", PHONE, True),
    ):
        admin.show_on(width, dark=dark)
        admin.open(path)
        admin.wait_for("in ")  # countdowns are filled in by a script
        admin.save_picture(IMAGES / f"{name}.png", MAX_HEIGHT[width])
    admin.show_on(DESKTOP)
    with served_as(shop, tmp_path_factory.mktemp("chinese"), DELAYQ_TEST_LANGUAGE="zh-hans") as url:
        chrome.get(f"{url}{LIST}")
        chrome.execute_script(CLOSED)  # each server is a site of its own
        chrome.get(f"{url}{LIST}")
        admin.save_picture(IMAGES / "admin-timeouts-zh.png", 800)
    take_terminal(shop, admin, order, tmp_path_factory)
    shop.stop()
    with RedisServer(tmp_path_factory.mktemp("redis") / "redis") as redis:
        take_burning(Burning(shop, redis), admin)


def take_burning(burning: Burning, admin: Admin) -> None:
    """Take the first page with some of what may be wrong, and the page of a timeout that fails."""
    burning.shop.start_server()
    admin.open(FIRST_PAGE)
    admin.browser.execute_script(CLOSED)
    for happens, *said in STATES:
        happens(burning)
        admin.wait_for(*said)
    for name, width, dark in (("", DESKTOP, False), ("-dark", DESKTOP, True), ("-phone", PHONE, False)):
        admin.show_on(width, dark=dark)
        admin.open(FIRST_PAGE)
        admin.save_picture(IMAGES / f"admin-first{name}.png", MAX_HEIGHT[width] * 3 // 2)
    burning.signal(signal.SIGKILL)
    admin.wait_for(NO_WORKER)
    admin.show_on(DESKTOP)
    failing = burning.shop.ask("Timeout.objects.failing().latest('pk').pk")
    admin.open(f"{LIST}{failing}/change/")
    admin.wait_for("in ")
    admin.save_picture(IMAGES / "admin-failing.png", 640)


def take_terminal(shop: Shop, admin: Admin, order: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    shop.ask("1", SOON)
    shop.environment["DJANGO_SETTINGS_MODULE"] = "tests.e2e.admin.provider"
    for name, arguments, end, times in (
        ("terminal-worker", ["delayq_worker"], " fired ", 5),
        ("terminal-explain", ["delayq_explain", "shop.order", str(order)], "", 0),
        ("terminal-status", ["delayq_status", "--watch"], "1 process", 2),
    ):
        if name == "terminal-status":
            shop.start_worker()
        written = on_terminal(shop, arguments, end, times)
        (page := tmp_path_factory.mktemp(name) / "page.html").write_text(as_page(shop, arguments, written))
        admin.browser.get(page.as_uri())
        width, height = admin.browser.execute_script(SIZE)
        admin.show_on(width)
        admin.save_picture(IMAGES / f"{name}.png", height)


def on_terminal(shop: Shop, arguments: list[str], end: str, times: int) -> str:
    """Return what a command of the shop writes to a terminal. After `times` times `end`, interrupt it."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (LINES, COLUMNS))
    command = [sys.executable, str(ROOT / "example_project" / "manage.py"), *arguments]
    process = processes.start(command, env=shop.environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    written = ""
    with suppress(OSError):  # the process has ended
        while read := os.read(ours, 65536).decode():
            written += read
            if end and written.count(end) >= times:
                process.send_signal(signal.SIGINT)
                end = ""
    os.close(ours)
    assert process.wait() == 0, written
    return written.replace("\r\n", "\n")


def as_page(shop: Shop, arguments: list[str], written: str) -> str:
    """Return a page that looks like the terminal, with the last frame of a command that redraws."""
    shown = re.split(r"\x1b\[\?7[lh]", written)[-2 if "--watch" in arguments else 0]
    text = html.escape(f"$ python manage.py {' '.join(arguments)}\n{shown.rstrip()}", quote=False)
    text = re.sub(r"\x1b\[(\d\d);1m", r'<b class="c\1">', text).replace("\x1b[1m", "<b>").replace("\x1b[0m", "</b>")
    text = re.sub(r"\x1b\[\w*", "", text)
    # The reader's project has other paths and names.
    text = re.sub(r"[^ '\"]+/(?=shop\.sqlite3|shop/\w+\.py|provider\.py)", "/srv/shop/", text).replace(
        shop.environment["SHOP_REDIS_PREFIX"], "shop"
    )
    return TERMINAL.format(columns=COLUMNS, text=re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:6379", text))
