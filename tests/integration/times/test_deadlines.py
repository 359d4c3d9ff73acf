"""Deadlines that are counted in spans: armed, scheduled, moved, and left alone by the sync."""

from __future__ import annotations

from datetime import date, timedelta
from types import FunctionType
from typing import Any

import pytest
from dateutil.relativedelta import relativedelta
from django.db import connection
from django.db.models import Q
from django.utils.connection import ConnectionDoesNotExist

import django_delayq as dq
from django_delayq import PolicyError, Wall, Working, WorkingHours, clock
from django_delayq.arming.sync import sync_policy, sync_timeouts
from django_delayq.checks import check_policies
from django_delayq.exceptions import InvalidDelay
from django_delayq.models import Timeout
from django_delayq.monitoring.misfits import delays
from django_delayq.operations import change_delay, preview_delay
from django_delayq.testing import fire_due
from django_delayq.times.paths import value_at
from tests.integration.times.conftest import HOUR, OFFICE, Declare, at, only_row, opened
from tests.support.seen import sql_of
from tests.testapp.desk import Team, Ticket

pytestmark = pytest.mark.django_db(transaction=True)
EVENING = Wall(at="18:00", zone="Europe/Berlin")
OPEN: dict[str, Any] = {"since": "opened_at", "when": Q(status="open")}


class Custom:
    """A span of the application: to the end of the present hour."""

    def end(self, since: Any, _obj: Any) -> Any:
        return since.replace(minute=0, second=0) + timedelta(hours=1)

    def __str__(self) -> str:
        return "until the hour is over"


def name_of(value: Any) -> str:
    return "a function" if isinstance(value, FunctionType) else str(value)[:40]


SPANS: list[tuple[Any, str]] = [
    (Working(hours=4, calendar=OFFICE), "Mon 15:00"),
    (Working(hours=8, calendar="team__calendar"), "Tue 10:00"),
    (Working(hours=4, calendar=lambda ticket: OFFICE if ticket.status == "open" else None), "Mon 15:00"),
    (Working(days=3, at="09:00", calendar=OFFICE), "Thu 09:00"),
    (Wall(days=1, at="08:00", zone="team__zone"), "Tue 08:00"),
    (relativedelta(days=2), "Wed 10:00"),
    (Custom(), "Mon 11:00"),
    (lambda ticket: Working(minutes=30 * len(ticket.status), calendar=OFFICE), "Mon 12:00"),
]


@pytest.mark.parametrize(("span", "due"), SPANS, ids=name_of)
def test_each_way_to_arm_gives_the_same_deadline(declare: Declare, team: Team, span: Any, due: str) -> None:
    declare(Ticket, name="answer", after=span, **OPEN)
    opened(team)
    Ticket.objects.bulk_create([Ticket(team=team, opened_at=at("Mon 10:00")) for _ in range(3)])
    sync_timeouts(Ticket.objects.all()[:2])
    dq.schedule_timeout(Ticket.objects.all()[2], "answer")
    dq.schedule_timeouts(Ticket.objects.all()[3:], "answer")
    assert [row.due_at for row in Timeout.objects.order_by("id")] == [at(due)] * 4


@pytest.mark.parametrize(("span", "due"), SPANS[:-1], ids=name_of)  # a function of the object is for declarations
def test_each_verb_takes_a_span(declare: Declare, team: Team, span: Any, due: str) -> None:
    declare(Ticket, name="answer")
    first, second = (Ticket.objects.create(team=team) for _ in range(2))
    rows: Any = dq.pending_timeouts(policy="testapp.ticket.answer")
    assert dq.schedule_timeout(first, "answer", after=span).due_at == at(due)
    dq.schedule_timeout(first, "answer", hours=100)
    assert dq.reschedule_timeout(first, "answer", after=span) is not None
    assert only_row().due_at == at(due)
    for act in (
        lambda: dq.schedule_timeouts([first, second], "answer", after=span),
        lambda: dq.extend_timeouts(rows, after=span) if dq.reschedule_timeouts(rows, at=at("Mon 10:00")) else 0,
        lambda: dq.reschedule_timeouts(rows, after=span),
    ):
        assert act() == 2
        assert {row.due_at for row in Timeout.objects.all()} == {at(due)}


def test_an_object_without_the_calendar_is_exempt(declare: Declare, team: Team) -> None:
    declare(Ticket, name="answer", after=Working(hours=6, calendar="team__calendar"), **OPEN)
    opened(None)
    with_none = opened(Team.objects.create(hours=""))
    assert not Timeout.objects.exists()
    with pytest.raises(InvalidDelay, match="no deadline of its own"):
        dq.schedule_timeout(with_none, "answer")
    with pytest.raises(InvalidDelay, match="has no end"):
        dq.schedule_timeout(with_none, "answer", after=Working(hours=6, calendar="team__calendar"))


