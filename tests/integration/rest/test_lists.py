"""A list is read page by page in one order; its filters find what they say, and what makes no sense is named."""

from __future__ import annotations

from datetime import timedelta
from urllib.parse import quote

import pytest
from django.utils import timezone
from rest_framework.test import APIClient

from django_delayq.ledger import search
from django_delayq.models import Timeout
from tests.integration.rest.conftest import Schedule, ids, settle
from tests.integration.rest.places import LIST
from tests.support.typed import Patch
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db


def moment(**ago: float) -> str:
    return quote((timezone.now() + timedelta(**ago)).isoformat())


def all_pages(client: APIClient, query: str) -> list[list[int]]:
    found, url = [], f"{LIST}?{query}"
    while url:
        answer = client.get(url)
        found.append(ids(answer))
        url = answer.data["next"]
    return found


def all_rows(client: APIClient, query: str) -> list[int]:
    return [pk for page in all_pages(client, query) for pk in page]


def test_pages_have_neither_gap_nor_double_also_through_equal_moments(viewer: APIClient, schedule: Schedule) -> None:
    at = timezone.now() + timedelta(hours=1)
    rows = [schedule(minutes=None, at=at + timedelta(minutes=number // 4)).pk for number in range(10)]
    assert all_rows(viewer, "page_size=3") == rows[::-1]
    assert all_rows(viewer, "page_size=3&state=pending") == rows
    first = viewer.get(f"{LIST}?page_size=2").data["next"]
    schedule()
    Timeout.objects.filter(pk=rows[9]).delete()
    assert ids(viewer.get(first)) == rows[7:5:-1], "rows that come and go between pages move nothing"
    Timeout.objects.update(state="fired", cause="due", settled_at=timezone.now(), slot_taken=None)
    assert all_rows(viewer, "page_size=3&state=fired")[1:] == rows[8::-1]
    assert len(all_pages(viewer, "page_size=10")) == 1


def test_what_no_index_finds_is_looked_for_a_bounded_way(
    viewer: APIClient, schedule: Schedule, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(search, "MAX_COUNT", 4)
    rows = [schedule(minutes=number + 1).pk for number in range(11)]
    Timeout.objects.filter(pk__in=[rows[0], rows[9]]).update(queue="slow")
    assert all_pages(viewer, "queue=slow") == [[rows[9]], [], [rows[0]]]
    assert all_pages(viewer, "queue=slow&state=pending") == [[rows[0]], [], [rows[9]]]
    assert all_pages(viewer, "queue=default&page_size=3") == [
        [rows[10], rows[8], rows[7]], rows[6:3:-1], rows[3:0:-1], [],
    ]  # fmt: skip


@pytest.mark.dialect
def test_a_cursor_is_a_position_in_its_own_order_whatever_it_contains(viewer: APIClient, schedule: Schedule) -> None:
    rows = [schedule().pk for _ in range(2)]
    url = viewer.get(f"{LIST}?page_size=1&state=pending").data["next"]
    assert viewer.get(url.replace("state=pending", "queue=default")).status_code == 400
    # As a value for an automatic key MySQL and MariaDB refuse zero; PostgreSQL refuses offsets of 16 hours and more.
    assert ids(viewer.get(f"{LIST}?cursor=-id,0")) == []
    assert ids(viewer.get(f"{LIST}?state=pending&cursor=run_at,2000-01-01T00:00:00%2B23:59,5")) == rows
    assert viewer.get(f"{LIST}?due_from=2000-01-01T00:00:00%2B23:59").status_code == 200


@pytest.mark.dialect
def test_due_filters_find_no_settled_rows_of_an_object_or_key(viewer: APIClient, schedule: Schedule) -> None:
    """Settled rows keep the time of their last attempt."""
    past, order = timezone.now() - timedelta(hours=1), Order.objects.create(status="new")
    options = {"order": order, "key": "k"}
    settle(schedule(**options), run_at=past)
    settle(schedule(minutes=60, **options), "cancelled", "hand")
    firing = settle(schedule(**options), "firing", "", settled_at=None, run_at=past)
    row = schedule(minutes=60, **options)
    of, until = f"object=testapp.order:{order.pk}", f"due_until={moment(minutes=30)}"
    assert ids(viewer.get(f"{LIST}?{of}&due_from={moment(minutes=30)}")) == [row.pk]
    assert ids(viewer.get(f"{LIST}?{of}&{until}")) == ids(viewer.get(f"{LIST}?{of}&overdue=true")) == []
    assert ids(viewer.get(f"{LIST}?{of}&{until}&state=firing")) == [firing.pk]
    Timeout.objects.filter(pk=row.pk).update(run_at=past)
    assert ids(viewer.get(f"{LIST}?{of}&overdue=true")) == [row.pk]


def test_bad_input_is_named(viewer: APIClient) -> None:
    new_year = "2026-01-01T00:00:00Z"
    for query in (
        *("stat=dead", "overdue=maybe", "policy=%00", "key=%00", "policy=remind", "policy=testapp.order.remnd"),
        *("due_from=0001-01-01T00:00:00%2B14:00", "due_until=9999-12-31T23:59:59-14:00"),
        *("cursor=x", "cursor=%00", "cursor=W10", "page_size=0", "page_size=x", "page_size=%C2%B2"),
        *(f"state=pending&settled_from={new_year}", "object=testapp.order%00:1", "object=testapp.voucher:A%00B"),
    ):
        answer = viewer.get(f"{LIST}?{query}")
        assert answer.status_code == 400, query
        assert query.partition("=")[0] in answer.data or "non_field_errors" in answer.data, query
