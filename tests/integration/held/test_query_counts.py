"""How many queries a page of rows costs: as many for thirty rows as for three."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import Q
from django.test.utils import CaptureQueriesContext

import django_delayq as dq
from django_delayq import Working, clock, operations
from django_delayq.arming.sync import sync_policy
from django_delayq.models import Timeout
from tests.integration.spans.conftest import at
from tests.testapp.desk import Team, Ticket

pytestmark = pytest.mark.django_db(transaction=True)
Declare = Callable[..., dq.TimeoutPolicy[Any]]


@pytest.fixture(autouse=True)
def monday() -> Iterator[None]:
    with clock.set_to(at("Mon 10:00")):
        yield


@pytest.fixture
def policy(declare: Declare) -> dq.TimeoutPolicy[Any]:
    """Its deadline depends on the object, and it has a grace."""
    after = Working(hours=8, calendar="team__calendar")
    return declare(
        Ticket, name="answer", after=after, since="opened_at", when=Q(status="open"), grace=timedelta(days=1)
    )


def tickets(count: int) -> list[Ticket]:
    """Store tickets, each of another team, without arming their timeouts."""
    teams = Team.objects.bulk_create(Team(zone="Europe/Berlin") for _ in range(count))
    return list(Ticket.objects.bulk_create(Ticket(team=team, opened_at=at("Mon 10:00")) for team in teams))


def rows_of(found: list[Ticket]) -> Any:
    return Timeout.objects.filter(object_id__in=[str(ticket.pk) for ticket in found])


def hold(policy: Any, found: list[Ticket]) -> None:
    operations.hold_timeout(rows_of(found), by="anna")


def resume(policy: Any, found: list[Ticket]) -> None:
    operations.resume_timeout(rows_of(found), by="anna")


def arm(policy: Any, found: list[Ticket]) -> None:
    sync_policy(policy, "default")


@pytest.mark.xfail(
    strict=True, reason="The state of the policy and the object with its calendar are read for each row."
)
@pytest.mark.parametrize("act", [hold, resume, arm])
def test_the_queries_of_a_page_do_not_grow_with_its_rows(policy: Any, act: Callable[..., None]) -> None:
    counts = []
    for number in (3, 30):
        found = tickets(number)
        for before in {hold: [arm], resume: [arm, hold]}.get(act, []):
            before(policy, found)
        with CaptureQueriesContext(connection) as captured:
            act(policy, found)
        counts.append(len(captured))
        assert rows_of(found).count() == number
    assert counts[0] == counts[1]
