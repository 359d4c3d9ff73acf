"""The admin shows and finds only what the visitor may see: no hidden rows, and no answers about hidden columns."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from django.contrib import admin
from django.http import HttpRequest
from django.test import Client
from django.urls import path, reverse
from django.utils import timezone

import django_delayq as dq
from django_delayq.admin import PolicyChangeAdmin, PolicyControlAdmin, TimeoutAdmin, TimeoutAdminMixin, TimeoutInline
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from tests.integration.admin.conftest import LIST
from tests.testapp.models import Customer, Order

HIDDEN = "of another tenant"


class TenantsTimeoutAdmin(TimeoutAdmin):
    """The admin of a project that hides the rows of other tenants."""

    def get_queryset(self, request: HttpRequest) -> Any:
        return super().get_queryset(request).exclude(reason=HIDDEN)


class OrderAdmin(TimeoutAdminMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    fields = ("status",)
    inlines = (TimeoutInline,)


class OwnInline(TimeoutInline):
    def get_queryset(self, request: HttpRequest) -> Any:
        return super().get_queryset(request).exclude(key="secret")


class CustomerAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    fields = ("name",)
    inlines = (OwnInline,)


class QuietFilter(admin.SimpleListFilter):
    title, parameter_name = "quiet", "quiet"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        return [("yes", "yes")]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        return queryset.filter(reason="") if self.value() else queryset


class FilteredTimeoutAdmin(TimeoutAdmin):
    list_filter: ClassVar[Any] = (*TimeoutAdmin.list_filter, QuietFilter, "cause")


site, plain, filtered = (admin.AdminSite(name=name) for name in ("admin", "plain", "filtered"))
site.register(Timeout, TenantsTimeoutAdmin)
for each in (site, plain):
    each.register(Order, OrderAdmin)
    each.register(Customer, CustomerAdmin)
site.register(PolicyControl, PolicyControlAdmin)
site.register(PolicyChange, PolicyChangeAdmin)
filtered.register(Timeout, FilteredTimeoutAdmin)
urlpatterns = [path("admin/", site.urls), path("plain/", plain.urls), path("filtered/", filtered.urls)]
pytestmark = [pytest.mark.django_db, pytest.mark.urls(__name__)]


@pytest.fixture
def order(declare: Any) -> Order:
    declare(Order, name="noted", search="note", owner="customer")
    return Order.objects.create(status="new", customer=Customer.objects.create(name="Ada"))


def schedule(order: Order, name: str, **more: Any) -> Timeout:
    row = dq.schedule_timeout(order, name, hours=1, **more)
    found: Timeout = Timeout.objects.get(pk=row.pk)
    return found


def rows_of_inline(client: Client, address: str) -> list[int]:
    answer = client.get(address)
    assert answer.status_code == 200
    (inline,) = answer.context["inline_admin_formsets"]
    return [form.instance.pk for form in inline.formset.initial_forms]


def test_rows_that_the_project_hides_are_on_no_page_of_the_object_or_its_owner(
    admin_client: Client, order: Order
) -> None:
    seen, hidden = schedule(order, "noted"), schedule(order, "remind", reason=HIDDEN)
    pages = [reverse("admin:testapp_order_change", args=[order.pk])]
    pages.append(reverse("admin:testapp_customer_change", args=[order.customer_id]))
    for address in pages:
        assert rows_of_inline(admin_client, address) == [seen.pk]
        assert HIDDEN not in admin_client.get(address).content.decode()
    # Without an admin for timeouts, the project hides none.
    assert rows_of_inline(admin_client, pages[0].replace("/admin/", "/plain/")) == [hidden.pk, seen.pk]


def test_an_inline_of_the_project_may_hide_more(admin_client: Client, order: Order) -> None:
    seen, _hidden = schedule(order, "noted"), schedule(order, "noted", key="secret")
    address = reverse("admin:testapp_customer_change", args=[order.customer_id])
    assert rows_of_inline(admin_client, address) == [seen.pk]


def test_the_column_and_the_filter_of_the_mixin_leave_hidden_rows_out(admin_client: Client, order: Order) -> None:
    schedule(order, "remind", reason=HIDDEN)
    address = reverse("admin:testapp_order_changelist")
    shown = admin_client.get(address).context["cl"]
    assert [each.delayq_next_due for each in shown.result_list] == [None]
    assert not admin_client.get(f"{address}?timeouts=waiting").context["cl"].result_list
    assert admin_client.get(f"{address.replace('/admin/', '/plain/')}?timeouts=waiting").context["cl"].result_list


@pytest.mark.parametrize(
    "query",
    [
        "payload__contains=secret",
        "payload__card=4111",
        "history__icontains=x",
        "idempotency_key__startswith=a",
        "reason__regex=(a%2B)%2B%24",
        "id__in=x",
        "object_id__regex=[",
        "due_at__week_day=x",
        "due_at__gt=2020-01-01",
        "due_at__isnull=1",
        "attempts__gte=99999999999999999999999",
        "content_type__model=order",
        "content_type__app_label__regex=(a%2B)%2B%24",
        "slot=x",
        "nosuchfield=1",
    ],
)
def test_a_look_up_that_no_filter_has_is_not_answered(admin_client: Client, order: Order, query: str) -> None:
    row = schedule(order, "noted", payload={"secret": "4111"})
    Timeout.objects.filter(pk=row.pk).update(reason="aaaaaaaaaaaaaaaaaaaaaa!")
    answer = admin_client.get(f"{reverse(LIST)}?{query}")
    assert answer.status_code in {302, 400}, answer.status_code
    if answer.status_code == 302:
        assert answer.headers["Location"].endswith("?e=1")


@pytest.mark.parametrize("query", ["details__icontains=x", "by__regex=(a%2B)%2B%24", "place=1", "moved__gt=x"])
def test_the_list_of_changes_answers_no_look_up_that_no_filter_has(admin_client: Client, query: str) -> None:
    now = timezone.now()
    PolicyChange.objects.create(policy="x", what="paused", at=now, touched_at=now, by="a" * 40)
    address = reverse("admin:django_delayq_policychange_changelist")
    assert admin_client.get(f"{address}?{query}").headers["Location"].endswith("?e=1")
    assert admin_client.get(f"{address}?what__exact=paused").context["cl"].result_count == 1


def test_filters_of_the_list_of_a_project_and_the_date_hierarchy_are_answered(
    admin_client: Client, order: Order
) -> None:
    row = schedule(order, "noted")
    listed = reverse("filtered:django_delayq_timeout_changelist")
    for query in ("quiet=yes", "cause__exact=", f"due_at__year={row.due_at.year}", "state__exact=pending&quiet=yes"):
        assert [each.pk for each in admin_client.get(f"{listed}?{query}").context["cl"].result_list] == [row.pk], query
    assert admin_client.get(f"{listed}?cause__startswith=d").status_code == 302
