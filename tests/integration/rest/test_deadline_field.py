"""`DeadlineField` in a project's own serializers: right, and never a query per row."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.core.paginator import Paginator
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from django.utils.dateparse import parse_datetime
from django.utils.functional import SimpleLazyObject
from rest_framework import serializers

import django_delayq as dq
from django_delayq import clock
from django_delayq.contrib.rest_framework import DeadlineField
from django_delayq.models import Timeout
from tests.testapp.models import Customer, ExpressOrder, Order, Parcel

pytestmark = pytest.mark.django_db


class OrderSerializer(serializers.ModelSerializer[Order]):
    remind = DeadlineField("remind")

    class Meta:
        model = Order
        fields = ["id", "remind"]


class AnnotatedSerializer(serializers.Serializer[Order]):
    remind = DeadlineField(source="remind_at")


class CustomerSerializer(serializers.ModelSerializer[Customer]):
    orders = OrderSerializer(source="order_set", many=True)

    class Meta:
        model = Customer
        fields = ["orders"]


@pytest.fixture
def orders() -> list[Order]:
    made = [Order.objects.create(status="new") for _ in range(5)]
    for number, order in enumerate(made[:4]):
        dq.schedule_timeout(order, "remind", minutes=number + 1)
        dq.schedule_timeout(order, "remind", minutes=50, key="k")
    dq.cancel_timeout(made[3], "remind")
    return made


def queries(run: Callable[[], Any]) -> tuple[Any, int]:
    """What `run` gives, and how often it asked the ledger or for orders."""
    with CaptureQueriesContext(connection) as captured:
        result = run()
    return result, len(captured)


def due(shown: Any) -> list[Any]:
    return [one["remind"] and parse_datetime(one["remind"]["due_at"]) for one in shown]


def expected(orders: list[Order]) -> list[Any]:
    return [dq.get_deadline(order, "remind") for order in orders]


def test_an_object_that_is_loaded_lazily_shows_its_deadline(orders: list[Order]) -> None:
    lazy: Any = SimpleLazyObject(lambda: orders[0])
    assert due([OrderSerializer(lazy).data]) == expected(orders[:1])


def test_one_object_shows_when_how_long_and_what_time_it_is(orders: list[Order]) -> None:
    due_at = dq.get_deadline(orders[0], "remind")
    assert due_at is not None
    with clock.set_to(due_at - timedelta(seconds=30)):
        shown, asked = queries(lambda: OrderSerializer(orders[0]).data["remind"])
    assert shown["seconds_left"] == 30.0
    assert parse_datetime(shown["due_at"]) == due_at
    assert parse_datetime(shown["server_time"]) == due_at - timedelta(seconds=30)
    assert shown["due_at"] == serializers.DateTimeField().to_representation(due_at)
    assert asked == 1
    assert OrderSerializer(orders[3]).data["remind"] is None
    assert OrderSerializer(orders[4]).data["remind"] is None


@pytest.mark.parametrize(
    ("several", "most"),
    [
        (lambda: list(Order.objects.order_by("pk")), 2),
        (lambda: Order.objects.order_by("pk"), 2),
        (lambda: Paginator(Order.objects.order_by("pk"), 10).page(1), 3),
        (lambda: list(Order.objects.prefetch_related("timeouts").order_by("pk")), 2),
    ],
)
def test_many_objects_take_one_query_or_none(orders: list[Order], several: Callable[[], Any], most: int) -> None:
    shown, asked = queries(lambda: OrderSerializer(several(), many=True).data)
    assert due(shown) == expected(orders)
    assert asked == most


def test_an_annotation_takes_no_query_of_its_own(orders: list[Order]) -> None:
    rows: Any = Order.objects.annotate(remind_at=dq.Deadline("remind")).order_by("pk")
    assert list(rows.all()) == orders  # on MySQL and MariaDB, the first query of a process also reads a collation
    shown, asked = queries(lambda: AnnotatedSerializer(rows, many=True).data)
    assert due(shown) == expected(orders)
    assert asked == 1


def test_objects_within_objects_take_one_query_for_all(orders: list[Order]) -> None:
    customers = [Customer.objects.create() for _ in range(3)]
    for number, order in enumerate(orders):
        Order.objects.filter(pk=order.pk).update(customer=customers[number % 2])
    rows = Customer.objects.prefetch_related("order_set").order_by("pk")
    shown, asked = queries(lambda: CustomerSerializer(rows, many=True).data)
    assert [due(customer["orders"]) for customer in shown] == [
        expected(orders[0::2]), expected(orders[1::2]), [],
    ]  # fmt: skip
    assert asked == 3
    (alone, asked) = queries(lambda: CustomerSerializer(customers[0]).data)
    assert due(alone["orders"]) == expected(orders[0::2])
    assert asked <= 3


def test_objects_behind_a_relation_take_one_query_for_all(orders: list[Order]) -> None:
    class Line:
        def __init__(self, order: Order | None) -> None:
            self.order = order

    class LineSerializer(serializers.Serializer[Line]):
        order = OrderSerializer(allow_null=True)

    lines: Any = [Line(order) for order in orders] + [Line(None)]
    shown, asked = queries(lambda: LineSerializer(lines, many=True).data)
    assert due([line["order"] for line in shown[:5]]) == expected(orders)
    assert shown[5]["order"] is None
    assert asked == 1


def test_a_page_longer_than_one_statement_holds_is_looked_up_in_few(
    orders: list[Order], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django_delayq.sql.statements.CHUNK", 2)
    shown, asked = queries(lambda: OrderSerializer(orders, many=True).data)
    assert due(shown) == expected(orders)
    assert asked == 3


def test_the_same_object_twice_and_objects_of_a_child_are_found(orders: list[Order]) -> None:
    child = ExpressOrder.objects.create()
    dq.schedule_timeout(child, "remind", minutes=3)
    mixed = [orders[0], child, orders[0], Order.objects.get(pk=orders[0].pk)]
    assert due(OrderSerializer(mixed, many=True).data) == expected(mixed)


def test_what_is_told_is_not_older_than_its_serializer(orders: list[Order]) -> None:
    assert OrderSerializer(orders[0]).data["remind"] is not None
    dq.cancel_timeout(orders[0], "remind")
    assert OrderSerializer(orders[0]).data["remind"] is None


def test_a_generator_is_written_too(orders: list[Order]) -> None:
    given: Any = (order for order in orders)
    shown: Any = OrderSerializer(given, many=True).data
    assert due(list(shown)) == expected(orders)


def test_nothing_is_read_from_input(orders: list[Order]) -> None:
    given = OrderSerializer(data={"remind": {"due_at": "2030-01-01T00:00:00Z"}})
    assert given.is_valid()
    assert given.validated_data == {}


def test_a_key_a_policy_and_a_former_round(orders: list[Order]) -> None:
    class Keyed(serializers.Serializer[Order]):
        remind = DeadlineField(dq.get_policy("testapp.order.remind"), key="k")

    Timeout.objects.filter(key="k", object_id=str(orders[0].pk)).update(due_at=timezone.now() + timedelta(days=1))
    assert due([dict(Keyed(orders[0]).data)]) == [dq.get_deadline(orders[0], "remind", "k")]


def test_a_field_of_nothing_and_an_unknown_policy_are_mistakes(orders: list[Order]) -> None:
    with pytest.raises(TypeError, match="policy"):
        DeadlineField()

    class Wrong(serializers.Serializer[Order]):
        remind = DeadlineField("remnid")

    with pytest.raises(dq.UnknownPolicy):
        Wrong(orders[0]).data  # noqa: B018 - reading is what raises


class NewOrderSerializer(serializers.ModelSerializer[Order]):
    remind = DeadlineField("remind")
    soon = DeadlineField("remind", default="none yet")

    class Meta:
        model = Order
        fields = ["status", "remind", "soon"]


class NewCustomerSerializer(serializers.Serializer[Customer]):
    name = serializers.CharField()
    orders = NewOrderSerializer(many=True)


def test_valid_input_that_is_not_saved_yet_has_no_deadline_and_asks_for_none() -> None:
    shown = {"status": "new", "remind": None, "soon": "none yet"}
    one = NewOrderSerializer(data={"status": "new"})
    several = NewOrderSerializer(data=[{"status": "new"}] * 2, many=True)
    nested = NewCustomerSerializer(data={"name": "Ann", "orders": [{"status": "new"}]})
    cases: list[tuple[Any, Any]] = [(one, shown), (several, [shown] * 2), (nested, {"name": "Ann", "orders": [shown]})]
    for serializer, expected in cases:
        serializer.is_valid(raise_exception=True)
        with CaptureQueriesContext(connection) as captured:
            assert serializer.data == expected
        assert len(captured) == 0
    assert NewOrderSerializer(Order(status="new")).data == shown


class ParcelSerializer(serializers.Serializer[Parcel]):
    first = DeadlineField("by_uuid")


def test_objects_that_are_not_saved_have_no_deadline_beside_saved_ones_and_with_a_key(
    orders: list[Order], declare: Callable[..., Any]
) -> None:
    shown = OrderSerializer([orders[0], Order(), orders[1]], many=True).data
    assert [order["remind"] is None for order in shown] == [False, True, False]
    declare(Parcel, name="by_uuid")
    assert ParcelSerializer(Parcel()).data == {"first": None}, "it has a key before it is saved"


def test_input_that_was_saved_has_its_deadline() -> None:
    serializer = NewOrderSerializer(data={"status": "new"})
    serializer.is_valid(raise_exception=True)
    order = serializer.save()
    dq.schedule_timeout(order, "remind", minutes=5)
    assert parse_datetime(serializer.data["remind"]["due_at"]) == dq.get_deadline(order, "remind")
