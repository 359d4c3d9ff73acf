"""Stopping a clock against its deadline: exactly one of "held" and "fired", and both sides know which."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, connections
from django.db.models import Q

import django_delayq as dq
from django_delayq.models import Timeout
from django_delayq.sql.now import database_now
from tests.support.hours import HOUR, Declare
from tests.support.waiting import wait_until
from tests.support.workers import RunningWorker, needs_more_connections
from tests.testapp.models import Effect, Order

pytestmark = [
    pytest.mark.slow,
    pytest.mark.dialect,
    pytest.mark.django_db(transaction=True),
    needs_more_connections,
]
PAIRS, ROUNDS = 125, 2
JITTER = 0.015
"""Seconds around its deadline within which a clock is stopped."""


@pytest.fixture
def policy(declare: Declare) -> dq.TimeoutPolicy[Any]:
    def note(order: Order, timeout: Timeout) -> None:
        Effect.objects.create(what="fired", object_id=order.pk, timeout_id=timeout.pk)

    options: dict[str, Any] = {"after": HOUR, "since": "created_at", "when": Q(status="raced")}
    return declare(Order, note, name="raced", hold_when=Q(note="talks"), **options)


@pytest.fixture
def worker(policy: Any, source: str) -> Iterator[None]:
    running = RunningWorker(concurrency=2)
    yield
    running.stop()


def stop_clocks(orders: list[tuple[Order, float]], policy: Any, way: str, held: set[int]) -> None:
    """Stop the clocks at their times, and note of which this caller knows that it was in time."""
    try:
        for order, at in orders:
            time.sleep(max(0.0, at - time.time()))  # the planned instant of the race
            if way == "by condition":
                order.note = "talks"
                order.save(update_fields=["note"])
            elif dq.hold_timeout(order, policy) is not None:
                held.add(order.pk)
    finally:
        connections.close_all()


@pytest.mark.parametrize(("source", "way"), [("redis", "by hand"), ("ledger", "by condition")], indirect=["source"])
@pytest.mark.usefixtures("worker")
def test_a_clock_is_stopped_or_its_timeout_fires(policy: Any, way: str) -> None:
    dice, shift = random.Random(way), 0.0
    found: Counter[str] = Counter()
    for _ in range(ROUNDS):
        lead = timedelta(seconds=1.0)
        ahead = database_now("default").timestamp() - time.time()
        first = database_now("default") + lead
        dues = [first + timedelta(seconds=0.012 * number) for number in range(PAIRS)]
        Order.objects.bulk_create([Order(status="raced", created_at=due - HOUR) for due in dues])
        orders = list(Order.objects.order_by("-pk")[:PAIRS])[::-1]
        dq.sync_timeouts(Order.objects.filter(pk__in=[order.pk for order in orders]))
        plan = [
            (order, due.timestamp() - ahead + shift + dice.uniform(-JITTER, JITTER))
            for order, due in zip(orders, dues, strict=True)
        ]
        held: set[int] = set()
        threads = [threading.Thread(target=stop_clocks, args=(plan[part::2], policy, way, held)) for part in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rows = Timeout.objects.filter(policy=policy.label, object_id__in=[str(order.pk) for order in orders])
        wait_until(lambda rows=rows: not rows.filter(state__in=["pending", "firing"]).exists(), "all are decided")  # type: ignore[misc]
        found += judge(list(rows), held, way)
        share = rows.filter(state="held").count() / PAIRS
        shift += JITTER if share > 0.7 else -JITTER if share < 0.3 else 0.0
    assert found.total() == PAIRS * ROUNDS
    if connection.vendor != "sqlite":  # its one writer decides early which of the two is faster
        assert set(found) == {"held", "fired"}, "there was no race"


def judge(rows: list[Timeout], held: set[int], way: str) -> Counter[str]:
    """Return how many were held and fired. Raises AssertionError for each that was both or neither."""
    effects = Counter(Effect.objects.values_list("timeout_id", flat=True))
    assert len(rows) == PAIRS
    for row in rows:
        assert row.state in {"held", "fired"}
        assert effects[row.pk] == (row.state == "fired")
        if way == "by hand":
            assert (int(row.object_id) in held) == (row.state == "held")
        if row.state == "fired":
            assert row.settled_at is not None
            assert row.settled_at >= row.due_at
        else:
            assert row.remaining is not None
            assert row.attempts == 0
    return Counter(row.state for row in rows)
