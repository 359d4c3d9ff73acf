"""Pages name an object by what people call it: an order by its number, beside the key that another one may have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.contrib.contenttypes.models import ContentType
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import path, reverse
from django.utils.html import strip_tags

import django_delayq as dq
from django_delayq.admin import PolicyControlAdmin, TimeoutAdmin, TimeoutInline
from django_delayq.models import PolicyControl, Timeout
from django_delayq.operations import selection
from tests.integration.admin.conftest import DETAIL, LIST, OPERATION
from tests.testapp.models import Customer, Order, Parcel, Voucher

site = admin.AdminSite(name="admin")


class CustomerAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    inlines = (TimeoutInline,)


site.register(Timeout, TimeoutAdmin)
site.register(PolicyControl, PolicyControlAdmin)
site.register(Customer, CustomerAdmin)
urlpatterns = [path("admin/", site.urls)]
pytestmark = [pytest.mark.django_db, pytest.mark.urls(__name__)]
Declare = Callable[..., Any]


@pytest.fixture
def order(declare: Declare, monkeypatch: pytest.MonkeyPatch) -> Order:
    declare(Order, name="noted", search=("note", "id"), owner="customer")
    monkeypatch.setattr(Customer, "__str__", lambda self: self.name)
    return Order.objects.create(note="A-2026-0050", status="new", customer=Customer.objects.create(name="Ada"))


def words(answer: Any) -> str:
    return " ".join(strip_tags(answer.content.decode()).replace("&nbsp;", " ").split())


def staff_with(*codenames: str) -> Client:
    user = User.objects.create_user(f"clerk{User.objects.count()}", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=["view_timeout", *codenames]))
    client = Client()
    client.force_login(user)
    return client


def names(rows: Any, user: Any = None) -> dict[str, str]:
    return {key: name for (_kind, key), name in selection.names_of(rows, "default", user).items()}


def test_each_page_on_which_people_decide_has_the_number_beside_the_key(admin_client: Client, order: Order) -> None:
    row = dq.schedule_timeout(order, "noted", hours=1)
    shown = f"order A-2026-0050 (ID {order.pk})"
    for address in (
        reverse(LIST),
        reverse(DETAIL, args=[row.pk]),
        f"{reverse(OPERATION, args=['cancel'])}?ids={row.pk}",
    ):
        assert shown in words(admin_client.get(address)), address
    assert "noted of A-2026-0050: pending" in words(admin_client.get(reverse(DETAIL, args=[row.pk])))
    Timeout.objects.filter(pk=row.pk).update(attempts=1)  # the badge is the same
    assert "noted of A-2026-0050: failing" in words(admin_client.get(reverse(DETAIL, args=[row.pk])))


def test_an_owner_and_what_belongs_to_it_are_named(admin_client: Client, order: Order) -> None:
    row, customer = dq.schedule_timeout(order, "noted", hours=1), order.customer
    assert customer is not None
    page = words(admin_client.get(reverse("admin:testapp_customer_change", args=[customer.pk])))
    assert "order A-2026-0050" in page and "All timeouts of customer Ada" in page
    assert "All timeouts of customer Ada" in words(admin_client.get(reverse(DETAIL, args=[row.pk])))
    for query, title in (
        (f"?related=testapp.customer:{customer.pk}", "Timeouts of customer Ada"),
        (f"?object=testapp.order:{order.pk}", "Timeouts of order A-2026-0050"),
    ):
        assert title in words(admin_client.get(f"{reverse(LIST)}{query}"))


def test_only_who_may_view_the_model_sees_the_name(order: Order) -> None:
    row = dq.schedule_timeout(order, "noted", hours=1)
    pages = (reverse(LIST), reverse(DETAIL, args=[row.pk]), f"{reverse(LIST)}?object=testapp.order:{order.pk}")
    for codenames, is_named in (((), False), (("view_customer",), False), (("view_order",), True)):
        client = staff_with(*codenames)
        for address in pages:
            shown = words(client.get(address))
            assert ("A-2026-0050" in shown) is is_named, (codenames, address)
            assert is_named or f"order {order.pk}" in shown


def test_a_path_over_a_relation_names_only_for_who_may_view_both_models(declare: Declare) -> None:
    declare(Order, name="of_customer", search="customer__name")
    row = dq.schedule_timeout(
        Order.objects.create(customer=Customer.objects.create(name="Ada")), "of_customer", hours=1
    )
    for codenames, found in ((("view_order",), {}), (("view_customer",), {}), (("view_order", "view_customer"), None)):
        user = User.objects.create_user(f"user{User.objects.count()}")
        user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
        assert names([row], user) == ({row.object_id: "Ada"} if found is None else found)
    assert names([row]) == {row.object_id: "Ada"}


def test_without_a_search_str_names_it_and_without_that_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (dq.schedule_timeout(Order.objects.create(note=note), "remind", hours=1) for note in ("x", "y"))
    with CaptureQueriesContext(connection) as captured:
        assert names([first, second]) == {}, "order 1 is shorter than Order object (1)"
    assert not [query for query in captured if "testapp_order" in query["sql"]]
    monkeypatch.setattr(Order, "__str__", lambda self: f" {self.note} \n of {self.status} " * 50)
    assert names([first, second])[first.object_id].startswith("x of unpaid x of unpaid")
    assert len(names([first])[first.object_id]) == selection.MAX_NAME


@pytest.mark.parametrize(
    "fails",
    [
        lambda self: self.customer.name,
        lambda self: 5,
        lambda self: Customer.objects.get(pk=1).name,
        lambda self: "",
        lambda self: 1 / 0,
    ],
)
def test_an_str_that_raises_or_queries_falls_back_to_the_key(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch, fails: Any
) -> None:
    monkeypatch.setattr(Order, "__str__", fails)
    order = Order.objects.create(customer=Customer.objects.create(name="Ada"))
    row = dq.schedule_timeout(order, "remind", hours=1)
    assert f"order {order.pk}" in words(admin_client.get(reverse(LIST)))
    assert f"order {order.pk}" in words(admin_client.get(reverse(DETAIL, args=[row.pk])))


def test_a_list_reads_the_names_with_one_query_for_each_model(admin_client: Client, declare: Declare) -> None:
    declare(Order, name="noted", search="note")
    declare(Parcel, name="parceled", search="status")

    def queries() -> int:
        with CaptureQueriesContext(connection) as captured:
            admin_client.get(reverse(LIST))
        for table in ("testapp_order", "testapp_parcel"):
            assert len([query for query in captured if f"FROM {connection.ops.quote_name(table)}" in query["sql"]]) == 1
        return len(captured)

    def more(count: int) -> None:
        for number in range(count):
            dq.schedule_timeout(Order.objects.create(note=f"N-{number}"), "noted", hours=1)
            dq.schedule_timeout(Parcel.objects.create(), "parceled", hours=1)

    more(1)
    queries()
    before = queries()
    more(20)
    assert queries() == before


@pytest.mark.usefixtures("own_kinds")
def test_rows_whose_object_model_or_table_is_gone_are_shown(
    admin_client: Client, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = dq.schedule_timeout(order, "noted", hours=1)
    voucher = dq.schedule_timeout(Voucher.objects.create(code="no number"), "expire", hours=1)
    Order.objects.filter(pk=order.pk).delete()
    kind = ContentType.objects.create(app_label="former", model="invoice")
    Timeout.objects.filter(pk=voucher.pk).update(content_type=kind, object_id="7")
    shown = words(admin_client.get(reverse(LIST)))
    assert f"order {gone.object_id}" in shown and "invoice 7" in shown
    monkeypatch.setattr(Order._meta, "db_table", "no_such_table")
    assert f"order {gone.object_id}" in words(admin_client.get(reverse(LIST)))


def test_a_name_that_has_the_key_or_the_model_repeats_neither(
    admin_client: Client, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    Order.objects.filter(pk=order.pk).update(note=f"Order #{order.pk}")
    dq.schedule_timeout(order, "noted", hours=1)
    shown = words(admin_client.get(reverse(LIST)))
    assert f"Order #{order.pk}" in shown and "order Order" not in shown and "(ID" not in shown
