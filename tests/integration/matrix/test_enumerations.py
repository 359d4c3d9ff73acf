"""Members of `class Code(str, Enum)`: their `str()` is `Code.SUMMER`, but Django stores and compares their value."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any

import pytest
from django.utils import timezone

import django_delayq as dq
from django_delayq.models import Timeout
from django_delayq.policy.policies import registry
from django_delayq.testing import fire_due
from tests.testapp.models import Order, Voucher

if TYPE_CHECKING:
    from django_delayq import TimeoutPolicy

Declare = Callable[..., "TimeoutPolicy[Any]"]
pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
DAY = timedelta(days=1)


class Code(str, Enum):  # noqa: UP042 - `StrEnum` has another `str()`
    SUMMER = "summer"
    FIRST = "first"


def test_an_object_whose_primary_key_is_a_member_has_one_timeout() -> None:
    made = Voucher.objects.create(code=Code.SUMMER, issued_at=timezone.now() - DAY)
    read = Voucher.objects.get()
    read.save()
    dq.schedule_timeouts([made], "expire", on_conflict="keep")
    row = Timeout.objects.get()
    assert (row.object_id, dq.get_deadline(made, "expire")) == ("summer", dq.get_deadline(read, "expire"))
    assert fire_due() == 1
    read.refresh_from_db()
    assert read.status == "expired"
    assert dq.cancel_timeout(made, "expire") is dq.cancel_timeout(read, "expire") is False


def test_a_key_is_the_value_of_a_member(order: Order, declare: Declare) -> None:
    former = declare(Order, name="former")
    row = dq.schedule_timeout(order, former, key=Code.FIRST, hours=1)
    assert dq.schedule_timeouts([order], former, key="first", hours=2, on_conflict="keep") == 0
    assert dq.get_deadline(order, former, "first") == row.due_at
    registry.remove(former)
    renamed = declare(Order, name="renamed", aliases=["former"])
    assert dq.schedule_timeout(order, renamed, key="first", hours=3).pk == row.pk
    assert dq.cancel_timeout(order, renamed, key=Code.FIRST) is True
    assert Timeout.objects.get().state == "cancelled"
