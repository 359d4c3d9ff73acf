"""The pictures of README and docs, taken by `make screenshots`: the admin and a page of the example shop."""

from __future__ import annotations

from pathlib import Path

import pytest
from selenium.webdriver import Chrome

from tests.e2e.admin.conftest import DESKTOP, PHONE, Admin
from tests.shop.conftest import Shop

IMAGES = Path(__file__).resolve().parents[3] / "docs" / "images"
LIST, POLICIES = (f"/admin/django_delayq/{name}/" for name in ("timeout", "policycontrol"))
MAX_HEIGHT = {DESKTOP: 900, PHONE: 844}
STORY = """
from datetime import timedelta
from django.contrib.auth.models import User
from django_delayq import cancel_timeout, clock, operations
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
    state="dead", cause="retries", attempts=10, settled_at=now, slot_taken=None, due_at=now - timedelta(minutes=40)
)
order = Order.objects.place(cleo, "Kettle", 7900)
operations.postpone(order.timeouts.all(), hours=2, by="admin:boss", reason="the customer called")
operations.pause("shop.delivery.remind_late_delivery", by="admin:boss", reason="the provider is down")
"""
MOVED = "Order.objects.latest('pk').timeouts.get().pk"


@pytest.mark.timeout(300)
def test_the_pictures_are_taken(shop: Shop, chrome: Chrome) -> None:
    timeout = shop.ask(MOVED, STORY)
    shop.start_server()
    admin = Admin(chrome, shop, axe="")
    admin.log_in()
    chrome.execute_script("localStorage.setItem('django.admin.navSidebarIsOpen', 'false')")
    for name, path, width, dark in (
        ("admin-timeouts", LIST, DESKTOP, False),
        ("admin-timeouts-dark", LIST, DESKTOP, True),
        ("admin-timeouts-phone", LIST, PHONE, False),
        ("admin-timeout", f"{LIST}{timeout}/change/", DESKTOP, False),
        ("admin-timeout-phone", f"{LIST}{timeout}/change/", PHONE, True),
        ("admin-policies", POLICIES, DESKTOP, False),
    ):
        admin.show_on(width, dark=dark)
        admin.open(path)
        admin.wait_for("in ")  # countdowns are filled in by a script
        admin.save_picture(IMAGES / f"{name}.png", MAX_HEIGHT[width])
