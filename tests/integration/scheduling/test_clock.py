"""The one seam for time: the database's UTC clock decides, whatever zone the server and the session are in."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.core.checks import run_checks
from django.db import connection, connections
from django.db.models import Q
from django.db.models.functions import Now
from django.utils import timezone

import django_delayq as dq
from django_delayq import clock
from django_delayq.models import Timeout
from django_delayq.sql.now import DatabaseNow, database_now
from tests.support.typed import Declare
from tests.testapp.models import Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]


def has_one_that_is_due() -> None:
    """Schedule one in seven hours and one of a second ago, and check that only the second one is due."""
    order = Order.objects.create()
    dq.schedule_timeout(order, "remind", hours=7, key="later")
    dq.schedule_timeout(order, "remind", seconds=0, key="now")
    Timeout.objects.filter(key="now").update(run_at=timezone.now() - timedelta(seconds=1))
    assert list(Timeout.objects.due().values_list("key", flat=True)) == ["now"]


def test_a_row_due_in_seven_hours_is_not_due_and_one_due_a_second_ago_is() -> None:
    moment = database_now("default")
    assert moment.utcoffset() == timedelta(0)
    assert abs(moment - datetime.now(UTC)) < timedelta(seconds=30)
    has_one_that_is_due()


@pytest.mark.skipif(connection.vendor != "mysql", reason="only the test's MariaDB runs in another time zone")
def test_djangos_own_now_would_fire_seven_hours_early_on_this_server() -> None:
    """The trap itself, where the server is set up for it (+08:00): why `DatabaseNow` exists."""
    dq.schedule_timeout(Order.objects.create(), "remind", hours=7)
    assert Timeout.objects.filter(run_at__lte=Now()).exists()
    assert not Timeout.objects.due().exists()


@contextmanager
def kept_in(zone: str) -> Iterator[None]:
    """Set `TIME_ZONE` in DATABASES."""
    # Not `connection`: that is a proxy with a `__dict__` of its own, and what is cached would stay for later tests.
    wrapper = connections["default"]

    def put(name: str | None) -> None:
        wrapper.close()
        wrapper.settings_dict["TIME_ZONE"] = name
        for cached in ("timezone", "timezone_name"):
            wrapper.__dict__.pop(cached, None)

    put(zone)
    try:
        assert wrapper.timezone_name == zone
        yield
    finally:
        put(None)
    assert wrapper.timezone_name == "UTC"


@pytest.mark.parametrize("zone", ["America/Sao_Paulo", "Asia/Shanghai"])
@pytest.mark.skipif(connection.vendor == "postgresql", reason="its timestamps do not depend on a zone")
def test_a_database_kept_in_local_time_is_neither_early_nor_late(zone: str) -> None:
    """With `TIME_ZONE` in DATABASES, MySQL and SQLite hold local times: UTC beside them would be hours off."""
    with kept_in(zone):
        has_one_that_is_due()
        read = Timeout.objects.annotate(moment=DatabaseNow()).values_list("moment", flat=True)[0]
        assert abs(read - timezone.now()) < timedelta(seconds=30)


@pytest.mark.parametrize(
    ("zone", "is_named"),
    [("Europe/Berlin", True), ("Africa/Casablanca", True), ("Asia/Shanghai", False)],  # the second in Ramadan only
    ids=str,
)
def test_a_check_names_a_database_kept_in_a_local_time_that_repeats_an_hour(zone: str, is_named: bool) -> None:
    """In that hour a timeout may fire early, because the column does not hold which of the two hours was meant."""
    with kept_in(zone):
        found = [each.msg for each in run_checks(tags=["django_delayq"]) if each.id == "django_delayq.W006"]
    expected = is_named and connection.vendor != "postgresql"  # its timestamps do not depend on a zone
    assert [zone in message and "'default'" in message for message in found] == [True] * expected


@pytest.fixture
def naive_order(settings: Any) -> Iterator[Order]:
    """An order in a project without time zones."""
    order = Order.objects.create()
    connection.close()
    settings.USE_TZ = False
    yield order
    settings.USE_TZ = True
    connection.close()


def test_without_time_zones_everything_is_local_whatever_zone_a_request_has_activated(naive_order: Order) -> None:
    with timezone.override("Asia/Tokyo"):
        row = dq.schedule_timeout(naive_order, "remind", minutes=5)
        assert abs(clock.to_ms(row.due_at) / 1000 - time.time() - 300) < 60
        assert abs(database_now("default") - clock.now()) < timedelta(minutes=1)
        with dq.before_deadline(naive_order, "remind", strict=True) as cancelled:
            assert cancelled == row
    dq.schedule_timeout(naive_order, "remind", seconds=0, key="now")
    due = Timeout.objects.filter(run_at__lte=database_now("default") + timedelta(seconds=5), state="pending")
    assert set(due.values_list("key", flat=True)) == {"now"}
    with pytest.raises(dq.InvalidDelay, match="aware"):
        dq.schedule_timeout(naive_order, "remind", at=datetime.now(UTC))


# Daylight saving: `after` is elapsed time, and a deadline does not depend on a zone.
BERLIN, SAO_PAULO = ZoneInfo("Europe/Berlin"), ZoneInfo("America/Sao_Paulo")
HOURS = timedelta(hours=6)
EVENINGS = {
    "Berlin, an hour is left out": datetime(2025, 3, 29, 23, tzinfo=BERLIN),
    "Berlin, an hour comes twice": datetime(2025, 10, 25, 23, tzinfo=BERLIN),
    "Sao Paulo, an hour is left out": datetime(2018, 11, 3, 21, tzinfo=SAO_PAULO),
    "Sao Paulo, an hour comes twice": datetime(2018, 2, 17, 21, tzinfo=SAO_PAULO),
}


def deadline() -> datetime:
    """Return the deadline of the only timeout, as the database returns it."""
    found: datetime = Timeout.objects.get().due_at
    return found


@pytest.mark.parametrize("evening", EVENINGS.values(), ids=EVENINGS)
def test_after_counts_hours_that_pass_from_what_a_callable_returns_in_local_time(
    evening: datetime, declare: Declare
) -> None:
    assert (evening + HOURS).utcoffset() != evening.utcoffset(), "the clocks are changed in these hours"
    declare(Order, name="by_callable", after=HOURS, since=lambda order: evening, when=Q(status="open"))
    with clock.set_to(evening.astimezone(UTC)):
        Order.objects.create(status="open")
    assert deadline() == evening.astimezone(UTC) + HOURS


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
