"""A page of rows costs as many queries as one row, and each row gets what it would get alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.contenttypes.models import ContentType
from django.db.models import Q

import django_delayq as dq
from django_delayq import Working, clock, operations
from django_delayq.arming import sync as syncing
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from django_delayq.operations import changes
from django_delayq.sql import statements
from tests.integration.times.conftest import HOUR, Declare, at
from tests.support.seen import sql_of
from tests.testapp.desk import Team, Ticket

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]
BY: Any = {"by": "anna"}
IN_HOURS = Working(hours=1, calendar="team__calendar")
HOURS = ("09:00-17:00", "10:00-16:00", "13:00-17:00")
Act = Callable[[Any, Any], object]


@pytest.fixture(autouse=True)
def monday(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It is Monday 10:00, and the sync locks pages as large as those of operators."""
    monkeypatch.setattr(syncing, "LOCKED", statements.CHUNK)
    with clock.set_to(at("Mon 10:00")):
        yield


def declared(declare: Declare, kind: str, name: str = "answer") -> dq.TimeoutPolicy[Any]:
    """A policy with a constant delay, or one whose deadline, grace and steps follow the calendar of a team."""
    given: dict[str, Any] = {"name": name, "since": "opened_at", "when": ~Q(status="closed")}
    given["hold_when"] = Q(status="waiting")
    if kind == "plain":
        return declare(Ticket, after=8 * HOUR, **given)
    policy = declare(Ticket, after=Working(hours=8, calendar="team__calendar"), grace=IN_HOURS, **given)
    policy.step(0.5, name="half")(lambda obj, timeout: None)
    policy.step(-2 * HOUR, every=IN_HOURS, name="soon")(lambda obj, timeout: None)
    return policy


def store(count: int) -> None:
    """Store tickets, each of another team, without arming their timeouts, in place of all that there was."""
    for model in (Timeout, PolicyChange, PolicyControl, Ticket, Team):
        model.objects.all().delete()
    ContentType.objects.get_for_model(Ticket)  # otherwise the first query for it counts
    hours = (HOURS[number % len(HOURS)] for number in range(count))
    teams = Team.objects.bulk_create(Team(zone="Europe/Berlin", hours=each) for each in hours)
    Ticket.objects.bulk_create(Ticket(team=team, opened_at=at("Mon 10:00")) for team in teams)


def sync(policy: Any, rows: Any) -> None:
    syncing.sync_policy(policy, "default")


def becomes(**values: Any) -> Act:
    """Change the tickets past Django, and sync them."""

    def act(policy: Any, rows: Any) -> None:
        Ticket.objects.update(**values)
        sync(policy, rows)

    return act


def verb(name: str, **arguments: Any) -> Act:
    """Operate on the rows."""
    return lambda policy, rows: getattr(operations, name)(rows, **arguments, **BY)


def of_policy(name: str, **arguments: Any) -> Act:
    """Operate on the policy."""
    return lambda policy, rows: getattr(operations, name)(policy, **arguments, **BY)


def in_bulk(name: str, **arguments: Any) -> Act:
    return lambda policy, rows: getattr(dq, name)(rows, **arguments)


HOLD, RESUME, PAUSE = verb("hold_timeout"), verb("resume_timeout"), verb("pause_timeout")
END_SOON, REPLAN = verb("hold_timeout", until=at("Mon 11:10")), verb("replan", hand_set=True)
ACTS: dict[str, list[Act]] = {
    "a condition stops clocks and lets them run": [sync, becomes(status="waiting"), becomes(status="open")],
    "new rounds": [sync, becomes(opened_at=at("Mon 09:30"))],
    "hold and resume": [sync, HOLD, RESUME],
    "schedule": [sync, HOLD, lambda policy, rows: dq.schedule_timeouts(Ticket.objects.all(), policy)],
    "resume on hold": [sync, HOLD, lambda *_: Ticket.objects.update(status="waiting"), RESUME],
    "pause what has ended": [sync, END_SOON, PAUSE],
    "postpone": [sync, verb("postpone", hours=1), verb("postpone", after=IN_HOURS)],
    "move what is held": [
        *(sync, HOLD, verb("change_deadline", shift=HOUR), in_bulk("extend_timeouts", after=IN_HOURS)),
        *(in_bulk("reschedule_timeouts", hours=9), verb("postpone", at=at("Fri 12:00"))),
    ],
    "replan what is held": [sync, HOLD, verb("postpone", hours=3), REPLAN],
    "preview": [sync, HOLD, verb("resume_timeout", dry_run=True)],
    "of the policy": [
        *(sync, of_policy("hold"), of_policy("resume"), of_policy("change_delay", after=6 * HOUR, mode="recompute")),
    ],
}
"""What is done one after the other, half an hour apart."""


