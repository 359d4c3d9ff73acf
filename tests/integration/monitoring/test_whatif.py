"""What another delay would have done is what it does when the same days are lived again with it."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db.models import Q

from django_delayq import (
    InvalidDelay,
    TimeoutPolicy,
    clock,
    extend_timeout,
    hold_timeout,
    resume_timeout,
    schedule_timeout,
)
from django_delayq.models import Timeout
from django_delayq.monitoring.whatif import WhatIf, what_if
from django_delayq.testing import fire_due
from tests.support.typed import Declare
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

LABEL = "testapp.order.late_payer"
MONDAY = datetime(2026, 5, 4, 8, tzinfo=UTC)
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)


@dataclass
class Visit:
    """An order of the past: when it was placed, and after which times its status changed, to what."""

    placed_at: datetime
    changes: list[tuple[timedelta, str]]


def visits(count: int, seed: int) -> list[Visit]:
    """Orders of a week: paid early, late or never, or paid, opened again, and paid."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        minutes = [round(draw.expovariate(1 / 25), 1) + 0.05 for _ in range(3)]
        first = timedelta(minutes=minutes[0])
        kind = draw.random()
        changes = [] if kind < 0.2 else [(first, "paid")]
        if kind > 0.85:
            again = first + timedelta(minutes=minutes[1])
            changes += [(again, "waiting"), (again + timedelta(minutes=minutes[2]), "paid")]
        found.append(Visit(MONDAY + timedelta(minutes=draw.uniform(0, 4 * 1440)), changes))
    return found


def live(policy: TimeoutPolicy[Any], seen: list[Visit]) -> int:
    """Live these days with the policy, minute by minute at least; return how many timeouts fired."""
    Timeout.objects.all().delete()
    Order.objects.all().delete()
    events: list[tuple[datetime, int, str]] = []
    for number, visit in enumerate(seen):
        events.append((visit.placed_at, number, "placed"))
        events += [(visit.placed_at + after, number, status) for after, status in visit.changes]
    orders: dict[int, int] = {}
    now = MONDAY
    for at, number, status in sorted(events):
        while (due_at := next_due()) is not None and due_at <= at:
            now = max(now, due_at)  # an order that is opened again may be due already
            with clock.set_to(now):
                fire_due(policy)
        now = at
        with clock.set_to(at):
            if status == "placed":
                orders[number] = Order.objects.create(status="waiting", created_at=at).pk
            elif (order := Order.objects.get(pk=orders[number])).status != "cancelled":
                order.status = status
                order.save()
    while (due_at := next_due()) is not None:
        with clock.set_to(max(now, due_at)):
            fire_due(policy)
    return int(Timeout.objects.filter(state="fired").count())


def next_due() -> datetime | None:
    return Timeout.objects.pending().order_by("run_at").values_list("run_at", flat=True).first()


def cancel(order: Order, timeout: Timeout) -> None:
    order.status = "cancelled"
    order.save()


Shop = Callable[[Any], TimeoutPolicy[Any]]


@pytest.fixture
def shop(declare: Declare) -> Shop:
    """`shop(after)`: the policy with this delay."""
    from django_delayq.policy.policies import registry

    def make(after: Any) -> TimeoutPolicy[Any]:
        if (former := registry.get(LABEL)) is not None:
            registry.remove(former)
        return declare(Order, cancel, name="late_payer", since="created_at", when=Q(status="waiting"), after=after)

    return make


def asked(policy: TimeoutPolicy[Any], after: timedelta, **options: Any) -> WhatIf:
    with clock.set_to(MONDAY + timedelta(days=20)):
        return what_if(policy, after, **options)


def test_it_equals_living_the_same_days_again_with_four_other_limits(shop: Shop) -> None:
    seen = visits(120, seed=8)
    fired = live(shop(30 * MINUTE), seen)
    policy = shop(30 * MINUTE)
    same = asked(policy, 30 * MINUTE)
    assert (same.ended_first, same.would_fire, same.would_fire_at_most, same.fired) == (0, fired, fired, fired)
    answers = {minutes: asked(policy, minutes * MINUTE) for minutes in (5, 20, 45, 120)}
    for minutes, answer in answers.items():
        again = live(shop(minutes * MINUTE), seen)
        if minutes < 30:
            assert answer.is_exact
            assert answer.would_fire == again > fired
            assert answer.ended_first > 0
        else:
            assert answer.ended_first == 0
            assert answer.would_fire <= again <= answer.would_fire_at_most
            assert not answer.is_exact
            assert again < fired


