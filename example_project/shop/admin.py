"""The shop in the Django admin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.contrib import admin

from django_delayq.admin import TimeoutAdminMixin, TimeoutInline
from shop.models import Acceptance, Customer, Delivery, Order, Review, TextMessage, TrialMembership

if TYPE_CHECKING:
    OrderAdminBase = admin.ModelAdmin[Order]
    CustomerAdminBase = admin.ModelAdmin[Customer]
    TrialAdminBase = admin.ModelAdmin[TrialMembership]
    DeliveryAdminBase = admin.ModelAdmin[Delivery]
    ReviewAdminBase = admin.ModelAdmin[Review]
    TextAdminBase = admin.ModelAdmin[TextMessage]
    AcceptanceInlineBase = admin.StackedInline[Acceptance, Order]
else:
    OrderAdminBase = CustomerAdminBase = TrialAdminBase = admin.ModelAdmin
    DeliveryAdminBase = ReviewAdminBase = TextAdminBase = admin.ModelAdmin
    AcceptanceInlineBase = admin.StackedInline


class AcceptanceInline(AcceptanceInlineBase):
    model = Acceptance
    extra = 0


@admin.register(Order)
class OrderAdmin(TimeoutAdminMixin, OrderAdminBase):
    """Orders in the admin; saving an order schedules and cancels its timeouts, as everywhere."""

    list_display = ("reference", "product", "customer", "status", "next_deadline", "placed_at", "cancel_reason")
    list_filter = ("status", "cancel_reason")
    list_select_related = ("customer",)
    search_fields = ("reference", "customer__name")
    raw_id_fields = ("customer",)
    date_hierarchy = "placed_at"
    inlines = (TimeoutInline, AcceptanceInline)


@admin.register(Customer)
class CustomerAdmin(CustomerAdminBase):
    list_display = ("name", "phone", "reference")
    search_fields = ("name", "phone", "reference")
    inlines = (TimeoutInline,)


@admin.register(TrialMembership)
class TrialMembershipAdmin(TimeoutAdminMixin, TrialAdminBase):
    list_display = ("customer", "status", "started_at", "ended_at")
    list_filter = ("status",)
    list_select_related = ("customer",)
    raw_id_fields = ("customer",)
    inlines = (TimeoutInline,)


@admin.register(Delivery)
class DeliveryAdmin(TimeoutAdminMixin, DeliveryAdminBase):
    list_display = ("order", "started_at", "promised_at", "handed_over_at", "delivered_at")
    list_select_related = ("order",)
    raw_id_fields = ("order",)
    inlines = (TimeoutInline,)


@admin.register(Review)
class ReviewAdmin(TimeoutAdminMixin, ReviewAdminBase):
    list_display = ("order", "score", "by_default", "asked_at", "answered_at")
    list_filter = ("score", "by_default")
    list_select_related = ("order",)
    raw_id_fields = ("order",)
    inlines = (TimeoutInline,)


@admin.register(TextMessage)
class TextMessageAdmin(TextAdminBase):
    list_display = ("recipient", "text", "sent_at")
    search_fields = ("recipient", "text")
