"""A project with `USE_TZ = False`: an offset in a request counts, such as that of JavaScript, which writes UTC."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone
from rest_framework.test import APIClient

from django_delayq.models import PolicyControl
from tests.integration.rest.conftest import ClientWith, Schedule

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def operator(client_with: ClientWith, settings: Any) -> Iterator[APIClient]:
    made = client_with("view_timeout", "postpone_timeout", "pause_policy")
    connection.close()
    settings.USE_TZ = False
    yield made
    settings.USE_TZ = True
    connection.close()


def in_an_hour() -> tuple[str, datetime]:
    """Return a datetime as a client writes it, and as the ledger stores it."""
    moment = (datetime.now(UTC) + timedelta(hours=1)).replace(microsecond=0)
    local = timezone.make_naive(moment, timezone.get_default_timezone())
    return moment.isoformat().replace("+00:00", "Z"), local


def test_the_offset_of_a_datetime_counts(operator: APIClient, schedule: Schedule) -> None:
    row, (moment, local) = schedule(minutes=5), in_an_hour()
    assert operator.post(f"/api/timeouts/{row.pk}/postpone/", {"at": moment}).status_code == 200
    row.refresh_from_db()
    assert row.due_at == local
    assert len(operator.get("/api/timeouts/", {"due_from": moment}).json()["results"]) == 1
    assert operator.get("/api/timeouts/", {"due_until": moment}).json()["results"] == []
    assert operator.post("/api/policies/testapp.order.remind/pause/", {"until": moment}).status_code == 200
    assert PolicyControl.objects.get().until == local
    for end in ("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"):
        assert operator.get("/api/timeouts/", {"due_from": end}).status_code == 400