def run(acts: list[Act], policy: Any) -> list[int]:
    """Do all of `acts`; return how many queries each sent."""
    counts = []
    for number, act in enumerate(acts, start=1):
        with clock.set_to(at("Mon 10:00") + number * HOUR / 2):
            counts.append(len(sql_of(lambda act=act: act(policy, Timeout.objects.all()))))  # type: ignore[misc]
    return counts


@pytest.mark.parametrize("name", ACTS)
def test_the_queries_of_a_page_do_not_grow_with_its_rows(declare: Declare, name: str) -> None:
    policy, counts = declared(declare, "by the calendar of a team"), []
    for number in (1, 3, 12):  # the first one fills what the process remembers
        store(number)
        counts.append(run(ACTS[name], policy))
        assert Timeout.objects.filter(slot_taken=1).count() == number
    assert counts[1] == counts[2]


def rows_of_all(names: dict[str, str]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the waiting rows by policy and ticket, without what differs in each run."""
    found, own = {}, {"id", "object_id", "slot", "idempotency_key", "terms"}
    columns = [field.attname for field in Timeout._meta.concrete_fields if field.name not in own]
    for row in Timeout.objects.filter(slot_taken=1).order_by("id"):
        found[row.policy, names[row.object_id]] = {column: getattr(row, column) for column in columns}
    return found


@pytest.mark.parametrize("name", ACTS)
def test_each_row_of_a_page_gets_what_it_gets_alone(
    declare: Declare, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    policies = [declared(declare, "plain", "first"), declared(declare, "by the team", "second")]
    policies.append(declared(declare, "by the team", "third"))
    outcomes = []
    for size in (500, 1):
        store(4)
        operations.change_delay(policies[2], timedelta(hours=5), **BY)
        names = {str(ticket.pk): str(number) for number, ticket in enumerate(Ticket.objects.order_by("pk"))}
        Ticket.objects.filter(pk=max(map(int, names))).update(opened_at=at("Mon 09:15"))
        monkeypatch.setattr(statements, "CHUNK", size)
        for policy in policies[1:]:
            run(ACTS[name][:1], policy)
        run(ACTS[name], policies[0])
        outcomes.append(rows_of_all(names))
    assert outcomes[0] == outcomes[1]
    assert len({(row["due_at"], row["run_at"], row["remaining"]) for row in outcomes[0].values()}) > 1


def test_a_page_is_held_while_the_holds_of_two_policies_move_their_deadlines(
    declare: Declare, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(rows: int) -> None:
        raise changes.TimeIsUp

    policies = {declared(declare, "plain", name): length for name, length in (("first", HOUR), ("second", 2 * HOUR))}
    store(3)
    for policy in policies:
        sync(policy, None)
    for number, (policy, length) in enumerate(policies.items()):
        begin = at("Mon 10:00") + number * timedelta(minutes=10)
        with clock.set_to(begin):
            operations.hold(policy, **BY)
        with monkeypatch.context() as patched, clock.set_to(begin + length):
            patched.setattr(statements, "CHUNK", 1)
            operations.resume(policy, progress=interrupt, **BY)
    with clock.set_to(at("Mon 14:00")):
        HOLD(None, Timeout.objects.all())
    for policy, length in policies.items():
        due = Timeout.objects.filter(policy=policy.label).values_list("due_at", flat=True)
        assert [*due] == 3 * [at("Mon 18:00") + length]
