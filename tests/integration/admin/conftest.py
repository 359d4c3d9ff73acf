"""A row, and visitors of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

import django_delayq as dq
from django_delayq.models import Timeout
from tests.testapp.models import Order

LIST = "admin:django_delayq_timeout_changelist"
DETAIL = "admin:django_delayq_timeout_change"
OPERATION = "admin:django_delayq_timeout_operate"


def stored(pk: int | None = None) -> dict[str, Any]:
    """All columns of the one row that there is, or of this one."""
    rows = Timeout.objects.all() if pk is None else Timeout.objects.filter(pk=pk)
    columns = [field.attname for field in Timeout._meta.concrete_fields]
    found: dict[str, Any] = rows.values(*columns).get()
    return found


def policy_shown(client: Client, label: str) -> dict[str, Any]:
    """Return what the page of policies shows of one."""
    policies = client.get(reverse("admin:django_delayq_policycontrol_changelist")).context["shown"]["policies"]
    return next(each for each in policies if each["status"].label == label)


@pytest.fixture
def row() -> Timeout:
    order = Order.objects.create(status="new")
    dq.schedule_timeout(order, "remind", minutes=5, key="k1", payload={"n": 1}, reason="<b>on request</b>")
    dq.extend_timeout(order, "remind", key="k1", minutes=5, reason="asked for it")
    found: Timeout = Timeout.objects.get()
    return found


@pytest.fixture
def staff() -> Callable[..., Client]:
    """`staff("view_timeout", ...)`: the browser of a new member of the staff with just these permissions."""

    def made(*permissions: str) -> Client:
        user = User.objects.create_user(f"staff{User.objects.count()}", is_staff=True)
        found = Permission.objects.filter(codename__in=permissions, content_type__app_label="django_delayq")
        assert len(found) == len(permissions)
        user.user_permissions.set(found)
        client = Client(enforce_csrf_checks=False)
        client.force_login(user)
        return client

    return made


@pytest.fixture
def viewer(staff: Callable[..., Client]) -> Client:
    return staff("view_timeout")
