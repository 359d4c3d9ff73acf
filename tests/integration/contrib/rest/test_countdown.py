"""The countdown of an object, and `DeadlineField` in serializers: refused by default, right, and cheap."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.paginator import Paginator
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone
from django.utils.dateparse import parse_datetime
from django.utils.functional import SimpleLazyObject
from rest_framework import serializers
from rest_framework.permissions import AllowAny
from rest_framework.test import APIClient, APIRequestFactory

import django_delayq as dq
from django_delayq import clock
from django_delayq.contrib.rest_framework import CountdownView, DeadlineField
from django_delayq.models import Timeout
from tests.integration.contrib.rest.conftest import Schedule
from tests.integration.contrib.rest.places import REMIND
from tests.support.typed import Patch
from tests.testapp.models import Customer, Order

pytestmark = pytest.mark.django_db


@pytest.fixture
def order() -> Order:
    return Order.objects.create(status="new", note="mine")


def ask(order: Order | int, note: str = "mine", name: str = "countdown", client: Any = None, **headers: str) -> Any:
    address = reverse(name, args=[getattr(order, "pk", order)])
    return (client or APIClient()).get(address, headers={"X-Note": note, **headers})


def ask_view(*, policy: Any = REMIND, look_up: Any = None, **options: Any) -> Any:
    """Ask a view of a project, which everybody may see."""
    view = CountdownView.as_view(policy=policy, permission_classes=[AllowAny], **options)
    return view(APIRequestFactory().get("/"), **(look_up or {"pk": Order.objects.get().pk}))


def test_only_the_owner_sees_it_and_without_a_permission_of_the_projects_own_nobody(order: Order) -> None:
    boss = APIClient()
    boss.force_login(User.objects.create_superuser("boss"))
    for client in (APIClient(), boss):
        for pk in (order.pk, 999):
            assert ask(pk, name="closed", client=client).status_code in (401, 403)
    stranger, missing = ask(order, note="yours"), ask(999)
    assert (stranger.status_code, missing.status_code) == (404, 404)
    assert stranger.data == missing.data, "an object of another owner is not found, like one that does not exist"


def test_the_owner_learns_how_long_is_left_by_the_server_and_nothing_else(
    order: Order, schedule: Schedule, settings: Any
) -> None:
    row = schedule(order=order, reason="not trusted", payload={"secret": 1})
    with clock.set_to(row.due_at - timedelta(seconds=89, milliseconds=1)):
        assert '"seconds_left":90,' in ask(order).content.decode()
    with clock.set_to(row.due_at - timedelta(seconds=90)):
        answer = ask(order)
    shown = answer.json()
    assert shown.keys() == {"due_at", "seconds_left", "is_paused", "state", "server_time"}
    assert (shown["seconds_left"], shown["state"]) == (90, "pending")
    assert parse_datetime(shown["due_at"]) == row.due_at
    assert parse_datetime(shown["server_time"]) == row.due_at - timedelta(seconds=90)
    assert int(answer["X-Server-Time"]) == clock.to_ms(row.due_at - timedelta(seconds=90))
    assert set(answer["Cache-Control"].split(", ")) == {"private", "no-cache"}
    settings.REST_FRAMEWORK = {**settings.REST_FRAMEWORK, "DATETIME_FORMAT": "%d.%m.%Y %H:%M"}
    found = ask(order).json()  # 2026-12-11 was read as 12 November, and with a time of day as no time at all
    assert datetime.fromisoformat(found["due_at"]) == row.due_at > datetime.fromisoformat(found["server_time"])
    settings.USE_TZ = False
    times = [parse_datetime(ask_view().data[name]) for name in ("due_at", "server_time")]
    assert all(at is not None and at.utcoffset() is not None for at in times), "also without time zones"


def test_the_same_answer_is_not_sent_twice(order: Order, schedule: Schedule, settings: Any) -> None:
    row = schedule(order=order)
    tag = ask(order)["ETag"]
    later = timezone.now() + timedelta(seconds=20)
    with clock.set_to(later):
        unchanged = ask(order, **{"If-None-Match": tag})
    assert (unchanged.status_code, unchanged.content, unchanged["ETag"]) == (304, b"", tag)
    assert int(unchanged["X-Server-Time"]) == clock.to_ms(later)
    assert "no-cache" in unchanged["Cache-Control"]
    dq.extend_timeout(row, minutes=1)
    moved = ask(order, **{"If-None-Match": tag})
    assert moved.status_code == 200
    dq.cancel_timeout(row)
    settled = ask(order, **{"If-None-Match": moved["ETag"]})
    assert (settled.json()["state"], settled.json()["seconds_left"]) == ("cancelled", None)
    settings.SECRET_KEY = "another"
    assert ask(order)["ETag"] != settled["ETag"], "the tag reveals no id"


def test_an_address_may_name_what_nobody_can_guess(order: Order, schedule: Schedule) -> None:
    schedule(order=order, key="k")
    orders: Any = Order.objects.exclude(status="paid")
    own = {"policy": dq.get_policy(REMIND), "key": "k", "lookup_field": "note", "queryset": orders}
    assert ask_view(**own, look_up={"note": "mine"}).data["state"] == "pending"
    Order.objects.update(status="paid")
    assert ask_view(**own, look_up={"note": "mine"}).status_code == 404
    with pytest.raises(TypeError, match="needs a policy"):
        ask_view(policy=None, queryset=Order.objects.all())


class OrderSerializer(serializers.ModelSerializer[Order]):
    remind = DeadlineField("remind")

    class Meta:
        model = Order
        fields = ["id", "remind"]


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


def test_one_object_shows_when_how_long_and_what_time_it_is(orders: list[Order]) -> None:
    due_at = dq.get_deadline(orders[0], "remind")
    assert due_at is not None
    with clock.set_to(due_at - timedelta(seconds=30)):
        shown, asked = queries(lambda: OrderSerializer(orders[0]).data["remind"])
    assert (shown["seconds_left"], asked) == (30.0, 1)
    assert parse_datetime(shown["due_at"]) == due_at
    assert parse_datetime(shown["server_time"]) == due_at - timedelta(seconds=30)
    assert shown["due_at"] == serializers.DateTimeField().to_representation(due_at)
    assert [OrderSerializer(order).data["remind"] for order in orders[3:]] == [None, None]
    lazy: Any = SimpleLazyObject(lambda: orders[0])
    assert due([OrderSerializer(lazy).data]) == [due_at]
    dq.cancel_timeout(orders[0], "remind")
    assert OrderSerializer(orders[0]).data["remind"] is None, "the answer is not older than its serializer"


def test_many_objects_take_one_query_for_all(orders: list[Order], monkeypatch: Patch) -> None:
    customers = [Customer.objects.create() for _ in range(3)]
    for number, order in enumerate(orders):
        Order.objects.filter(pk=order.pk).update(customer=customers[number % 2])
    rows = Customer.objects.prefetch_related("order_set").order_by("pk")
    shown, asked = queries(lambda: CustomerSerializer(rows, many=True).data)
    assert [due(customer["orders"]) for customer in shown] == [expected(orders[0::2]), expected(orders[1::2]), []]
    assert asked == 3
    page = Paginator(Order.objects.prefetch_related("timeouts").order_by("pk"), 10).page(1)
    shown, asked = queries(lambda: OrderSerializer(page, many=True).data)
    assert (due(shown), asked) == (expected(orders), 2), "the page and its timeouts"
    monkeypatch.setattr("django_delayq.sql.statements.CHUNK", 2)
    shown, asked = queries(lambda: OrderSerializer(orders, many=True).data)
    assert (due(shown), asked) == (expected(orders), 3), "a page longer than one statement holds"


def test_a_field_has_a_known_policy_maybe_a_key_and_reads_nothing_from_input(orders: list[Order]) -> None:
    given = OrderSerializer(data={"remind": {"due_at": "2030-01-01T00:00:00Z"}})
    assert given.is_valid() and given.validated_data == {}
    with pytest.raises(TypeError, match="policy"):
        DeadlineField()

    class Keyed(serializers.Serializer[Order]):
        remind = DeadlineField(dq.get_policy("testapp.order.remind"), key="k")

    class Wrong(serializers.Serializer[Order]):
        remind = DeadlineField("remnid")

    Timeout.objects.filter(key="k", object_id=str(orders[0].pk)).update(due_at=timezone.now() + timedelta(days=1))
    assert due([dict(Keyed(orders[0]).data)]) == [dq.get_deadline(orders[0], "remind", "k")]
    with pytest.raises(dq.UnknownPolicy):
        Wrong(orders[0]).data  # noqa: B018 - reading is what raises


class NewOrderSerializer(serializers.ModelSerializer[Order]):
    remind = DeadlineField("remind")
    soon = DeadlineField("remind", default="none yet")

    class Meta:
        model = Order
        fields = ["status", "remind", "soon"]


def test_what_is_not_saved_has_no_deadline_and_asks_for_none(orders: list[Order]) -> None:
    shown = {"status": "new", "remind": None, "soon": "none yet"}
    for data, valid in (({"status": "new"}, shown), ([{"status": "new"}] * 2, [shown] * 2)):
        serializer: Any = NewOrderSerializer(data=data, many=isinstance(data, list))
        serializer.is_valid(raise_exception=True)
        assert queries(lambda: serializer.data) == (valid, 0)  # noqa: B023 - it is called at once
    beside = OrderSerializer([orders[0], Order(), orders[1]], many=True).data
    assert [order["remind"] is None for order in beside] == [False, True, False]
    serializer = NewOrderSerializer(data={"status": "new"})
    serializer.is_valid(raise_exception=True)
    order = serializer.save()
    dq.schedule_timeout(order, "remind", minutes=5)
    assert due([serializer.data]) == expected([order]), "input that was saved has its deadline"
