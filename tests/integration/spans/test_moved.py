"""What moves deadlines uses the span: a policy hold, another delay, a new calendar; and everybody sees it."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

import pytest
from django.db.models import Q

from django_delayq import Wall, Working, WorkingHours, clock
from django_delayq.arming.sync import sync_policy
from django_delayq.exceptions import InvalidDelay
from django_delayq.models import Timeout
from django_delayq.monitoring.misfits import delays
from django_delayq.operations import change_delay, preview_delay
from django_delayq.testing import fire_due
from tests.integration.spans.conftest import HOUR, OFFICE, Declare, at, only_row, opened
from tests.testapp.desk import Team, Ticket

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("controls_are_read_again")]
OPEN: dict[str, Any] = {"since": "opened_at", "when": Q(status="open")}
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
