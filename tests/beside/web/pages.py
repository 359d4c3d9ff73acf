"""Views that schedule timeouts, due at once or later, and one that fails afterwards."""

from __future__ import annotations

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.urls import path

from django_delayq import aschedule_timeout, schedule_timeout
from tests.testapp.models import Order


def place() -> None:
    schedule_timeout(Order.objects.create(status="new"), "remind", seconds=0)


def due(request: HttpRequest) -> HttpResponse:
    place()
    return HttpResponse("placed")


def fail(request: HttpRequest) -> HttpResponse:
    place()
    raise RuntimeError("after the timeout was scheduled")


@transaction.non_atomic_requests
async def later(request: HttpRequest) -> HttpResponse:
    order = await Order.objects.acreate(status="new")
    await aschedule_timeout(order, "remind", minutes=5)
    return HttpResponse("placed")


urlpatterns = [path("due/", due), path("fail/", fail), path("later/", later)]