@pytest.mark.parametrize("span", [Working(hours=-1, calendar=OFFICE), Wall(days=-1), timedelta(hours=-1)])
def test_a_deadline_before_now_is_refused_where_the_delay_counts_from_now(
    declare: Declare, ticket: Ticket, span: Any
) -> None:
    declare(Ticket, name="answer")
    with pytest.raises(InvalidDelay, match="must not be negative"):
        dq.schedule_timeout(ticket, "answer", after=span)
    with pytest.raises(PolicyError, match="must not be negative without since"):
        declare(Ticket, name="wrong", after=span)


DATES: list[tuple[str, Any, str]] = [
    ("promised_on", EVENING, "Wed 18:00"),
    ("promised_on", Wall(days=-1, at="08:00", zone="Europe/Berlin"), "Tue 08:00"),
    ("promised_on", Working(days=1, at="09:00", calendar=OFFICE), "Thu 09:00"),
    ("team__opens_on", Wall(at="18:00", zone="team__zone"), "Wed 18:00"),
    ("team__opens_at", timedelta(hours=1), "Wed 11:00"),
    ("team__opens_at", Working(hours=1, calendar="team__calendar"), "Wed 11:00"),
]


@pytest.mark.parametrize(("since", "after", "due"), DATES, ids=name_of)
def test_since_may_be_a_date_or_a_path(declare: Declare, since: str, after: Any, due: str) -> None:
    """Each way to arm; the sync leaves alone what fits, without a lock."""
    policy = declare(Ticket, name="deliver", after=after, since=since, when=Q(status="open"))
    team = Team.objects.create(zone="Europe/Berlin", opens_on=date(2026, 6, 3), opens_at=at("Wed 10:00"))
    values = {"team": team, "promised_on": date(2026, 6, 3)}
    tickets = [Ticket.objects.create(**values)]
    Ticket.objects.bulk_create([Ticket(**values) for _ in range(3)])
    tickets = list(Ticket.objects.order_by("pk"))
    sync_timeouts(tickets[1:2])
    dq.schedule_timeout(tickets[2], "deliver")
    dq.schedule_timeouts(tickets[3:], "deliver")
    rows: Any = list(Timeout.objects.order_by("id"))
    assert [row.due_at for row in rows] == [at(due)] * 4
    assert len({row.since_at for row in rows}) == 1
    tickets[0].save()
    sent = sql_of(lambda: sync_policy(policy, "default"))
    assert not [sql for sql in sent if "FOR UPDATE" in sql and "testapp_ticket" in sql]
    assert list(Timeout.objects.order_by("id")) == rows


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"since": "promised_on", "after": timedelta(hours=1)}, "needs a time of day"),
    ({"since": "promised_on", "after": Wall(days=1)}, "needs a time of day"),
    ({"since": "team__nothing", "after": Wall(days=1)}, "is not a DateTimeField or DateField"),
    ({"since": "opened_at", "after": Working(hours=1, calendar="team__nothing")}, "neither an attribute"),
    ({"since": "opened_at", "after": Wall(days=1, zone="status__zone")}, "neither an attribute"),
    ({"since": "opened_at", "after": "30 minutes"}, "must be a timedelta, a span"),
    ({"since": "opened_at", "after": Working}, "is a class"),
    ({"within": "team__nothing"}, "neither an attribute"),
    ({"within": 5}, "must be a calendar"),
]


