"""The report of a policy: who may see it, what it shows, and what its file contains."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_delayq import clock
from django_delayq.admin import reports
from django_delayq.ledger.rollups import roll_up
from django_delayq.models import Timeout
from tests.integration.reports.rounds import random_rows, settled_row
from tests.testapp.models import Customer, Order

pytestmark = pytest.mark.django_db
LABEL = "testapp.order.cancel_unpaid"
ADDRESS = reverse("admin:django_delayq_policycontrol_report", args=[LABEL])


def settle(**ago: float) -> None:
    at = clock.now() - timedelta(**ago)
    columns = {"due_at": at + timedelta(minutes=5), "since_at": at - timedelta(minutes=25)}
    Timeout.objects.bulk_create(
        [
            settled_row(at, "cancelled", "condition", label=LABEL, **columns),
            settled_row(at, "cancelled", "condition", label=LABEL, **columns),
            settled_row(at, label=LABEL),
        ]
    )


def test_the_page_has_a_plot_a_table_and_a_file(viewer: Client) -> None:
    settle(days=3)
    answer = viewer.get(ADDRESS)
    text = answer.content.decode()
    assert "66.7%" in text and "24 min" in text
    assert text.count("<rect") == 60
    assert "in time 2, other rounds 1</title>" in text
    file = viewer.get(ADDRESS, {"format": "csv", "by": "month"})
    assert file["Content-Disposition"].startswith(f'attachment; filename="{LABEL}-')
    rows = list(csv.DictReader(io.StringIO(file.content.decode("utf-8-sig"))))
    assert rows[-1]["month"] == "total" and rows[-1]["in_time"] == "2"


def test_only_those_who_may_view_timeouts_see_it(staff: Callable[..., Client], viewer: Client) -> None:
    assert staff("view_policycontrol").get(ADDRESS).status_code == 403
    assert Client().get(ADDRESS).status_code == 302
    policies = reverse("admin:django_delayq_policycontrol_changelist")
    assert ADDRESS in staff("view_timeout", "view_policycontrol").get(policies).content.decode()
    assert ADDRESS not in staff("view_policycontrol").get(policies).content.decode()


def test_a_label_without_policy_and_rows_is_not_found(viewer: Client) -> None:
    assert viewer.get(ADDRESS.replace("cancel_unpaid", "never")).status_code == 404
    Timeout.objects.bulk_create([settled_row(clock.now(), label="testapp.order.never")])
    assert viewer.get(ADDRESS.replace("cancel_unpaid", "never")).status_code == 200


def test_a_field_is_shown_to_those_who_may_view_its_model(viewer: Client) -> None:
    order = Order.objects.create(status="s", customer=Customer.objects.create(name="<b>Ann</b>"))
    Timeout.objects.bulk_create([settled_row(clock.now(), label=LABEL, object_id=str(order.pk))])
    asked = {"by": "field", "field": "customer__name"}
    assert viewer.get(ADDRESS, asked).status_code == 403
    user = User.objects.get()
    user.user_permissions.add(Permission.objects.get(codename="view_customer"))
    text = viewer.get(ADDRESS, asked).content.decode()
    assert "&lt;b&gt;Ann&lt;/b&gt;" in text and "<b>Ann" not in text
    assert viewer.get(ADDRESS, {"by": "field", "field": "customer__password"}).status_code == 403
    user.user_permissions.add(Permission.objects.get(codename="view_order"))
    assert "no such field" in viewer.get(ADDRESS, {"by": "field", "field": "nothing"}).content.decode()
    assert "Enter a field" in viewer.get(ADDRESS, {"by": "field"}).content.decode()


@pytest.mark.parametrize(
    "asked", ["by=year", "days=1000000", "days=x", "by=%00", "field=%00&by=field", "by=field&field=created_at__year"]
)
def test_a_wrong_address_is_answered_without_an_error(viewer: Client, asked: str) -> None:
    assert viewer.get(f"{ADDRESS}?{asked}").status_code in {200, 403}


@pytest.mark.django_db(transaction=True)
def test_the_page_reads_days_and_not_the_ledger(viewer: Client) -> None:
    last = clock.now() - timedelta(hours=1)  # in the hour after midnight, the day before
    Timeout.objects.bulk_create(random_rows(3000, last, 28, [LABEL]))
    roll_up("default")
    with CaptureQueriesContext(
        connection,
    ) as seen:
        assert "3000" in viewer.get(ADDRESS).content.decode().replace(",", "")
    read = [query["sql"] for query in seen if "django_delayq_timeout" in query["sql"]]
    assert len(seen) < 15
    rows = [sql for sql in read if "policycontrol" not in sql]  # how a policy is stopped
    assert len(read) <= 5 and all("LIMIT 1" in sql for sql in rows)


def test_a_page_that_would_read_too_many_rows_says_until_when_it_has_counted(
    viewer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "MAX_READ", 2)
    settle(days=3)
    assert "Counted until:" in viewer.get(ADDRESS).content.decode()
