"""Users of the REST API: staff with all permissions, with one, with none, and strangers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.urls import clear_url_caches
from rest_framework.test import APIClient

import django_delayq as dq
from django_delayq.models import Timeout
from tests.testapp.models import Order


@pytest.fixture(autouse=True)
def api(settings: Any) -> None:
    settings.ROOT_URLCONF = "tests.integration.rest.urls"
    clear_url_caches()


@pytest.fixture
def client_with(db: None) -> Callable[..., APIClient]:
    """`client_with("cancel_timeout")`: a client of a staff member with just these permissions."""

    def make(*codenames: str, staff: bool = True) -> APIClient:
        user = User.objects.create_user(f"user-{User.objects.count()}", is_staff=staff)
        wanted = Permission.objects.filter(content_type__app_label="django_delayq", codename__in=codenames)
        assert {one.codename for one in wanted} == set(codenames)
        user.user_permissions.set(wanted)
        client = APIClient()
        client.force_login(user)
        return client

    return make


@pytest.fixture
def viewer(client_with: Callable[..., APIClient]) -> APIClient:
    return client_with("view_timeout")


@pytest.fixture
def schedule(db: None) -> Callable[..., Timeout]:
    """`schedule(minutes=5)`: an order's timeout; its policy is `remind` unless another is named."""

    def make(policy: str = "remind", order: Order | None = None, **options: Any) -> Timeout:
        return dq.schedule_timeout(order or Order.objects.create(status="new"), policy, **{"minutes": 5, **options})

    return make
