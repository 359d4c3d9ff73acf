"""Some 80 invoices, to which things happen by chance, and an oracle for which step must run when."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db.models import Q

import django_delayq as dq
from django_delayq import GiveUp, Retry, Skip, Snooze, clock
from django_delayq.models import Timeout
from django_delayq.testing import fire_due
from tests.integration.firing.oracle import AFTER, HANDLER, RETRIES, SHAPES, SNOOZE, TICKS, Oracle, Shape, fate, script
from tests.support.invoices import Declare
from tests.testapp.models import Order

pytestmark = [pytest.mark.slow, pytest.mark.django_db]
INVOICES_EACH = 31
T0 = datetime(2030, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)


class Shop:
    """The invoices of one shape, and what was called for them."""

    def __init__(self, declare: Declare, shape: Shape, first: int) -> None:
        self.shape, self.log = shape, defaultdict[int, list[tuple[float, str, int]]](list)
        self.calls = defaultdict[tuple[int, str], int](int)
        options: dict[str, Any] = {"since": "created_at", "when": Q(status="open", note=shape.name)}
        options |= {"after": AFTER * HOUR, "grace": shape.grace * HOUR if shape.grace else None}
        options |= {"retry": Retry([delay * 3600 for delay in RETRIES]), "atomic": shape.atomic}
        self.policy = declare(Order, self.call, name=shape.name, **options)
        for rule in shape.rules:
            offset: Any = rule.offset * HOUR if rule.fraction is None else rule.fraction
            every = None if rule.every is None else rule.every * HOUR
            self.policy.step(offset, every=every, times=rule.times, atomic=rule.atomic, name=rule.name)(self.call)
        with clock.set_to(T0):
            self.orders = {number: self.new() for number in range(first, first + INVOICES_EACH)}
        self.numbers = {order.pk: number for number, order in self.orders.items()}
        self.oracles = {number: Oracle(number, shape) for number in self.orders}
        self.scripts = {number: script(number) for number in self.orders}

    def new(self) -> Order:
        return Order.objects.create(status="open", note=self.shape.name, created_at=T0)

    def call(self, order: Order, timeout: Timeout) -> None:
        number, step = self.numbers[order.pk], timeout.step or HANDLER
        self.calls[number, step] += 1
        self.log[number].append(((clock.now() - T0) / HOUR, step, timeout.attempts))
        what = fate(number, step, self.calls[number, step])
        if what == "fails":
            raise ValueError("the mail server is down")
        if what == "gives up":
            raise GiveUp("no address")
        if what == "skips":
            raise Skip("no address")
        if what == "snoozes":
            raise Snooze(hours=SNOOZE)

    def do(self, number: int, what: str, amount: Any, now: float) -> None:
        order = self.orders[number]
        if what in {"pay", "bounce", "resend"}:
            order.refresh_from_db()
        if what == "pay":
            order.status = "paid"
            order.save()
        elif what == "bounce" and order.status == "paid":
            order.status = "open"
            order.save()
        elif what == "resend":
            order.created_at = T0 + now * HOUR
            order.save()
        elif what == "extend":
            dq.extend_timeout(order, self.policy, hours=amount)
        elif what == "earlier" and not self.oracles[number].held_at:
            dq.reschedule_timeout(order, self.policy, hours=amount / 4)
        elif what == "hold" and not self.oracles[number].held_at:
            dq.hold_timeout(order, self.policy)
        elif what == "resume":
            dq.resume_timeout(order, self.policy)

    def tick(self, now: int) -> None:
        for number, happens in self.scripts.items():
            for what, amount in happens.get(now, ()):
                self.do(number, what, amount, now)
                self.oracles[number].do(what, amount, now)
        down = [self.orders[number].pk for number, oracle in self.oracles.items() if now < oracle.down_until]
        rows = Timeout.objects.filter(policy=self.policy.label, object_id__in=map(str, down), state="pending")
        hidden = dict(rows.values_list("pk", "run_at"))
        rows.update(state="held", remaining=timedelta(0))  # no worker sees them
        fire_due(self.policy, raises=False)
        Timeout.objects.filter(pk__in=hidden).update(state="pending", remaining=None)
        for oracle in self.oracles.values():
            oracle.tick(now)

    def check(self, number: int) -> None:
        oracle, log = self.oracles[number], self.log[number]
        about = f"invoice {number}: {self.scripts[number]}"
        assert log == oracle.log, about
        rows = Timeout.objects.filter(policy=self.policy.label, object_id=str(self.orders[number].pk)).order_by("-id")
        row = rows[0]
        assert row.is_waiting is (oracle.state == "pending"), about
        if oracle.state == "pending":
            assert (row.step or HANDLER) == oracle.first, about


@pytest.mark.parametrize("place", range(len(SHAPES)), ids=[shape.name for shape in SHAPES])
def test_the_steps_of_an_invoice_run_when_the_oracle_says(declare: Declare, place: int, caplog: Any) -> None:
    caplog.set_level("CRITICAL", "django_delayq")
    shop = Shop(declare, SHAPES[place], INVOICES_EACH * place)
    for now in TICKS:
        with clock.set_to(T0 + now * HOUR):
            shop.tick(now)
    for number in shop.orders:
        shop.check(number)
    assert sum(len(log) for log in shop.log.values()) > 3 * INVOICES_EACH
