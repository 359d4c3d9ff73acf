"""A row, visitors of every kind, and what they read."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.contrib.messages import get_messages
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils.html import strip_tags

import django_delayq as dq
from django_delayq.models import Timeout
from tests.integration.admin.places import POLICIES
from tests.testapp.models import Order

Staff = Callable[..., Client]


def stored(pk: int | None = None) -> dict[str, Any]:
    """All columns of the one row that there is, or of this one."""
    rows = Timeout.objects.all() if pk is None else Timeout.objects.filter(pk=pk)
    columns = [field.attname for field in Timeout._meta.concrete_fields]
    found: dict[str, Any] = rows.values(*columns).get()
    return found


def source(client: Client, address: str) -> str:
    """Return the HTML of a page; `address` is one, or the name of one."""
    answer = client.get(address if address.startswith(("/", "?")) else reverse(address))
    assert answer.status_code == 200, (address, answer.status_code)
    return answer.content.decode()


def words(answer: Any) -> str:
    """Return what a reader sees of an answer."""
    return " ".join(html.unescape(strip_tags(answer.content.decode())).split())


def told(answer: Any) -> list[str]:
    """Return the messages that an operation has left for the next page."""
    return [str(message) for message in get_messages(answer.wsgi_request)]


def listed(client: Client, address: str) -> list[int]:
    """Return the keys of the rows that a list shows."""
    return [row.pk for row in client.get(address).context["cl"].result_list]


def policy_shown(client: Client, label: str) -> dict[str, Any]:
    """Return what the page of policies shows of one."""
    policies = client.get(reverse(POLICIES)).context["shown"]["policies"]
    return next(each for each in policies if each["status"].label == label)


def queries(client: Client, address: str) -> int:
    """Return how many queries a page makes."""
    with CaptureQueriesContext(connection) as captured:
        source(client, address)
    return len(captured)


@pytest.fixture
def row() -> Timeout:
    order = Order.objects.create(status="new")
    dq.schedule_timeout(order, "remind", minutes=5, key="k1", payload={"n": 1}, reason="<b>on request</b>")
    dq.extend_timeout(order, "remind", key="k1", minutes=5, reason="asked for it")
    found: Timeout = Timeout.objects.get()
    return found


@pytest.fixture
def staff() -> Staff:
    """`staff("view_timeout", ...)`: the browser of a new member of the staff with just these permissions."""

    def made(*permissions: str) -> Client:
        user = User.objects.create_user(f"staff{User.objects.count()}", is_staff=True)
        found = Permission.objects.filter(codename__in=permissions)
        assert len(found) == len({*permissions})
        user.user_permissions.set(found)
        client = Client()
        client.force_login(user)
        return client

    return made


@pytest.fixture
def viewer(staff: Staff) -> Client:
    return staff("view_timeout")
