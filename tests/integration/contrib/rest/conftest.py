"""Users of the REST API: staff with all permissions, with one, with none, and strangers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.urls import clear_url_caches
from django.utils import timezone
from rest_framework.test import APIClient

import django_delayq as dq
from django_delayq.models import Timeout
from tests.integration.contrib.rest.places import ALL, LIST
from tests.testapp.models import Order

Schedule = Callable[..., Timeout]
ClientWith = Callable[..., APIClient]


def url(row: Timeout, verb: str) -> str:
    return f"{LIST}{row.pk}/{verb}/"


def act(client: APIClient, row: Timeout, verb: str, **body: Any) -> Any:
    return client.post(url(row, verb), body, format="json")


def settle(row: Timeout, state: str = "fired", cause: str = "due", **changes: Any) -> Timeout:
    changes = {"settled_at": timezone.now(), "slot_taken": None, **changes}
    Timeout.objects.filter(pk=row.pk).update(state=state, cause=cause, **changes)
    row.refresh_from_db()
    return row


def ready_for(verb: str, row: Timeout) -> Timeout:
    return settle(row, "dead", "retries", attempts=3) if verb in {"retry", "refire", "erase"} else row


def stored() -> list[dict[str, Any]]:
    """All columns of all rows."""
    return list(Timeout.objects.order_by("pk").values(*(field.attname for field in Timeout._meta.concrete_fields)))


def ids(answer: Any) -> list[int]:
    assert answer.status_code == 200, answer.data
    return [row["id"] for row in answer.data["results"]]


@pytest.fixture(autouse=True)
def api(settings: Any) -> None:
    settings.ROOT_URLCONF = "tests.integration.contrib.rest.urls"
    clear_url_caches()


@pytest.fixture
def client_with(db: None) -> ClientWith:
    """`client_with("cancel_timeout")`: a client of a staff member with just these permissions."""

    def make(*codenames: str, staff: bool = True) -> APIClient:
        user = User.objects.create_user(f"user-{User.objects.count()}", is_staff=staff)
        wanted = Permission.objects.filter(codename__in=codenames)
        assert {one.codename for one in wanted} == set(codenames)
        user.user_permissions.set(wanted)
        client = APIClient()
        client.force_login(user)
        return client

    return make


@pytest.fixture
def viewer(client_with: ClientWith) -> APIClient:
    return client_with("view_timeout")


@pytest.fixture
def operator(client_with: ClientWith) -> APIClient:
    return client_with("view_timeout", "pause_policy", "change_policy_guards", *ALL)


@pytest.fixture
def schedule(db: None) -> Schedule:
    """`schedule(minutes=5)`: an order's timeout; its policy is `remind` unless another is named."""

    def make(policy: str = "remind", order: Order | None = None, **options: Any) -> Timeout:
        return dq.schedule_timeout(order or Order.objects.create(status="new"), policy, **{"minutes": 5, **options})

    return make
