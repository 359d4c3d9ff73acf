"""How old a deadline may be that is armed by saving, by the sync, and by the handler of the policy."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq import TimeoutPolicy, clock, testing
from django_delayq.arming.sync import TableSync, count_too_old, sync_policy
from django_delayq.models import PolicySync, Timeout
from tests.integration.arming.conftest import SINCE
from tests.support.seen import sql_of
from tests.testapp.models import Order

Declare = Callable[..., TimeoutPolicy[Any]]
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("controls_are_read_again")]
MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)
KINDS: dict[str, dict[str, Any]] = {"columns": {}, "functions": {"since": SINCE["function"]}}


@pytest.fixture(params=KINDS)
def policy(request: pytest.FixtureRequest, declare: Declare) -> TimeoutPolicy[Order]:
    """A policy that the database evaluates, or one with a function."""
    options: dict[str, Any] = {"since": "created_at", "after": 30 * MINUTE, "when": Q(status="pays")}
    return declare(Order, name="pays", **options | KINDS[request.param])


def cancel(order: Order, timeout: Timeout) -> None:
    order.status = "cancelled"
    order.save()


def sync_of_workers(label: str) -> None:
    """Let the worker begin and complete a pass, as one that runs all the time."""
    now = clock.now()
    PolicySync.objects.filter(policy=label).update(
        before_at=now - MINUTE, began_at=now - MINUTE, finished_at=now - MINUTE, claimed_until=None
    )
    TableSync("default").run(at_once=True)


def pending(policy: TimeoutPolicy[Any], order: Order) -> Timeout | None:
    row: Timeout | None = order.timeouts.filter(policy=policy.label, state="pending").first()
    return row


@pytest.mark.parametrize(("days", "armed"), [(6, True), (8, False)])
def test_it_is_armed_up_to_catch_up_and_then_counted_as_too_old(
    policy: TimeoutPolicy[Any], days: int, armed: bool
) -> None:
    begin = timezone.now() - days * DAY - 30 * MINUTE
    with clock.set_to(begin):
        order = Order.objects.create(status="pays", created_at=begin)
        Order.objects.filter(pk=order.pk).update(status="paying")
        sync_policy(policy, "default")
    Order.objects.filter(pk=order.pk).update(status="pays")
    assert count_too_old(policy, "default").value == (0 if armed else 1)
    assert ("too long ago" in str(dq.explain_timeout(order, policy))) is not armed
    assert sync_policy(policy, "default").armed == armed
    assert (pending(policy, order) is not None) is armed


def test_a_forgotten_order_of_the_same_age_is_not_armed(policy: TimeoutPolicy[Any]) -> None:
    Order.objects.bulk_create([Order(status="pays", created_at=timezone.now() - 40 * MINUTE)])
    order = Order.objects.get()
    sync_of_workers(policy.label)
    assert sync_policy(policy, "default").armed == 0
    assert pending(policy, order) is None
    assert count_too_old(policy, "default").value == 1
    assert "workers" in str(dq.explain_timeout(order, policy))
    assert dq.sync_timeouts(order) == 1, "as saving it"


CHAINS: dict[str, dict[str, Any]] = {"atomic": {}, "not_atomic": {"atomic": False}, "batch": {"batch": 10}, "async": {}}


@pytest.mark.parametrize("kind", CHAINS)
def test_a_chain_that_its_own_handler_advances_survives_a_pause(declare: Declare, kind: str) -> None:
    """Each firing sets the `since` of the next one, whose deadline passed more than CATCH_UP ago, too."""
    fired: list[datetime] = []

    def bill(order: Any, timeout: Timeout) -> None:
        fired.append(timeout.due_at)
        order.created_at += DAY
        order.save()

    async def bill_later(order: Any, timeout: Timeout) -> None:
        fired.append(timeout.due_at)
        order.created_at += DAY
        await order.asave()

    def bill_all(orders: Any, timeouts: list[Timeout]) -> None:
        fired.extend(timeout.due_at for timeout in timeouts)
        for order in list(orders):
            orders.filter(pk=order.pk).update(created_at=order.created_at + DAY)

    handler: Any = {"batch": bill_all, "async": bill_later}.get(kind, bill)
    options = {"since": "created_at", "after": 30 * MINUTE, "when": Q(status="billed")}
    policy = declare(Order, handler, name="bills", **options, **CHAINS[kind])
    begin = timezone.now() - 9 * DAY
    with clock.set_to(begin):
        for _ in range(2):
            Order.objects.create(status="billed", created_at=begin)
    for _ in range(12):
        testing.fire_due(policy)
    assert len(fired) == 18, "nine days of two orders"
    assert Timeout.objects.pending().filter(policy=policy.label, due_at__gt=timezone.now()).count() == 2


@pytest.mark.dialect
def test_rounds_that_were_moved_are_found_by_the_index_of_their_policy(declare: Declare) -> None:
    """Not by reading all rows that the policy ever had, of which most are settled and old."""
    policy = declare(Order, name="pays", since="created_at", after=30 * MINUTE, when=Q(status="pays"))
    old = timezone.now() - 20 * DAY
    orders = [Order(status="paid", created_at=old) for _ in range(3000)]
    Order.objects.bulk_create(orders)
    with clock.set_to(old):
        dq.schedule_timeouts(Order.objects.all(), policy)
        Timeout.objects.filter(policy=policy.label).update(
            state="cancelled", cause="condition", slot_taken=None, settled_at=old
        )
    with connection.cursor() as cursor:
        cursor.execute(f"ANALYZE TABLE {Timeout._meta.db_table}" if connection.vendor == "mysql" else "ANALYZE")
    sent = sql_of(lambda: sync_policy(policy, "default"))
    (search,) = (sql for sql in sent if "since_at" in sql and "run_at" in sql)
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN {'QUERY PLAN ' * (connection.vendor == 'sqlite')}{search}")
        plan = "\n".join(" ".join(map(str, row)) for row in cursor.fetchall())
    assert "delayq_policy" in plan, plan
