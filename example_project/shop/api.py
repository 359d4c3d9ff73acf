"""The endpoint that the scripts of the pages use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rest_framework.permissions import BasePermission

from django_delayq.contrib.rest_framework import CountdownView

if TYPE_CHECKING:
    from rest_framework.request import Request
    from rest_framework.views import APIView

    from shop.models import Order


class OrderedHere(BasePermission):
    """Allow the browser that placed the order; its session contains the customer."""

    def has_object_permission(self, request: Request, view: APIView, obj: Order) -> bool:
        known = request.session.get("customer")
        return bool(known) and obj.customer.reference == known


time_to_pay = CountdownView.as_view(
    policy="shop.order.cancel_unpaid", lookup_field="reference", permission_classes=[OrderedHere]
)