@pytest.mark.parametrize(("options", "words"), WRONG, ids=name_of)
def test_a_wrong_declaration_is_refused(declare: Declare, options: dict[str, Any], words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        declare(Ticket, name="wrong", when=Q(), **options)


def test_a_check_refuses_dates_in_a_database_with_a_zone_of_its_own(
    declare: Declare, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = declare(Ticket, name="deliver", after=Wall(at="18:00"), since="promised_on", when=Q(status="open"))
    assert not [message for message in check_policies() if message.obj is policy]
    monkeypatch.setitem(connection.settings_dict, "TIME_ZONE", "Asia/Tokyo")
    assert [message.id for message in check_policies() if message.obj is policy] == ["django_delayq.E026"]


class ToNowhere:
    def db_for_read(self, _model: Any, **_hints: Any) -> str:
        return "nowhere"


def test_rows_of_a_path_are_read_from_the_database_of_the_object(ticket: Ticket, settings: Any) -> None:
    """A router may send such a read to a replica, which may have the former opening hours."""
    fresh = Ticket.objects.get(pk=ticket.pk)
    settings.DATABASE_ROUTERS = [ToNowhere()]
    assert value_at(fresh, "team__hours") == "09:00-17:00"
    with pytest.raises(ConnectionDoesNotExist):
        _ = Ticket.objects.using("default").get(pk=ticket.pk).team


BY = "test:operator"
LABEL = "testapp.ticket.answer"


DELAYS: list[tuple[Any, timedelta, str]] = [
    (Working(hours=3, calendar=OFFICE), 5 * HOUR, "Mon 16:00"),
    (Working(hours=3, calendar="team__calendar"), 8 * HOUR, "Tue 10:00"),
    (Working(days=3, at="09:00", calendar=OFFICE), timedelta(days=1), "Tue 09:00"),
    (Wall(months=1, at="08:00", zone="Europe/Berlin"), timedelta(days=2), "Wed 08:00"),
    (Wall(months=1), HOUR, "Mon 11:00"),
    (lambda ticket: Working(hours=len(ticket.status), calendar=OFFICE), 8 * HOUR, "Tue 11:00"),
]


@pytest.mark.parametrize(("after", "other", "due"), DELAYS, ids=[str(n) for n in range(len(DELAYS))])
def test_another_delay_by_an_operator_is_counted_in_the_same_span(
    declare: Declare, team: Team, after: Any, other: timedelta, due: str
) -> None:
    policy = declare(Ticket, name="answer", after=after, **OPEN)
    opened(team)
    if policy.fixed_length is not None:
        assert preview_delay(policy, other).overdue == 0
    change_delay(policy, other, by=BY, mode="recompute")
    opened(team)
    assert [row.due_at for row in Timeout.objects.all()] == [at(due)] * 2
    change_delay(policy, None, by=BY, mode="recompute")
    (found,) = {row.due_at for row in Timeout.objects.all()}
    assert found != at(due)


def test_a_delay_that_does_not_fit_the_span_is_refused_and_nothing_changes(declare: Declare, team: Team) -> None:
    policy = declare(Ticket, name="answer", after=Working(days=3, at="09:00", calendar=OFFICE), **OPEN)
    opened(team)
    for act in (preview_delay, lambda *given: change_delay(*given, by=BY)):
        with pytest.raises(InvalidDelay, match="whole days"):
            act(policy, 90 * timedelta(minutes=1))
    assert only_row().due_at == at("Thu 09:00")


@pytest.mark.parametrize(("is_special", "due"), [(False, "Wed 10:00"), (True, "Tue 14:00")], ids=["hours", "a day"])
def test_the_doctor_finds_deadlines_of_a_former_calendar_and_replan_moves_them(
    declare: Declare, team: Team, is_special: bool, due: str
) -> None:
    special = dict[date, str]()
    calendar = WorkingHours("Europe/Berlin", {"mon-fri": "09:00-17:00"}, special=special.__getitem__)
    after = Working(hours=8, calendar=calendar if is_special else "team__calendar")
    policy = declare(Ticket, name="answer", after=after, **OPEN)
    for _ in range(3):
        opened(team)
    assert [each.level for each in delays("default")] == [20]
    Team.objects.update(hours="09:00-13:00")
    special[date(2026, 6, 1)] = "09:00-13:00"
    found = list(delays("default"))
    assert "3 have another deadline than its calendar gives now" in found[0].msg
    assert f"delayq_replan {LABEL} --mode recompute" in str(found[0].hint)
    assert sync_policy(policy, "default").moved == 0  # a calendar moves nothing by itself
    assert change_delay(policy, None, by=BY, mode="recompute").moved == 3
    assert {row.due_at for row in Timeout.objects.all()} == {at(due)}
    assert [each.level for each in delays("default")] == [20]


def test_a_preview_counts_what_would_be_due_at_once(declare: Declare, team: Team) -> None:
    policy = declare(Ticket, name="answer", after=Working(hours=20, calendar="team__calendar"), **OPEN)
    opened(team, "Mon 10:00")
    opened(team, "Mon 15:00")
    with clock.set_to(at("Tue 10:00")):
        seen = preview_delay(policy, 4 * HOUR)
        assert (seen.pending, seen.overdue) == (2, 1)
        assert str(seen.after) == "4 working hours, team__calendar"
        assert change_delay(policy, 4 * HOUR, by=BY, mode="recompute").moved == 2
        assert fire_due() == 1
