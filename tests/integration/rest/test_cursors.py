"""A cursor of a REST list is a position in one order, whatever it contains."""

from __future__ import annotations

import pytest
from rest_framework.test import APIClient

from tests.integration.rest.test_reading import LIST, Schedule, ids

pytestmark = [pytest.mark.dialect, pytest.mark.django_db]


def test_a_cursor_serves_only_its_own_order(viewer: APIClient, schedule: Schedule) -> None:
    for _ in range(2):
        schedule()
    url = viewer.get(f"{LIST}?page_size=1&state=pending").data["next"]
    assert viewer.get(url.replace("state=pending", "queue=default")).status_code == 400


def test_a_cursor_at_the_id_zero_is_before_all_rows(viewer: APIClient, schedule: Schedule) -> None:
    """As a value for an automatic key MySQL and MariaDB refuse zero."""
    schedule()
    answer = viewer.get(f"{LIST}?cursor=-id,0")
    assert (answer.status_code, ids(answer)) == (200, [])


def test_a_cursor_in_a_time_zone_that_no_database_knows_is_read(viewer: APIClient, schedule: Schedule) -> None:
    """PostgreSQL refuses offsets of 16 hours and more."""
    row = schedule()
    answer = viewer.get(f"{LIST}?state=pending&cursor=run_at,2000-01-01T00:00:00%2B23:59,5")
    assert (answer.status_code, ids(answer)) == (200, [row.pk])
    assert viewer.get(f"{LIST}?due_from=2000-01-01T00:00:00%2B23:59").status_code == 200
