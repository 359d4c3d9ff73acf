"""What only mypy with the plugin of django-stubs reports, because it follows `annotate`. Checked, never run."""

from __future__ import annotations

from datetime import datetime
from typing import assert_type

from django.db.models import QuerySet

from django_delayq import Deadline
from tests.testapp.models import Order


def annotated(orders: QuerySet[Order]) -> None:
    for order in orders.annotate(due=Deadline("cancel_unpaid")):
        assert_type(order.due, datetime | None)
        order.due.isoformat()  # type: ignore[union-attr]
