"""The report of a policy by REST."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from rest_framework.test import APIClient

from django_delayq import clock
from django_delayq.models import Timeout
from django_delayq.monitoring import reports
from tests.integration.reports.rounds import settled_row
from tests.integration.rest.conftest import ClientWith
from tests.testapp.models import Customer, Order

pytestmark = pytest.mark.django_db
LABEL = "testapp.order.cancel_unpaid"
ADDRESS = f"/api/policies/{LABEL}/report/"


@pytest.fixture
def rows() -> None:
    now, order = clock.now(), Order.objects.create(status="s", customer=Customer.objects.create(name="Ann"))
    in_time = {"due_at": now + timedelta(minutes=5), "since_at": now - timedelta(minutes=25)}
    paid = settled_row(now, "cancelled", "condition", label=LABEL, object_id="gone", **in_time)
    Timeout.objects.bulk_create([settled_row(now, label=LABEL, object_id=str(order.pk)), paid])


def test_it_is_the_same_as_in_python(viewer: APIClient, rows: None) -> None:
    found: Any = viewer.get(ADDRESS, {"by": "month"}).json()
    (line,), total = found["lines"], found["total"]
    expected = reports.policy_report(LABEL, by="month")
    assert [line[name] for name in reports.FIGURES] == [getattr(expected.lines[0], name) for name in reports.FIGURES]
    assert (total["rounds"], total["in_time"], total["share"]) == (2, 1, 0.5)
    assert (found["policy"], found["first"], found["counted_until"]) == (LABEL, str(expected.first), None)


def test_the_days_are_chosen_and_wrong_ones_refused(viewer: APIClient, admin_client: Any, rows: None) -> None:
    assert viewer.get(ADDRESS, {"first": "2020-01-01", "last": "2020-12-31"}).json()["total"]["rounds"] == 0
    assert len(viewer.get(ADDRESS).json()["lines"]) == 1
    for asked, field in (
        *(({"first": "2026-02-02", "last": "2026-01-01"}, "first"), ({"last": "9999-12-31"}, "first")),
        *(({"first": "x"}, "first"), ({"by": ""}, "by"), ({"days": "3"}, "days")),
    ):
        answer = viewer.get(ADDRESS, asked)
        assert (answer.status_code, {*answer.json()}) == (400, {field}), asked
    for by in ("created_at__year", "pk", "__", "timeouts", "customer__", "customer__nothing"):
        answer = admin_client.get(ADDRESS, {"by": by})
        assert (answer.status_code, {*answer.json()}) == (400, {"by"}), by


def test_it_needs_the_permission_to_view_timeouts(client_with: ClientWith, rows: None) -> None:
    assert client_with("view_policycontrol").get(ADDRESS).status_code == 403
    assert client_with().get(ADDRESS).status_code == 403
    assert client_with("view_timeout").get(ADDRESS.replace(LABEL, "testapp.order.never")).status_code == 404


def test_a_column_needs_the_permission_to_view_its_model(viewer: APIClient, rows: None) -> None:
    assert viewer.get(ADDRESS, {"by": "customer__name"}).status_code == 403
    User.objects.get().user_permissions.add(*Permission.objects.filter(codename__in=["view_customer", "view_order"]))
    found = viewer.get(ADDRESS, {"by": "customer__name"}).json()
    assert [(line["name"], line["rounds"]) for line in found["lines"]] == [("(deleted)", 1), ("Ann", 1)]
