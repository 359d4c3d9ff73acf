"""`within=`: outside of opening hours a due timeout waits for the next opening; its deadline stays."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db.models import Q

import django_delayq as dq
from django_delayq import Late, Working, clock
from django_delayq.arming.sync import sync_policy
from django_delayq.firing import rails
from django_delayq.firing.works import Candidate
from django_delayq.ledger.controls import Guards
from django_delayq.models import Timeout
from django_delayq.operations import fire_now
from django_delayq.testing import fire_due
from tests.integration.firing.conftest import MODES
from tests.integration.times.conftest import HOUR, OFFICE, Declare, at, only_row, opened
from tests.testapp.desk import Team, Ticket

pytestmark = pytest.mark.django_db(transaction=True)
OPEN: dict[str, Any] = {"since": "opened_at", "when": Q(status="open")}
CALENDARS: dict[str, Any] = {
    "value": OFFICE,
    "path": "team__calendar",
    "function": lambda ticket: OFFICE if ticket.status == "open" else None,
}


class Calls(list[Any]):
    def __call__(self, _target: Any, timeouts: Any) -> None:
        self += timeouts if isinstance(timeouts, list) else [timeouts]


def fires_at(text: str) -> int:
    with clock.set_to(at(text)):
        return int(fire_due(raises=False))


NIGHT: dict[str, Any] = {"name": "text", "after": 10 * HOUR, **OPEN}
"""Of a ticket that is opened at 10:00, due at 20:00, when the office is closed."""


@pytest.mark.parametrize(
    ("mode", "kind"), [*((mode, "value") for mode in MODES), *(("together", kind) for kind in CALENDARS)]
)
def test_what_is_due_at_night_fires_at_the_next_opening_and_is_not_late(
    declare: Declare, team: Team, mode: str, kind: str
) -> None:
    calls, late = Calls(), Late(timedelta(minutes=5))
    declare(Ticket, calls, within=CALENDARS[kind], late=late, **NIGHT, **MODES[mode])
    opened(team)
    assert [only_row().due_at, fires_at("Mon 20:00"), fires_at("Tue 08:59")] == [at("Mon 20:00"), 0, 0]
    row = only_row()
    assert (row.due_at, row.run_at, row.attempts) == (at("Mon 20:00"), at("Tue 09:00"), 0)
    assert fires_at("Tue 09:01") == len(calls) == 1
    assert (only_row().state, only_row().due_at) == (Timeout.State.FIRED, at("Mon 20:00"))
    assert only_row().lateness() == pytest.approx(60)


def test_each_way_to_arm_shows_the_opening_before_it_is_due(declare: Declare, team: Team) -> None:
    declare(Ticket, within=OFFICE, **NIGHT)
    opened(team)
    Ticket.objects.bulk_create([Ticket(opened_at=at("Mon 10:00")), Ticket(opened_at=at("Mon 11:00"))])
    first, second, third = Ticket.objects.order_by("pk")
    dq.schedule_timeout(second, "text")
    dq.schedule_timeouts([third], "text")
    assert [row.run_at for row in Timeout.objects.order_by("id")] == [at("Tue 09:00")] * 3
    dq.schedule_timeouts([first, second], "text", hours=13)
    dq.extend_timeout(third, "text", days=1)
    assert [row.run_at for row in Timeout.objects.order_by("id")] == [at("Tue 09:00")] * 2 + [at("Wed 09:00")]
    dq.reschedule_timeout(third, "text", hours=1)
    assert Timeout.objects.get(object_id=third.pk).run_at == at("Mon 11:00")


def test_an_operator_who_fires_it_now_does_not_wait(declare: Declare, team: Team) -> None:
    declare(Ticket, calls := Calls(), within=OFFICE, **NIGHT)
    opened(team)
    with clock.set_to(at("Mon 20:00")):
        fire_now(only_row(), by="test:operator")
    assert fires_at("Mon 20:00") == len(calls) == 1


def test_a_payment_while_it_waits_wins_and_a_person_reads_why_it_waits(declare: Declare, team: Team) -> None:
    declare(Ticket, within=OFFICE, **NIGHT)
    ticket = opened(team)
    outlook = dq.explain_timeout(ticket, "text").outlook
    assert "Its deadline is 2026-06-01" in outlook
    assert "It waits for the next opening hours of its policy, at 2026-06-02" in outlook
    assert fires_at("Mon 23:00") == 0
    with clock.set_to(at("Mon 23:00")), dq.before_deadline(ticket, "text"):
        Ticket.objects.filter(pk=ticket.pk).update(status="closed")
    assert fires_at("Tue 09:00") == 0


@pytest.mark.parametrize("kind", CALENDARS)
def test_lateness_counts_from_the_opening_also_if_no_worker_ran_before(declare: Declare, team: Team, kind: str) -> None:
    declare(Ticket, within=CALENDARS[kind], late=Late(timedelta(minutes=5)), **NIGHT)
    opened(team)
    assert fires_at("Tue 09:04") == 1
    assert only_row().lateness() == pytest.approx(240)
    opened(team, "Tue 09:05")
    assert fires_at("Wed 09:06") == 0
    assert Timeout.objects.latest("id").cause == Timeout.Cause.LATE


@pytest.mark.parametrize(
    ("kind", "back"),
    [
        *(("value", back) for back in ("Mon 11:30", "Mon 16:59", "Mon 17:01", "Tue 08:30", "Tue 09:01")),
        *((kind, "Tue 09:01") for kind in CALENDARS if kind != "value"),
    ],
)
def test_what_is_too_late_does_not_wait_for_the_opening_to_be_in_time(
    declare: Declare, team: Team, kind: str, back: str
) -> None:
    """The worker was down from before the deadline, at 11:00, until after the office has closed at 17:00."""
    calls, questions = Calls(), list[Any]()
    policy = declare(Ticket, calls, within=CALENDARS[kind], late=Late(2 * HOUR), **NIGHT | {"after": HOUR})
    policy.confirm()(lambda ticket, timeout: questions.append(timeout))
    opened(team)
    in_time = back == "Mon 11:30"
    assert fires_at(back) == len(calls) == len(questions) == in_time
    assert only_row().state == ("fired" if in_time else "skipped")


def test_a_sync_of_rows_with_different_deadlines_shows_the_opening(declare: Declare, team: Team) -> None:
    policy = declare(Ticket, within=OFFICE, **NIGHT)
    Ticket.objects.bulk_create([Ticket(opened_at=at("Mon 09:00")), Ticket(opened_at=at("Mon 11:00"))])
    assert sync_policy(policy, "default").armed == 2
    assert [row.due_at for row in Timeout.objects.order_by("due_at")] == [at("Mon 19:00"), at("Mon 21:00")]
    assert {row.run_at for row in Timeout.objects.all()} == {at("Tue 09:00")}


def test_one_statement_does_not_decide_about_calendars(declare: Declare) -> None:
    policy = declare(Ticket, name="text", within=OFFICE)
    candidates = [Candidate(1, "1")]
    assert rails.admitted(candidates, Guards(quiet=policy)) == []
    assert rails.admitted(candidates, Guards(late=Late(Working(hours=1, calendar=OFFICE)))) == []
    assert rails.admitted(candidates, Guards(late=Late(HOUR))) == candidates
