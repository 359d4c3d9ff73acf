"""One race: orders that are paid around their deadlines while workers fire, and what must be true afterwards."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.db import DEFAULT_DB_ALIAS

from django_delayq import sync_timeouts
from django_delayq.models import Timeout
from django_delayq.policy.policies import TimeoutPolicy
from django_delayq.sql.now import database_now
from tests.e2e.races.actor import Actor, all_answer
from tests.support.waiting import wait_until
from tests.testapp.models import Effect, Order
from tests.testapp.timeouts import cancel_unpaid

LEAD = timedelta(seconds=1.2)
"""Until the first deadline: time to arm all orders, and for the payers to warm up."""
LONGEST_LEAD = timedelta(seconds=30)
JITTER = 0.020
"""Seconds around its deadline within which an order is paid."""

# Status of the order, state of its timeout, number of effects, the payer's own answer.
IN_TIME = {("paid", "cancelled", 0, True), ("paid", "skipped", 0, True)}
TOO_LATE = {("cancelled", "fired", 1, False)}


@dataclass(frozen=True)
class Goods:
    """What is paid in a race, and how to see afterwards how each of them ended."""

    model: Any
    policy: TimeoutPolicy[Any]
    status: Callable[[Collection[int]], dict[int, str]]
    fill: Callable[[Collection[int]], object] = len
    """Create what belongs to new ones, without scheduling anything."""


def _status_of_orders(pks: Collection[int]) -> dict[int, str]:
    return dict(Order.objects.filter(pk__in=pks).values_list("pk", "status"))


ORDERS = Goods(Order, cancel_unpaid, _status_of_orders)


class Pace(NamedTuple):
    """How many are paid, how many in each second, and by how many seconds after their deadlines."""

    orders: int
    per_second: float
    shift: float


def race(way: str, payers: Sequence[Actor], pace: Pace, *, seed: str, goods: Goods = ORDERS) -> float:
    """Pay orders around their deadlines, give or take the jitter. Return which share was paid.

    Raises AssertionError unless each of them was either paid or cancelled and both sides know which.
    """
    dice = random.Random(seed)
    offsets = sorted(timedelta(seconds=dice.uniform(0, pace.orders / pace.per_second)) for _ in range(pace.orders))
    orders, deadlines = _arm(offsets, goods)
    times = (deadline.timestamp() + pace.shift + dice.uniform(-JITTER, JITTER) for deadline in deadlines)
    plan = list(zip(orders, times, strict=True))
    for number, payer in enumerate(payers):
        payer.tell("pay", way=way, share=sorted(plan[number :: len(payers)], key=lambda item: item[1]))
    answers = [answer for answers in all_answer(payers) for answer in answers]
    unsettled = Timeout.objects.unsettled()
    wait_until(lambda: not unsettled.exists(), "all timeouts are settled")
    return judge(orders, dict(answers), goods)


def _arm(offsets: Sequence[timedelta], goods: Goods) -> tuple[list[int], list[datetime]]:
    """Create unpaid orders, and return their keys and deadlines, the first of which is in the future.

    If the machine was too busy to arm them in time, repeat it with twice the lead; late orders are cancelled by the
    workers and do not count.
    """
    lead = LEAD
    while lead < LONGEST_LEAD:
        begin = database_now(DEFAULT_DB_ALIAS) + lead
        deadlines = [begin + offset for offset in offsets]
        orders = _place(deadlines, goods)
        if database_now(DEFAULT_DB_ALIAS) < deadlines[0]:
            return orders, deadlines
        lead *= 2
    raise AssertionError(f"{len(offsets)} orders cannot be armed within {LONGEST_LEAD}")


def _place(deadlines: Sequence[datetime], goods: Goods) -> list[int]:
    model, after = goods.model, goods.policy.after
    assert isinstance(after, timedelta)
    before = model.objects.order_by("-pk").values_list("pk", flat=True).first() or 0
    model._base_manager.bulk_create([model(created_at=deadline - after) for deadline in deadlines])
    orders = model.objects.filter(pk__gt=before).order_by("pk")
    goods.fill(orders.values_list("pk", flat=True))
    sync_timeouts(orders)  # returns less than all where the regular sync of a worker has armed some just before
    pks = list(orders.values_list("pk", flat=True))
    assert len(_rows_of(pks, goods)) == len(deadlines)
    return pks


def judge(orders: Collection[int], answers: Mapping[int, bool], goods: Goods) -> float:
    """Return which part was paid. Raises AssertionError for each that was both paid and cancelled, or neither."""
    rows = _rows_of(orders, goods)
    effects = Counter(
        Effect.objects.filter(object_id__in=[str(pk) for pk in orders]).values_list("timeout_id", flat=True)
    )
    status = goods.status(orders)
    ends = {pk: (status[pk], rows[pk].state, effects[rows[pk].pk], answers.get(pk)) for pk in orders}
    wrong = {pk: end for pk, end in ends.items() if end not in IN_TIME | TOO_LATE}
    assert not wrong, f"{len(wrong)} of {len(ends)} ended as none may: {wrong}"
    fired = {row.pk: row for row in rows.values() if row.state == Timeout.State.FIRED}
    assert effects == Counter(fired.keys()), "effects and fired rows are the same"
    early = [row for row in fired.values() if row.settled_at is None or row.settled_at < row.due_at]
    assert not early, f"fired before its deadline: {early}"
    return 1 - len(fired) / len(ends)


def _rows_of(orders: Collection[int], goods: Goods) -> dict[int, Timeout]:
    """Return the only timeout of each order."""
    rows = list(Timeout.objects.filter(object_id__in=[str(pk) for pk in orders], policy=goods.policy.label))
    by_order = {int(row.object_id): row for row in rows}
    times = Counter(int(row.object_id) for row in rows)
    wrong = {pk: [vars(row) for row in rows if row.object_id == str(pk)] for pk in orders if times[pk] != 1}
    assert not wrong, f"{len(wrong)} of {len(orders)} orders have not had one timeout: {list(wrong.items())[:3]}"
    return by_order
