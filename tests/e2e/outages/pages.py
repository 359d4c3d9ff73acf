"""Views that schedule, as a shop's do."""

from __future__ import annotations

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.urls import path
from django.utils import timezone

from django_delayq import acancel_timeout, aschedule_timeout, cancel_timeout, schedule_timeout
from tests.testapp.models import Order


def order(request: HttpRequest) -> HttpResponse:
    """Save an object with a policy, schedule a timeout, and cancel another one."""
    placed = Order.objects.create(status="unpaid", created_at=timezone.now())
    schedule_timeout(placed, "remind", minutes=5)
    schedule_timeout(placed, "remind", minutes=5, key="other")
    cancel_timeout(placed, "remind", key="other")
    return HttpResponse("placed")


@transaction.non_atomic_requests
def order_in_blocks(request: HttpRequest) -> HttpResponse:
    with transaction.atomic():
        order(request)
        with transaction.atomic():
            return order(request)


@transaction.non_atomic_requests
async def order_async(request: HttpRequest) -> HttpResponse:
    placed = await Order.objects.acreate(status="unpaid", created_at=timezone.now())
    await aschedule_timeout(placed, "remind", minutes=5)
    await acancel_timeout(placed, "remind")
    return HttpResponse("placed")


urlpatterns = [path("order/", order), path("blocks/", order_in_blocks), path("async/", order_async)]
