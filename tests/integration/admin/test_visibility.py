"""The admin shows and finds only what the visitor may see, and names objects by what people call them."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.contrib.contenttypes.models import ContentType
from django.test import Client
from django.urls import reverse

import django_delayq as dq
from django_delayq.models import Timeout
from django_delayq.operations import selection
from tests.integration.admin.conftest import DETAIL, LIST, OPERATION, Staff, source, words
from tests.integration.admin.sites import HIDDEN
from tests.support.typed import Declare, Patch
from tests.testapp.models import Customer, Order, Voucher

pytestmark = [pytest.mark.django_db, pytest.mark.urls("tests.integration.admin.sites")]


@pytest.fixture
def order(declare: Declare, monkeypatch: Patch) -> Order:
    declare(Order, name="noted", search=("note", "id"), owner="customer")
    monkeypatch.setattr(Customer, "__str__", lambda self: self.name)
    return Order.objects.create(note="A-2026-0050", status="new", customer=Customer.objects.create(name="Ada"))


def rows_of_inline(client: Client, address: str) -> list[int]:
    (inline,) = client.get(address).context["inline_admin_formsets"]
    return [form.instance.pk for form in inline.formset.initial_forms]


def test_rows_that_the_project_or_an_inline_hides_are_on_no_page_of_their_object(
    admin_client: Client, order: Order
) -> None:
    seen = dq.schedule_timeout(order, "noted", hours=1)
    hidden = dq.schedule_timeout(order, "remind", hours=1, reason=HIDDEN)
    of_order = reverse("admin:testapp_order_change", args=[order.pk])
    of_customer = reverse("admin:testapp_customer_change", args=[order.customer_id])
    for address in (of_order, of_customer):
        assert rows_of_inline(admin_client, address) == [seen.pk]
        assert HIDDEN not in source(admin_client, address)
    # Without an admin for timeouts, the project hides none.
    assert rows_of_inline(admin_client, of_order.replace("/admin/", "/plain/")) == [hidden.pk, seen.pk]
    orders = reverse("admin:testapp_order_changelist")
    (shown,) = admin_client.get(orders).context["cl"].result_list
    assert (shown.delayq_next_due, shown.delayq_next_policy) == (seen.due_at, seen.policy)
    dq.schedule_timeout(order, "noted", hours=1, key="secret")
    assert rows_of_inline(admin_client, of_customer) == [seen.pk], "an inline of the project may hide more"


def test_a_look_up_that_no_filter_has_is_not_answered(admin_client: Client, order: Order) -> None:
    row = dq.schedule_timeout(order, "noted", hours=1, payload={"secret": "4111"})
    Timeout.objects.filter(pk=row.pk).update(reason="aaaaaaaaaaaaaaaaaaaaaa!")
    for query in (
        *("payload__contains=secret", "payload__card=4111", "history__icontains=x", "idempotency_key__startswith=a"),
        *("reason__regex=(a%2B)%2B%24", "id__in=x", "due_at__week_day=x", "due_at__gt=2020-01-01", "nosuchfield=1"),
    ):
        answer = admin_client.get(f"{reverse(LIST)}?{query}")
        assert answer.status_code in {302, 400}, query
        assert answer.status_code == 400 or answer.headers["Location"].endswith("?e=1"), query
    changes = reverse("admin:django_delayq_policychange_changelist")
    for query in ("details__icontains=x", "by__regex=(a%2B)%2B%24", "place=1"):
        assert admin_client.get(f"{changes}?{query}").headers["Location"].endswith("?e=1")


def read(client: Client, address: str, *query: Any) -> str:
    return words(client.get(f"{reverse(LIST)}{address}" if address.startswith("?") else reverse(address, args=query)))


def names(rows: Any, user: Any = None) -> dict[str, str]:
    return {key: name for (_kind, key), name in selection.names_of(rows, "default", user).items()}


def test_each_page_on_which_people_decide_names_the_object_and_its_owner(admin_client: Client, order: Order) -> None:
    row, customer = dq.schedule_timeout(order, "noted", hours=1), order.customer
    assert customer is not None
    operation = words(admin_client.get(f"{reverse(OPERATION, args=['cancel'])}?ids={row.pk}"))
    for shown in (read(admin_client, LIST), read(admin_client, DETAIL, row.pk), operation):
        assert f"order A-2026-0050 (ID {order.pk})" in shown
    owned = read(admin_client, "admin:testapp_customer_change", customer.pk)
    assert "order A-2026-0050" in owned and "All timeouts of customer Ada" in owned
    page = read(admin_client, DETAIL, row.pk)
    assert "noted of A-2026-0050: pending" in page and "All timeouts of customer Ada" in page
    Timeout.objects.filter(pk=row.pk).update(attempts=1)  # the badge is the same
    assert "noted of A-2026-0050: failing" in read(admin_client, DETAIL, row.pk)
    assert "Timeouts of customer Ada" in read(admin_client, f"?related=testapp.customer:{customer.pk}")
    assert "Timeouts of order A-2026-0050" in read(admin_client, f"?object=testapp.order:{order.pk}")
    Order.objects.filter(pk=order.pk).update(note=f"Order #{order.pk}")
    shown = read(admin_client, LIST)
    assert f"Order #{order.pk}" in shown and "order Order" not in shown and "(ID" not in shown, "neither twice"


def test_only_who_may_view_the_model_sees_the_name(order: Order, staff: Staff) -> None:
    row = dq.schedule_timeout(order, "noted", hours=1)
    of_order = f"{reverse(LIST)}?object=testapp.order:{order.pk}"
    for codenames, is_named in (((), False), (("view_customer",), False), (("view_order",), True)):
        client = staff("view_timeout", *codenames)
        for address in (reverse(LIST), reverse(DETAIL, args=[row.pk]), of_order):
            shown = words(client.get(address))
            assert ("A-2026-0050" in shown) is is_named, (codenames, address)
            assert is_named or f"order {order.pk}" in shown


def test_a_path_over_a_relation_names_only_for_who_may_view_both_models(declare: Declare) -> None:
    declare(Order, name="of_customer", search="customer__name")
    order = Order.objects.create(customer=Customer.objects.create(name="Ada"))
    row = dq.schedule_timeout(order, "of_customer", hours=1)
    named = {row.object_id: "Ada"}
    for codenames, found in ((("view_order",), {}), (("view_customer",), {}), (("view_order", "view_customer"), named)):
        user = User.objects.create_user(f"user{User.objects.count()}")
        user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
        assert names([row], user) == found
    assert names([row]) == named


@pytest.mark.parametrize(
    "fails", [lambda self: 5, lambda self: Customer.objects.get(pk=1).name, lambda self: "", lambda self: 1 / 0]
)
def test_an_str_that_fails_falls_back_to_the_key(admin_client: Client, monkeypatch: Patch, fails: Any) -> None:
    monkeypatch.setattr(Order, "__str__", fails)
    order = Order.objects.create(customer=Customer.objects.create(name="Ada"))
    row = dq.schedule_timeout(order, "remind", hours=1)
    assert f"order {order.pk}" in read(admin_client, LIST)
    assert f"order {order.pk}" in read(admin_client, DETAIL, row.pk)


@pytest.mark.usefixtures("own_kinds")
def test_rows_whose_object_or_its_table_is_gone_are_shown(
    admin_client: Client, order: Order, monkeypatch: Patch
) -> None:
    gone = dq.schedule_timeout(order, "noted", hours=1)
    voucher = dq.schedule_timeout(Voucher.objects.create(code="no number"), "expire", hours=1)
    Order.objects.filter(pk=order.pk).delete()
    kind = ContentType.objects.create(app_label="former", model="invoice")
    Timeout.objects.filter(pk=voucher.pk).update(content_type=kind, object_id="7")
    shown = read(admin_client, LIST)
    assert f"order {gone.object_id}" in shown and "invoice 7" in shown
    monkeypatch.setattr(Order._meta, "db_table", "no_such_table")
    assert f"order {gone.object_id}" in read(admin_client, LIST)
