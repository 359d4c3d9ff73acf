"""Daylight saving: `after` is elapsed time, and a deadline does not depend on a zone."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.db.models import Q

import django_delayq as dq
from django_delayq import clock
from django_delayq.models import Timeout
from tests.testapp.models import Customer, Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]

BERLIN, SAO_PAULO = ZoneInfo("Europe/Berlin"), ZoneInfo("America/Sao_Paulo")
HOURS = timedelta(hours=6)
EVENINGS = {
    "Berlin, an hour is left out": datetime(2025, 3, 29, 23, tzinfo=BERLIN),
    "Berlin, an hour comes twice": datetime(2025, 10, 25, 23, tzinfo=BERLIN),
    "Sao Paulo, an hour is left out": datetime(2018, 11, 3, 21, tzinfo=SAO_PAULO),
    "Sao Paulo, an hour comes twice": datetime(2018, 2, 17, 21, tzinfo=SAO_PAULO),
}
evening = pytest.mark.parametrize("evening", EVENINGS.values(), ids=EVENINGS)


def deadline() -> datetime:
    """Return the deadline of the only timeout, as the database returns it."""
    found: datetime = Timeout.objects.get().due_at
    return found


@pytest.fixture
def told(declare: Callable[..., Any]) -> Any:
    def since(order: Order) -> datetime:
        return datetime.fromisoformat(str(order.note)).astimezone(ZoneInfo(order.customer.name))  # type: ignore[union-attr]

    return declare(Order, name="by_callable", after=HOURS, since=since, when=Q(status="open"))


def opened(since: datetime) -> Order:
    customer = Customer.objects.create(name=str(since.tzinfo))
    return Order.objects.create(status="open", note=since.astimezone(UTC).isoformat(), customer=customer)


@evening
@pytest.mark.usefixtures("told")
def test_after_counts_hours_that_pass_from_what_a_callable_returns_in_local_time(evening: datetime) -> None:
    assert (evening + HOURS).utcoffset() != evening.utcoffset(), "the clocks are changed in these hours"
    with clock.set_to(evening.astimezone(UTC)):
        opened(evening)
    assert deadline() == evening.astimezone(UTC) + HOURS


@evening
def test_a_delay_from_now_and_an_extension_count_hours_that_pass(evening: datetime) -> None:
    order = Order.objects.create(status="new")
    with clock.set_to(evening.astimezone(UTC)):
        dq.schedule_timeout(order, "remind", hours=6)
        assert deadline() == evening.astimezone(UTC) + HOURS
        dq.reschedule_timeout(order, "remind", at=evening)
        row = dq.extend_timeout(order, "remind", hours=6)
    assert row is not None
    assert row.due_at == deadline() == evening.astimezone(UTC) + HOURS


@pytest.mark.parametrize("fold", [0, 1])
def test_of_an_hour_that_comes_twice_each_is_its_own_moment(fold: int) -> None:
    at = datetime(2025, 10, 26, 2, 30, tzinfo=BERLIN, fold=fold)
    order = Order.objects.create(status="new")
    with clock.set_to(datetime(2025, 10, 25, 12, tzinfo=UTC)):
        row = dq.schedule_timeout(order, "remind", at=at)
        assert row.due_at.timestamp() == deadline().timestamp() == at.timestamp()
    assert deadline() == datetime(2025, 10, 26, fold, 30, tzinfo=UTC)
    with clock.set_to(deadline() - timedelta(microseconds=1)):
        assert not Timeout.objects.due().exists()
    with clock.set_to(deadline()):
        assert Timeout.objects.due().exists()


def test_an_hour_that_is_left_out_is_the_moment_that_python_says() -> None:
    at = datetime(2025, 3, 30, 2, 30, tzinfo=BERLIN)
    with clock.set_to(datetime(2025, 3, 29, 12, tzinfo=UTC)):
        dq.schedule_timeout(Order.objects.create(status="new"), "remind", at=at)
    assert deadline() == datetime(2025, 3, 30, 1, 30, tzinfo=UTC)


@pytest.mark.parametrize("fold", [0, 1])
@pytest.mark.usefixtures("told")
def test_a_round_that_began_in_an_hour_that_comes_twice_is_one_round(fold: int) -> None:
    """Python finds such a datetime unequal to itself in another zone: each save would treat it as a new one."""
    began = datetime(2025, 10, 26, 2, 30, tzinfo=BERLIN, fold=fold)
    with clock.set_to(datetime(2025, 10, 26, 3, tzinfo=UTC)):
        order = opened(began)
        before = Timeout.objects.values("history", "idempotency_key", "due_at", "since_at").get()
        for _ in range(3):
            order.save()
    assert Timeout.objects.values("history", "idempotency_key", "due_at", "since_at").get() == before
    assert deadline() == began.astimezone(UTC) + HOURS
