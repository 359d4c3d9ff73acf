"""Due filters find pending rows only: settled rows keep the time of their last attempt."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone
from rest_framework.test import APIClient

from django_delayq.models import Timeout
from tests.integration.rest.test_reading import LIST, Schedule, ids, moment, settle
from tests.testapp.models import Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db]


@pytest.mark.parametrize("name", ["object", "key", "search"])
def test_due_filters_find_no_settled_rows_of_one_object_key_or_search(
    viewer: APIClient, schedule: Schedule, name: str
) -> None:
    past, order = timezone.now() - timedelta(hours=1), Order.objects.create(status="new")
    options = {"order": order, "key": "k"}
    settle(schedule(**options), run_at=past)
    settle(schedule(minutes=60, **options), "cancelled", "hand")
    firing = settle(schedule(**options), "firing", "", settled_at=None, run_at=past)
    row = schedule(minutes=60, **options)
    of = {"object": f"object=testapp.order:{order.pk}", "key": "key=k", "search": f"search={order.pk}"}[name]
    half = moment(minutes=30)

    assert ids(viewer.get(f"{LIST}?{of}&due_from={half}")) == [row.pk]
    assert ids(viewer.get(f"{LIST}?{of}&due_until={half}")) == []
    assert ids(viewer.get(f"{LIST}?{of}&due_until={half}&state=firing")) == [firing.pk]
    assert ids(viewer.get(f"{LIST}?{of}&overdue=true")) == []
    Timeout.objects.filter(pk=row.pk).update(run_at=past)
    assert ids(viewer.get(f"{LIST}?{of}&overdue=true")) == [row.pk]
