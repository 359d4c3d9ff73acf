"""The admin of a project: pages of timeouts beside those of its own models, and sites that lack some of them."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.urls import path

from django_delayq.admin import (
    LockingAdminMixin,
    PolicyChangeAdmin,
    PolicyControlAdmin,
    TimeoutAdmin,
    TimeoutAdminMixin,
    TimeoutInline,
)
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from tests.testapp.market import Payment, Purchase
from tests.testapp.models import Customer, Order

HIDDEN = "of another tenant"


class TenantsTimeoutAdmin(TimeoutAdmin):
    """It hides the rows of other tenants."""

    def get_queryset(self, request: HttpRequest) -> Any:
        return super().get_queryset(request).exclude(reason=HIDDEN)


class OwnInline(TimeoutInline):
    shown = 2

    def get_queryset(self, request: HttpRequest) -> Any:
        return super().get_queryset(request).exclude(key="secret")


class OrderAdmin(TimeoutAdminMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    list_display = ("id", "next_deadline", "status")
    fields = ("status", "note")
    inlines = (TimeoutInline,)


class CustomerAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    fields = ("name",)
    inlines = (OwnInline,)


class PaymentInline(admin.TabularInline):  # type: ignore[type-arg]
    model = Payment
    extra = 0


class PurchaseAdmin(TimeoutAdminMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    fields = ("status",)
    inlines = (PaymentInline, TimeoutInline)


class PaymentAdmin(LockingAdminMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    fields = ("status",)


site, plain, elsewhere = (admin.AdminSite(name=name) for name in ("admin", "plain", "elsewhere"))
site.register(Timeout, TenantsTimeoutAdmin)
site.register(PolicyControl, PolicyControlAdmin)
site.register(PolicyChange, PolicyChangeAdmin)
for each in (site, plain):
    each.register(Order, OrderAdmin)
    each.register(Customer, CustomerAdmin)
site.register(Purchase, PurchaseAdmin)
site.register(Payment, PaymentAdmin)
elsewhere.register(Timeout, TimeoutAdmin)
elsewhere.register(Order, OrderAdmin)
urlpatterns = [path(f"{each.name}/", each.urls) for each in (site, plain, elsewhere)]
