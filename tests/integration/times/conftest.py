"""What tests of spans share: an office, its tickets, and the clock at a Monday."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.conf import settings

from django_delayq import TimeoutPolicy, WorkingHours, clock
from django_delayq.models import Timeout
from tests.testapp.desk import Team, Ticket

BERLIN = ZoneInfo("Europe/Berlin")
OFFICE = WorkingHours(BERLIN, {"mon-fri": ("09:00-12:00", "13:00-17:00")})
Declare = Callable[..., TimeoutPolicy[Any]]
HOUR = timedelta(hours=1)


def at(text: str, day: str = "2026-06-01") -> datetime:
    """The wall time `text` in Berlin, as `USE_TZ` has datetimes: of a day of the week that begins on 1 June 2026."""
    name, _, clock_time = text.rpartition(" ")
    moment = datetime.fromisoformat(f"{day} {clock_time}")
    if name:
        moment += timedelta(days=["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"].index(name))
    moment = moment.replace(tzinfo=BERLIN)
    return moment if settings.USE_TZ else clock.fitting(moment)


@pytest.fixture(autouse=True)
def monday() -> Iterator[None]:
    """It is Monday, 1 June 2026, 10:00 in Berlin."""
    with clock.set_to(at("Mon 10:00")):
        yield


@pytest.fixture
def team() -> Team:
    return Team.objects.create(zone="Europe/Berlin", hours="09:00-17:00")


@pytest.fixture
def ticket(team: Team) -> Ticket:
    """A ticket of `team` that no policy concerns, because it was not opened yet."""
    return Ticket.objects.create(team=team)


def opened(team: Team | None = None, when: str = "Mon 10:00", **values: Any) -> Ticket:
    return Ticket.objects.create(team=team, opened_at=at(when), **values)


def only_row() -> Timeout:
    row: Timeout = Timeout.objects.get()
    return row
