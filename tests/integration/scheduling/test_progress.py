"""How much of its time a round has used: in its own time, running or stopped, for one row and for a page of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.contrib.contenttypes.models import ContentType
from django.db.models import Q
from django.test import Client
from django.urls import reverse
from rest_framework.test import APIRequestFactory, force_authenticate

import django_delayq as dq
from django_delayq import Working, clock, operations
from django_delayq.contrib.rest_framework import TimeoutViewSet
from django_delayq.ledger.controls import stop_cache
from django_delayq.models import Timeout
from django_delayq.policy.policies import registry
from django_delayq.testing import fire_due
from tests.integration.times.conftest import HOUR, at
from tests.support.seen import sql_of
from tests.testapp.desk import Team, Ticket

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("controls_are_read_again")]
Declare = Callable[..., dq.TimeoutPolicy[Any]]
Act = Callable[[Any, Any], object]
ARMED: dict[str, Any] = {"since": "opened_at", "when": ~Q(status="closed"), "hold_when": Q(status="waiting")}
BY = "test:operator"
TIMES: dict[str, Any] = {"real time": 8 * HOUR, "by the team": Working(hours=8, calendar="team__calendar")}


def policy_of(declare: Declare, kind: str = "by the team", **options: Any) -> dq.TimeoutPolicy[Any]:
    return declare(Ticket, **{"name": "answer", "after": TIMES[kind], **ARMED, **options})


def opened(text: str = "Mon 10:00", hours: str = "09:00-17:00", **values: Any) -> Ticket:
    team = Team.objects.create(zone="Europe/Berlin", hours=hours)
    return Ticket.objects.create(team=team, opened_at=at(text), **values)


def progress(ticket: Any, policy: Any) -> dq.Progress:
    found = dq.get_progress(ticket, policy)
    assert found is not None
    return found


def status(name: str) -> Act:
    def act(ticket: Any, policy: Any) -> None:
        ticket.status = name
        ticket.save()

    return act


def moved(verb: str, **how: Any) -> Act:
    return lambda ticket, policy: getattr(dq, verb)(ticket, policy, **how)


def on_policy(verb: str, **how: Any) -> Act:
    return lambda ticket, policy: getattr(operations, verb)(policy, by=BY, **how)


def other_hours(ticket: Any, policy: Any) -> None:
    ticket.team.hours = "13:00-17:00"
    ticket.team.save()


def longer(ticket: Any, policy: Any) -> None:
    dq.extend_timeout(ticket, policy, after=policy.after)


WAITS, OPEN, HOLD = status("waiting"), status("open"), moved("hold_timeout")
STOP, RESUME = on_policy("hold"), on_policy("resume")
SOON, PAUSE = {"until": at("Mon 14:00")}, moved("hold_timeout", keep_deadline=True)
FRIDAY, SOONER = moved("reschedule_timeout", at=at("Fri 12:00")), moved("reschedule_timeout", hours=1)
# Of a ticket opened on Monday at 10:00: what happens, when it is read, and then hours used, hours left, running.
CASES: dict[str, tuple[list[tuple[str, Act]], str, float, float, bool]] = {
    "just opened": ([], "Mon 10:00", 0, 8, True),
    "at night": ([], "Mon 22:00", 7, 1, True),
    "overdue": ([], "Tue 13:00", 11, -3, True),
    "overdue at night": ([], "Tue 23:00", 15, -7, True),
    "real time": ([], "Mon 16:00", 6, 2, True),
    "real time, overdue": ([], "Mon 20:00", 10, -2, True),
    "real time, overdue, and then held": ([("Mon 20:00", HOLD)], "Tue 16:00", 10, 0, False),
    "held by its condition": ([("Mon 12:00", WAITS)], "Wed 12:00", 2, 6, False),
    "released": ([("Mon 12:00", WAITS), ("Wed 12:00", OPEN)], "Wed 13:00", 3, 5, True),
    "held and then closed hours": ([("Mon 18:00", HOLD)], "Tue 08:00", 7, 1, False),
    "a hold that has ended unnoticed": ([("Mon 12:00", moved("hold_timeout", **SOON))], "Mon 15:00", 3, 5, True),
    "paused": ([("Mon 12:00", PAUSE)], "Mon 15:00", 5, 3, True),
    "its policy on hold": ([("Mon 12:00", STOP)], "Mon 16:00", 2, 6, False),
    "its policy on hold until unnoticed": ([("Mon 12:00", on_policy("hold", **SOON))], "Mon 15:00", 3, 5, True),
    "its policy paused": ([("Mon 12:00", on_policy("pause"))], "Mon 15:00", 5, 3, True),
    "both on hold": ([("Mon 12:00", STOP), ("Mon 14:00", HOLD)], "Mon 15:00", 2, 6, False),
    "extended": ([("Mon 12:00", longer)], "Mon 16:00", 6, 10, True),
    "moved to Friday": ([("Mon 12:00", FRIDAY)], "Tue 09:00", 7, 27, True),
    "other opening hours, which move no deadline": ([("Mon 12:00", other_hours)], "Mon 14:00", 1, 3, True),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_used_and_left(declare: Declare, name: str) -> None:
    happened, seen_at, used, left, running = CASES[name]
    is_real = name.startswith("real time")
    policy = policy_of(declare, "real time" if is_real else "by the team")
    with clock.set_to(at("Mon 10:00")):
        ticket = opened()
    for moment, act in happened:
        with clock.set_to(at(moment)):
            act(Ticket.objects.get(), policy)
            stop_cache.forget()
    with clock.set_to(at(seen_at)):
        found, row = dq.get_progress(ticket, policy), Timeout.objects.get()
        assert found == row.progress()
    assert found is not None
    assert (found.used / HOUR, found.left / HOUR, found.running) == (used, left, running)
    assert (found.total, found.share) == (found.used + found.left, used / (used + left))
    assert found.is_open_time is not is_real
    if "unnoticed" not in name:
        assert found.due_at == row.due_at


def test_what_cannot_be_computed_has_none(declare: Declare) -> None:
    policy = policy_of(declare)
    with clock.set_to(at("Mon 10:00")):
        ticket = opened()
        assert dq.get_progress(ticket, policy, "another key") is None
        row = Timeout.objects.get()
        Team.objects.update(zone="Nowhere/Nothing")
        assert row.progress() is None
        registry.remove(policy)
        assert row.progress() is None
        registry.add(policy)
        Team.objects.update(zone="Europe/Berlin")
    with clock.set_to(at("Wed 10:00")):
        assert int(fire_due(policy, ticket)) == 1
        assert dq.get_progress(ticket, policy) is Timeout.objects.get().progress() is None
        with pytest.raises(dq.UnknownPolicy):
            dq.get_progress(ticket, "anwser")


def fill(count: int) -> None:
    """Store tickets of as many teams, of two policies, of which some are held, and one policy is on hold."""
    for model in (Timeout, Ticket, Team):
        model.objects.all().delete()
    for number in range(count):
        day = ("Mon", "Tue", "Wed")[number % 3]
        ticket = opened(f"{day} 1{number % 7}:00", ("09:00-17:00", "10:00-16:00")[number % 2])
        if number % 4 == 3:
            dq.hold_timeout(ticket, "answer")


def test_a_page_costs_as_many_queries_as_a_row(declare: Declare, admin_client: Client) -> None:
    policies = [policy_of(declare), policy_of(declare, "real time", name="call")]
    ContentType.objects.get_for_model(Ticket)
    asked, view = APIRequestFactory().get("/"), TimeoutViewSet.as_view({"get": "list"})
    force_authenticate(asked, User.objects.get())
    pages: dict[str, Callable[[], Any]] = {
        "rest": lambda: view(asked),
        "admin": lambda: admin_client.get(reverse("admin:django_delayq_timeout_changelist")),
        "sorted": lambda: admin_client.get(f"{reverse('admin:django_delayq_timeout_changelist')}?order=used"),
    }
    counts: dict[str, set[int]] = {name: set() for name in pages}
    with clock.set_to(at("Wed 12:00")):
        operations.hold(policies[1], by=BY)
        for number in (1, 4, 12):
            fill(number)
            for name, read in pages.items():
                assert read().status_code == 200
                counts[name].add(len(sql_of(read)))
        (shown, page, _sorted) = (read() for read in pages.values())
        alone = {row.pk: row.progress() for row in Timeout.objects.all()}
        by_use = [row.pk for row in _sorted.context["cl"].result_list]
    assert {name: len(found) for name, found in counts.items()} == dict.fromkeys(pages, 1), counts
    assert {row["id"]: row["progress"]["share"] for row in shown.data["results"]} == {
        pk: found.share for pk, found in alone.items()
    }
    assert {row.pk: row.delayq_progress for row in page.context["cl"].result_list} == alone
    assert len({found.share for found in alone.values()}) > 3
    assert [alone[pk].share for pk in by_use] == sorted((found.share for found in alone.values()), reverse=True)
    assert "of office time left" in page.content.decode()
