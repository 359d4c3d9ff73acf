"""Which objects and rows a queryset names, if its order, a union or a join decides about them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.contrib.contenttypes.models import ContentType
from django.db import connection
from django.db.models import Exists, OuterRef, QuerySet
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

import django_delayq as dq
from django_delayq import operations
from django_delayq.ledger import subjects
from django_delayq.models import Timeout
from tests.testapp.models import Customer, ExpressOrder, Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
HOUR = timedelta(hours=1)
TABLES = (Order._meta.db_table, Timeout._meta.db_table)
needs_distinct_on = pytest.mark.skipif(
    not connection.features.can_distinct_on_fields, reason="only PostgreSQL has DISTINCT ON"
)


@pytest.fixture
def orders() -> list[Order]:
    """Four orders of two customers; the older ones come last in the table."""
    now = timezone.now()
    customers = [Customer.objects.create() for _ in range(2)]
    return [
        Order.objects.create(status="new", customer=customers[number % 2], created_at=now - number * HOUR)
        for number in range(4)
    ]


def oldest() -> QuerySet[Order]:
    """Return the oldest order of each customer."""
    return Order.objects.order_by("customer", "created_at").distinct("customer")


def objects_of(rows: Any) -> set[str]:
    return set(rows.values_list("object_id", flat=True))


def ids(orders: list[Order]) -> set[str]:
    return {str(order.pk) for order in orders}


@needs_distinct_on
def test_the_first_of_each_group_is_the_one_of_the_order(orders: list[Order]) -> None:
    assert dq.schedule_timeouts(oldest(), "remind", hours=1) == 2
    assert objects_of(Timeout.objects.all()) == ids(orders[2:])
    dq.schedule_timeouts(Order.objects.all(), "remind", hours=1)
    assert objects_of(dq.pending_timeouts(oldest(), "remind")) == ids(orders[2:])


@needs_distinct_on
def test_of_rows_the_first_of_each_group_is_the_one_of_the_order(orders: list[Order]) -> None:
    for hours, order in zip((4, 3, 2, 1), orders, strict=True):
        dq.schedule_timeout(order, "remind", hours=hours)
    soonest = Timeout.objects.order_by("policy", "due_at").distinct("policy")
    assert dq.extend_timeouts(soonest, minutes=1) == 1
    assert dq.cancel_timeouts(soonest) == 1
    assert operations.cancel(soonest.filter(slot_taken=1), by="ada").changed == 1
    assert objects_of(Timeout.objects.filter(state="cancelled")) == ids(orders[2:])


def test_a_slice_of_rows_names_those_that_are_pending(orders: list[Order]) -> None:
    dq.schedule_timeouts(orders, "remind", hours=1)
    assert len(dq.pending_timeouts(Timeout.objects.order_by("id")[:3])) == 3


def test_a_union_names_the_objects_of_both(orders: list[Order]) -> None:
    first, last = Order.objects.filter(pk=orders[0].pk), Order.objects.filter(pk=orders[-1].pk)
    assert dq.schedule_timeouts(first.union(last), "remind", hours=1) == 2
    dq.schedule_timeouts(Order.objects.all(), "remind", hours=1)
    assert objects_of(dq.pending_timeouts(first.union(last), "remind")) == ids([orders[0], orders[-1]])


def test_a_union_of_rows_is_cancelled_and_repeated(orders: list[Order]) -> None:
    dq.schedule_timeouts(orders, "remind", hours=1)
    both = Timeout.objects.filter(object_id=str(orders[0].pk)).union(
        Timeout.objects.filter(object_id=str(orders[-1].pk))
    )
    assert dq.cancel_timeouts(both) == 2
    assert operations.refire(both, by="ada").changed == 2
    assert objects_of(dq.pending_timeouts(both)) == ids([orders[0], orders[-1]])


@pytest.fixture(params=["few", "many"])
def amount(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On PostgreSQL the keys of few objects are written as a list, those of many as a subquery."""
    if request.param == "many":
        monkeypatch.setattr(subjects, "MAX_IDS", 1)


