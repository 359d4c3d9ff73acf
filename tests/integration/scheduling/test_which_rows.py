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
from django.utils import timezone

import django_delayq as dq
from django_delayq import operations
from django_delayq.ledger import subjects
from django_delayq.models import Timeout
from tests.testapp.models import Customer, Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
HOUR = timedelta(hours=1)
TABLES = (Order._meta.db_table, Timeout._meta.db_table)


@pytest.fixture
def orders() -> list[Order]:
    """Four orders of two customers; the older ones come last in the table."""
    now = timezone.now()
    customers = [Customer.objects.create() for _ in range(2)]
    return [
        Order.objects.create(status="new", customer=customers[number % 2], created_at=now - number * HOUR)
        for number in range(4)
    ]


def objects_of(rows: Any) -> set[str]:
    return set(rows.values_list("object_id", flat=True))


def ids(*orders: Order) -> set[str]:
    return {str(order.pk) for order in orders}


@pytest.mark.skipif(not connection.features.can_distinct_on_fields, reason="only PostgreSQL has DISTINCT ON")
def test_the_first_of_each_group_is_the_one_of_the_order(orders: list[Order]) -> None:
    oldest = Order.objects.order_by("customer", "created_at").distinct("customer")
    assert dq.schedule_timeouts(oldest, "remind", hours=1) == 2
    assert objects_of(Timeout.objects.all()) == ids(*orders[2:])
    dq.schedule_timeouts(Order.objects.all(), "remind", hours=1)
    assert objects_of(dq.pending_timeouts(oldest, "remind")) == ids(*orders[2:])
    for hours, order in zip((4, 3, 2, 1), orders, strict=True):
        dq.schedule_timeout(order, "remind", hours=hours)
    soonest = Timeout.objects.order_by("policy", "due_at").distinct("policy")
    assert dq.extend_timeouts(soonest, minutes=1) == 1
    assert dq.cancel_timeouts(soonest) == 1
    assert operations.cancel(soonest.filter(slot_taken=1), by="ada").changed == 1
    assert objects_of(Timeout.objects.filter(state="cancelled")) == ids(*orders[2:])


def test_a_slice_and_a_union_name_their_rows_and_their_objects(orders: list[Order]) -> None:
    ends = ids(orders[0], orders[-1])
    of_ends = Order.objects.filter(pk=orders[0].pk).union(Order.objects.filter(pk=orders[-1].pk))
    assert dq.schedule_timeouts(of_ends, "remind", hours=1) == 2
    dq.schedule_timeouts(Order.objects.all(), "remind", hours=1)
    assert objects_of(dq.pending_timeouts(of_ends, "remind")) == ends
    assert len(dq.pending_timeouts(Timeout.objects.order_by("id")[:3])) == 3
    one, other = (Timeout.objects.filter(object_id=pk) for pk in ends)
    both = one.union(other)
    assert dq.cancel_timeouts(both) == 2
    assert operations.refire(both, by="ada").changed == 2
    assert objects_of(dq.pending_timeouts(both)) == ends


@pytest.fixture(params=["few", "many"])
def amount(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On PostgreSQL the keys of few objects are written as a list, those of many as a subquery."""
    if request.param == "many":
        monkeypatch.setattr(subjects, "MAX_IDS", 1)


@pytest.mark.usefixtures("amount")
def test_a_queryset_of_rows_about_a_queryset_is_read_when_it_is_evaluated(orders: list[Order]) -> None:
    first, second, third, fourth = orders
    dq.schedule_timeouts(orders, "remind", hours=1)
    rows = dq.pending_timeouts(Order.objects.filter(note="late").order_by("-note").distinct(), "remind")
    assert objects_of(rows) == set()
    Order.objects.filter(pk__in=[first.pk, third.pk]).update(note="late")
    assert objects_of(rows) == ids(first, third)
    assert rows.filter(object_id=str(first.pk)).count() == 1
    assert objects_of(Timeout.objects.filter(pk__in=rows)) == ids(first, third)
    assert objects_of(Timeout.objects.exclude(pk__in=rows)) == ids(second, fourth)
    assert objects_of(rows | dq.pending_timeouts(second)) == ids(first, second, third)
    assert dq.cancel_timeouts(rows) == 2
    assert objects_of(dq.pending_timeouts(Order.objects.all())) == ids(second, fourth)


@pytest.mark.usefixtures("amount")
def test_the_objects_of_a_subquery_may_depend_on_the_query_around_it(orders: list[Order]) -> None:
    dq.schedule_timeouts(orders[:1], "remind", hours=1)
    own = dq.pending_timeouts(Order.objects.filter(customer=OuterRef(OuterRef("pk"))), "remind")
    assert list(Customer.objects.filter(Exists(own))) == [orders[0].customer]


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[QuerySet[Timeout]]:
    """All timeouts of orders, each of which a join repeats five times; pages of two rows."""
    monkeypatch.setattr("django_delayq.sql.statements.CHUNK", 2)
    kind = ContentType.objects.get_for_model(Order)
    repeats = [Permission.objects.create(content_type=kind, codename=f"repeat{number}") for number in range(5)]
    yield Timeout.objects.filter(content_type__permission__in=repeats)
    Permission.objects.filter(pk__in=[each.pk for each in repeats]).delete()


@pytest.mark.parametrize("given", ["list", "join", "slice"])
def test_a_row_that_is_named_often_is_moved_and_counted_once(given: str, joined: QuerySet[Timeout]) -> None:
    """Its repetitions may be on two pages. A slice is not read page by page."""
    order = Order.objects.create(status="new")
    row = dq.schedule_timeout(order, "remind", hours=1)
    for key in "abcd":
        dq.schedule_timeout(order, "remind", hours=2, key=key)
    assert dq.extend_timeouts([row] * 3 if given == "list" else joined.filter(key=""), minutes=1) == 1
    moved = Timeout.objects.get(pk=row.pk)
    assert (moved.due_at - row.due_at, moved.extensions) == (timedelta(minutes=1), 1)
    assert joined.count() == 25
    assert operations.cancel(joined[:25] if given == "slice" else joined, by="ada").changed == 5