def placed(at: datetime = MONDAY, **fields: Any) -> Order:
    with clock.set_to(at):
        return Order.objects.create(status="waiting", created_at=at, **fields)


def pay(order: Order, after: timedelta) -> None:
    """Pay an order so long after it was placed."""
    assert order.created_at is not None
    with clock.set_to(order.created_at + after):
        order.status = "paid"
        order.save()


def test_a_deadline_that_was_set_by_hand_stays(shop: Shop) -> None:
    policy, extended, plain = shop(30 * MINUTE), placed(), placed()
    with clock.set_to(MONDAY):
        extend_timeout(extended, policy, minutes=30)
    for order in (extended, plain):
        pay(order, 20 * MINUTE)
    answer = asked(policy, 10 * MINUTE)
    assert (answer.rounds, answer.in_time, answer.ended_first, answer.hand_set) == (2, 2, 1, 1)


def test_a_clock_that_was_stopped_moves_the_other_deadline_as_much(shop: Shop) -> None:
    policy, order = shop(30 * MINUTE), placed()
    with clock.set_to(MONDAY):
        hold_timeout(order, policy)
    with clock.set_to(MONDAY + 2 * HOUR):
        resume_timeout(order, policy)
    pay(order, 2 * HOUR + 15 * MINUTE)
    assert [asked(policy, minutes * MINUTE).ended_first for minutes in (20, 10)] == [0, 1]


def test_the_handler_acts_only_after_the_grace(declare: Declare) -> None:
    options: dict[str, Any] = {"since": "created_at", "when": Q(status="waiting"), "after": HOUR, "grace": 20 * MINUTE}
    policy = declare(Order, cancel, name="late_payer", **options)
    pay(placed(), 45 * MINUTE)
    assert [asked(policy, minutes * MINUTE).ended_first for minutes in (30, 20)] == [0, 1]


def test_without_since_it_counts_from_the_scheduling_and_without_a_delay_it_is_refused(declare: Declare) -> None:
    policy = declare(Order, name="late_payer", after=HOUR)
    with clock.set_to(MONDAY):
        schedule_timeout(Order.objects.create(status="new"), policy)
    with clock.set_to(MONDAY + HOUR):
        fire_due(policy)
    sooner, later = asked(policy, 20 * MINUTE), asked(policy, 90 * MINUTE)
    assert (sooner.would_fire, later.would_fire, later.would_fire_at_most) == (1, 0, 1)
    with pytest.raises(InvalidDelay, match="no delay that could be changed"):
        what_if(declare(Order, name="by_hand"), HOUR)


def run(*args: str) -> str:
    out = io.StringIO()
    with clock.set_to(MONDAY + timedelta(days=20)):
        call_command(*args, stdout=out)
    return out.getvalue()


def test_the_commands_print_it(shop: Shop) -> None:
    policy, order = shop(30 * MINUTE), placed()
    placed()
    pay(order, 20 * MINUTE)
    with clock.set_to(MONDAY + 30 * MINUTE):
        fire_due(policy)
    command = ("delayq_whatif", LABEL, "--after")
    text, first = run(*command, "10m"), "of those in time would have fired first: 1."
    assert text.splitlines()[0] == f"{LABEL}: 10 min instead of 30 min"
    assert first in text and "Would have fired in total: 2." in text
    assert "Would have fired in total: 0 to 1." in run(*command, "45m")
    assert json.loads(run(*command, "10m", "--json"))["ended_first"] == 1
    assert first in run("delayq_replan", LABEL, "--after", "10m", "--mode", "keep", "--dry-run")
    for wrong, words in ((("10m", "--where", "nothing=1"), "no column"), (("soon",), "is not a duration")):
        with pytest.raises(CommandError, match=words):
            run(*command, *wrong)
