"""What the handlers of a group save is armed together, before anything reads the ledger, and in their transaction."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import Q
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

import django_delayq as dq
from django_delayq.models import Timeout
from tests.integration.firing.conftest import due, fire, grouping, state
from tests.testapp.models import Order, Parcel

pytestmark = pytest.mark.django_db(transaction=True)
Declare = Callable[..., dq.TimeoutPolicy[Any]]
Handler = Callable[[Order, Timeout], object]


@pytest.fixture
def orders() -> list[Order]:
    return [Order.objects.create(status="paid") for _ in range(6)]


@pytest.fixture
def group(orders: list[Order], declare: Declare) -> Callable[[Handler], tuple[list[Timeout], Any]]:
    """Fire a group of all orders with a handler. A second policy is armed while an order is `unpaid`."""

    def go(handler: Handler) -> tuple[list[Timeout], Any]:
        policy = declare(Order, handler, name="reopen")
        rows = [due(order, policy) for order in orders]
        grouping(policy)
        return rows, fire(*rows)

    return go


def reopen(order: Order, timeout: Timeout) -> None:
    order.status, order.created_at = "unpaid", timezone.now()
    order.save()


def pending_of(orders: list[Order]) -> int:
    return sum(dq.pending_timeouts(order, "cancel_unpaid").count() for order in orders)


def test_a_group_reads_the_states_of_all_saved_objects_at_once(orders: list[Order], group: Any) -> None:
    with CaptureQueriesContext(connection) as queries:
        rows, report = group(reopen)
    assert report.fired == tuple(row.pk for row in rows)
    assert pending_of(orders) == len(orders)
    words = [query["sql"] for query in queries]
    assert sum(sql.startswith("UPDATE") and "testapp_order" in sql and "status" in sql for sql in words) == len(orders)
    assert sum("INSERT" in sql and "django_delayq_timeout" in sql for sql in words) == len(orders) + 1


def test_signals_are_sent_for_each(orders: list[Order], group: Any) -> None:
    sent: list[int] = []

    def note(sender: Any, timeout: Timeout, **_: Any) -> None:
        sent.append(int(timeout.object_id))

    def handler(order: Order, timeout: Timeout) -> None:
        if not sent:
            dq.timeout_scheduled.connect(note, weak=False)
        reopen(order, timeout)

    try:
        group(handler)
    finally:
        dq.timeout_scheduled.disconnect(note)
    assert sorted(sent) == sorted(order.pk for order in orders)


def test_a_handler_that_asks_for_its_pending_timeouts_finds_what_it_saved(orders: list[Order], group: Any) -> None:
    found: list[int] = []

    def handler(order: Order, timeout: Timeout) -> None:
        reopen(order, timeout)
        found.append(dq.pending_timeouts(order, "cancel_unpaid").count())

    group(handler)
    assert found == [1] * len(orders)


def test_a_handler_that_moves_what_its_save_has_armed_finds_it(orders: list[Order], group: Any) -> None:
    def handler(order: Order, timeout: Timeout) -> None:
        reopen(order, timeout)
        assert dq.reschedule_timeout(order, "cancel_unpaid", hours=5) is not None

    rows, report = group(handler)
    assert report.fired == tuple(row.pk for row in rows)
    later = timezone.now() + timedelta(hours=4)
    assert all(dq.pending_timeouts(order, "cancel_unpaid").get().due_at > later for order in orders)


def test_what_a_savepoint_has_undone_is_not_armed(orders: list[Order], group: Any) -> None:
    def handler(order: Order, timeout: Timeout) -> None:
        try:
            with transaction.atomic():
                reopen(order, timeout)
                raise LookupError
        except LookupError:
            pass

    rows, report = group(handler)
    assert report.fired == tuple(row.pk for row in rows)
    assert pending_of(orders) == 0


def test_an_error_of_a_policys_function_comes_out_of_the_save_of_its_own_object(
    orders: list[Order], group: Any, declare: Declare
) -> None:
    """The group is undone, and its members are fired one by one, where a save arms at once."""
    broken = orders[2].pk

    def after(order: Order) -> timedelta:
        if order.pk == broken:
            raise ValueError("no delay")
        return timedelta(hours=1)

    declare(Order, name="with_callable", after=after, since="created_at", when=Q(status="unpaid"))
    raised: list[int] = []

    def handler(order: Order, timeout: Timeout) -> None:
        try:
            reopen(order, timeout)
        except ValueError:
            raised.append(order.pk)
            raise

    rows, report = group(handler)
    assert raised == [broken]
    assert report.fired == tuple(row.pk for row in rows if row.object_id != str(broken))
    assert (state(rows[2]), rows[2].attempts) == (("pending", ""), 1)
    assert pending_of(orders) == len(orders) - 1


def test_a_save_outside_of_the_group_arms_at_once(order: Order, group: Any) -> None:
    group(reopen)
    other = Order.objects.create(status="unpaid", created_at=timezone.now())
    assert dq.pending_timeouts(other, "cancel_unpaid").count() == 1


@pytest.mark.parametrize("is_own_block", [True, False])
def test_a_savepoint_that_rolls_back_takes_no_arming_along(declare: Declare, is_own_block: bool) -> None:
    """The statement on the ledger inside of the savepoint arms what was saved before it."""
    parcels = [Parcel.objects.create(sent_at=timezone.now()) for _ in range(2)]
    arriving = list(parcels)

    def handler(obj: Order, timeout: Timeout) -> None:
        Parcel.objects.create(sent_at=timezone.now())
        parcel = arriving.pop()
        parcel.status = "arrived"
        parcel.save()
        if is_own_block:
            with suppress(ValueError), transaction.atomic():
                dq.schedule_timeout(obj, "remind", minutes=5)
                raise ValueError
        else:
            with connection.cursor() as cursor:
                cursor.execute("SAVEPOINT by_hand")
                dq.schedule_timeout(obj, "remind", minutes=5)
                cursor.execute("ROLLBACK TO SAVEPOINT by_hand")

    policy = declare(Order, handler, name="tries")
    grouping(policy)
    rows = [due(Order.objects.create(), policy) for _ in range(2)]
    fire(*rows)
    chased = Timeout.objects.filter(policy="testapp.parcel.chase")
    assert chased.pending().count() == 2, "those of the new parcels"
    assert {row.object_id for row in chased.filter(state="cancelled")} == {str(parcel.pk) for parcel in parcels}
    assert not Timeout.objects.filter(policy="testapp.order.remind").exists()
