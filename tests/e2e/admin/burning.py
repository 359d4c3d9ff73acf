"""What may be wrong with an installation, made to happen by real processes; and what the first page then shows."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from tests.shop.conftest import Shop
from tools.servers import RedisServer

BRAKED = "shop.order.cancel_unaccepted"
ORDERED = """
from datetime import timedelta
from django.contrib.auth.models import User
from django_delayq import clock, operations
from tests.e2e.admin.provider import DOWN
from tests.support.waiting import wait_until

def ordered(hours=0, is_paid=False):
    with clock.set_to(clock.now() - timedelta(hours=hours)):
        order = Order.objects.place(Customer.objects.create(name="Ada", phone=""), "Moka pot", 3490)
    if is_paid:
        order.pay()
    return order
"""


class Burning:
    """A shop with a Redis of its own and one worker process."""

    def __init__(self, shop: Shop, redis: RedisServer) -> None:
        self.shop, self.redis = shop, redis
        shop.environment |= {"REDIS_URL": redis.url, "DJANGO_SETTINGS_MODULE": "tests.e2e.admin.provider"}
        shop.wait_at_most(cancel_unaccepted=0, notify_trial_expiry=0)
        self.do(f"operations.brake({BRAKED!r}, most=1, per=timedelta(minutes=10), by='cli:ann')")
        self.work()

    def do(self, statements: str) -> None:
        self.shop.ask("1", ORDERED + statements)

    def work(self) -> None:
        self.worker = self.shop.start("delayq_worker", "--processes", "1")

    def signal(self, number: int) -> None:
        os.killpg(self.worker.pid, number)


NO_WORKER = "No worker is running: nothing fires."
ADA = "Customer.objects.create(name='Ada', phone=DOWN)"
FAILING = f"TrialMembership.objects.create(customer={ADA}, started_at=clock.now())"
TOO_MANY = f"""
for number in range(3):
    ordered(is_paid=True)
    wait_until(lambda: number == 2 or Timeout.objects.filter(policy={BRAKED!r}, state="fired").count() > number)
"""
STATES: tuple[tuple[Callable[[Burning], object], *tuple[str, ...]], ...] = (
    (lambda now: now.signal(signal.SIGKILL), NO_WORKER),
    (lambda now: (now.work(), now.do(FAILING)), "has failing timeouts"),
    (lambda now: now.do(TOO_MANY), f"The brake of {BRAKED} has paused it."),
    (lambda now: now.do("ordered(hours=2)"), "fires late"),
    (lambda now: now.redis.kill(), "unreachable", "Workers that do not reach Redis"),
)
"""In this order, each while the former ones last: what happens, and what the page shows then and not before."""