@pytest.mark.usefixtures("amount")
def test_a_queryset_of_rows_about_a_queryset_is_read_when_it_is_evaluated(orders: list[Order]) -> None:
    dq.schedule_timeouts(orders, "remind", hours=1)
    rows = dq.pending_timeouts(Order.objects.filter(note="late").order_by("-note").distinct(), "remind")
    assert objects_of(rows) == set()
    Order.objects.filter(pk__in=[orders[0].pk, orders[2].pk]).update(note="late")
    assert objects_of(rows) == ids([orders[0], orders[2]])
    assert rows.filter(object_id=str(orders[0].pk)).count() == 1
    assert objects_of(Timeout.objects.filter(pk__in=rows)) == ids([orders[0], orders[2]])
    assert objects_of(Timeout.objects.exclude(pk__in=rows)) == ids([orders[1], orders[3]])
    assert objects_of(rows | dq.pending_timeouts(orders[1])) == ids(orders[:3])
    assert dq.cancel_timeouts(rows) == 2
    assert objects_of(dq.pending_timeouts(Order.objects.all())) == ids([orders[1], orders[3]])


@pytest.mark.usefixtures("amount")
def test_the_objects_of_a_subquery_may_depend_on_the_query_around_it(orders: list[Order]) -> None:
    dq.schedule_timeouts(orders[:1], "remind", hours=1)
    own = dq.pending_timeouts(Order.objects.filter(customer=OuterRef(OuterRef("pk"))), "remind")
    assert list(Customer.objects.filter(Exists(own))) == [orders[0].customer]


@pytest.mark.usefixtures("amount")
def test_a_child_has_the_rows_of_its_parent_too() -> None:
    child, _ = ExpressOrder.objects.create(), Order.objects.create()
    dq.schedule_timeout(child, "remind", hours=1)
    dq.schedule_timeout(Order.objects.exclude(pk=child.pk).get(), "remind", hours=1)
    assert objects_of(dq.pending_timeouts(ExpressOrder)) == {str(child.pk)}
    assert objects_of(dq.pending_timeouts(ExpressOrder.objects.all(), "remind")) == {str(child.pk)}


@pytest.mark.skipif(connection.vendor != "postgresql", reason="the other databases build an index of the subquery")
def test_without_statistics_the_objects_of_a_queryset_are_not_compared_with_each_row(orders: list[Order]) -> None:
    """PostgreSQL expected one pending row, and read the objects again for each: minutes for 100 of 40,000 orders."""
    dq.schedule_timeouts(orders, "remind", hours=1)
    with CaptureQueriesContext(connection) as captured:
        assert dq.cancel_timeouts(dq.pending_timeouts(Order.objects.filter(status="new"), "remind")) == 4
    both = [query["sql"] for query in captured if all(f'FROM "{name}"' in query["sql"] for name in TABLES)]
    assert both == []


@pytest.fixture
def joined() -> Iterator[QuerySet[Timeout]]:
    """All timeouts of orders, each of which a join repeats five times."""
    kind = ContentType.objects.get_for_model(Order)
    repeats = [Permission.objects.create(content_type=kind, codename=f"repeat{number}") for number in range(5)]
    yield Timeout.objects.filter(content_type__permission__in=repeats)
    Permission.objects.filter(pk__in=[each.pk for each in repeats]).delete()


@pytest.mark.parametrize("given", ["list", "join"])
def test_a_row_that_is_named_often_is_moved_once(
    given: str, joined: QuerySet[Timeout], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its repetitions may be on two pages."""
    monkeypatch.setattr("django_delayq.sql.statements.CHUNK", 2)
    order = Order.objects.create(status="new")
    row = dq.schedule_timeout(order, "remind", hours=1)
    for key in "abc":
        dq.schedule_timeout(order, "remind", hours=2, key=key)
    assert dq.extend_timeouts([row] * 3 if given == "list" else joined.filter(key=""), minutes=1) == 1
    moved = Timeout.objects.get(pk=row.pk)
    assert (moved.due_at - row.due_at, moved.extensions) == (timedelta(minutes=1), 1)


@pytest.mark.parametrize("inside", [True, False])
def test_an_action_counts_a_row_that_a_join_repeats_once(
    inside: bool, joined: QuerySet[Timeout], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django_delayq.sql.statements.CHUNK", 2)
    order = Order.objects.create(status="new")
    for key in "abcde":
        dq.schedule_timeout(order, "remind", hours=2, key=key)
    assert joined.count() == 25
    if inside:
        joined = joined[:25]  # is not read page by page
    assert operations.cancel(joined, by="ada").changed == 5
