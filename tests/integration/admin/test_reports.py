"""The report of a policy: who may see it, what it shows, and what its file contains."""

from __future__ import annotations

import csv
import io
from collections import Counter
from datetime import timedelta

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_delayq import clock
from django_delayq.admin import reports
from django_delayq.ledger import search
from django_delayq.ledger.rollups import roll_up
from django_delayq.models import Timeout
from tests.integration.admin.conftest import Staff, source
from tests.integration.admin.places import POLICIES, UNPAID
from tests.integration.reports.rounds import random_rows, settled_row
from tests.support.typed import Patch
from tests.testapp.models import Customer, Order

pytestmark = pytest.mark.django_db
ADDRESS = reverse("admin:django_delayq_policycontrol_report", args=[UNPAID])


@pytest.fixture
def settled() -> None:
    """Two rounds in time and one that fired, three days ago."""
    at = clock.now() - timedelta(days=3)
    columns = {"due_at": at + timedelta(minutes=5), "since_at": at - timedelta(minutes=25)}
    rows = [settled_row(at, "cancelled", "condition", label=UNPAID, **columns) for _ in range(2)]
    Timeout.objects.bulk_create([*rows, settled_row(at, label=UNPAID)])


@pytest.mark.usefixtures("settled")
def test_the_page_has_a_plot_a_table_and_a_file(viewer: Client, monkeypatch: Patch) -> None:
    text = source(viewer, ADDRESS)
    assert "66.7%" in text and "24 min" in text
    assert text.count("<rect") == 60
    assert "in time 2, other rounds 1</title>" in text
    file = viewer.get(ADDRESS, {"format": "csv", "by": "month"})
    assert file["Content-Disposition"].startswith(f'attachment; filename="{UNPAID}-')
    rows = list(csv.DictReader(io.StringIO(file.content.decode("utf-8-sig"))))
    assert rows[-1]["month"] == "total" and rows[-1]["in_time"] == "2"
    monkeypatch.setattr(reports, "MAX_READ", 2)
    assert "Counted until:" in source(viewer, ADDRESS), "it would read too many rows"


def test_only_who_may_view_timeouts_sees_it_and_only_of_what_has_a_policy_or_rows(staff: Staff, viewer: Client) -> None:
    assert staff("view_policycontrol").get(ADDRESS).status_code == 403
    assert Client().get(ADDRESS).status_code == 302
    assert ADDRESS in source(staff("view_timeout", "view_policycontrol"), POLICIES)
    assert ADDRESS not in source(staff("view_policycontrol"), POLICIES)
    never = ADDRESS.replace("cancel_unpaid", "never")
    assert viewer.get(never).status_code == 404
    Timeout.objects.bulk_create([settled_row(clock.now(), label="testapp.order.never")])
    assert viewer.get(never).status_code == 200
    for asked in (
        "by=year",
        "days=1000000",
        "days=x",
        "by=%00",
        "field=%00&by=field",
        "by=field&field=created_at__year",
    ):
        assert viewer.get(f"{ADDRESS}?{asked}").status_code in {200, 403}, asked


def test_a_field_is_shown_to_those_who_may_view_its_model(viewer: Client) -> None:
    order = Order.objects.create(status="s", customer=Customer.objects.create(name="<b>Ann</b>"))
    Timeout.objects.bulk_create([settled_row(clock.now(), label=UNPAID, object_id=str(order.pk))])
    by = f"{ADDRESS}?by=field&field="
    assert viewer.get(f"{by}customer__name").status_code == 403
    user = User.objects.get()
    user.user_permissions.add(Permission.objects.get(codename="view_customer"))
    text = source(viewer, f"{by}customer__name")
    assert "&lt;b&gt;Ann&lt;/b&gt;" in text and "<b>Ann" not in text
    assert viewer.get(f"{by}customer__password").status_code == 403
    user.user_permissions.add(Permission.objects.get(codename="view_order"))
    assert "no such field" in source(viewer, f"{by}nothing")
    assert "Enter a field" in source(viewer, by)


def read_of(sql: str) -> str:
    """Return what a statement reads of the ledger."""
    if "policycontrol" in sql:
        return "how policies are stopped, and whether a firing has outlived its lease"
    if sql.endswith(" ASC LIMIT 1"):
        return "when the first row of the days was settled, or the first that is not counted"
    if f" LIMIT {search.MAX_COUNT + 1}) " in sql:
        return "how many are overdue, for the banner, and no more than it shows"
    return sql


@pytest.mark.django_db(transaction=True)
def test_the_page_reads_days_and_not_the_ledger(viewer: Client) -> None:
    last = clock.now() - timedelta(hours=1)  # in the hour after midnight, the day before
    Timeout.objects.bulk_create(random_rows(3000, last, 28, [UNPAID]))
    roll_up("default")
    with CaptureQueriesContext(connection) as seen:
        assert "3000" in source(viewer, ADDRESS).replace(",", "")
    assert len(seen) < 15
    stops, settled, overdue = map(read_of, ("policycontrol", " ASC LIMIT 1", f" LIMIT {search.MAX_COUNT + 1}) "))
    read = Counter(read_of(query["sql"]) for query in seen if "django_delayq_timeout" in query["sql"])
    assert read == {stops: 1, settled: 2, overdue: 1}
