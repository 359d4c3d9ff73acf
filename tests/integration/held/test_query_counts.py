"""A page of rows costs as many queries as one row, and each row gets what it would get alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.contenttypes.models import ContentType
from django.db import connection
from django.db.models import Q
from django.test.utils import CaptureQueriesContext

import django_delayq as dq
from django_delayq import Working, clock, operations
from django_delayq.arming import sync as syncing
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from django_delayq.operations import changes
from django_delayq.sql import statements
from tests.integration.spans.conftest import HOUR, at
from tests.testapp.desk import Team, Ticket

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]
Declare = Callable[..., dq.TimeoutPolicy[Any]]
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
    """Store tickets, each of another team, without arming their timeouts."""
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


def schedule(policy: Any, rows: Any) -> None:
    dq.schedule_timeouts(Ticket.objects.all(), policy)


def change_teams(policy: Any, rows: Any) -> None:
    """Give each ticket a team with other hours, and sync them."""
    for pk, hours in Ticket.objects.values_list("pk", "team__hours"):
        team = Team.objects.create(zone="Europe/Berlin", hours=HOURS[1 - HOURS.index(hours) // 2])
        Ticket.objects.filter(pk=pk).update(team=team)


HOLD, RESUME = verb("hold_timeout"), verb("resume_timeout")
ACTS: dict[str, list[Act]] = {
    "a sync arms": [sync],
    "a sync stops clocks": [sync, becomes(status="waiting")],
    "a sync arms what is on hold": [becomes(status="waiting")],
    "a sync lets clocks run": [sync, becomes(status="waiting"), becomes(status="open")],
    "a sync arms again": [sync, becomes(status="closed"), becomes(status="open")],
    "a sync begins new rounds": [sync, becomes(opened_at=at("Mon 09:30"))],
    "a sync computes again": [sync, change_teams, sync],
    "schedule": [schedule],
    "schedule on hold": [becomes(status="waiting"), schedule],
    "hold": [sync, HOLD],
    "hold during a hold of the policy": [sync, of_policy("hold"), HOLD],
    "resume": [sync, HOLD, RESUME],
    "resume on hold": [sync, HOLD, lambda *_: Ticket.objects.update(status="waiting"), RESUME],
    "resume what has ended": [sync, verb("hold_timeout", until=at("Mon 11:10")), verb("pause_timeout")],
    "pause": [sync, verb("pause_timeout")],
    "resume what is paused": [sync, verb("pause_timeout"), RESUME],
    "postpone": [sync, verb("postpone", hours=1)],
    "postpone by a span": [sync, verb("postpone", after=IN_HOURS)],
    "postpone what is held": [sync, HOLD, verb("postpone", hours=1)],
    "postpone to a datetime what is held": [sync, HOLD, verb("postpone", at=at("Fri 12:00"))],
    "shift": [sync, verb("change_deadline", shift=-HOUR)],
    "shift what is held": [sync, HOLD, verb("change_deadline", shift=HOUR)],
    "replan": [sync, verb("postpone", hours=3), verb("replan", hand_set=True)],
    "replan what is held": [sync, HOLD, verb("postpone", hours=3), verb("replan", hand_set=True)],
    "resume the policy": [sync, of_policy("hold"), of_policy("resume")],
    "change the delay": [sync, of_policy("change_delay", after=6 * HOUR, mode="recompute")],
    "extend": [sync, in_bulk("extend_timeouts", hours=1)],
    "extend by a span what is held": [sync, HOLD, in_bulk("extend_timeouts", after=IN_HOURS)],
    "reschedule what is held": [sync, HOLD, in_bulk("reschedule_timeouts", hours=9)],
    "reschedule what has ended": [
        sync,
        verb("hold_timeout", until=at("Mon 11:10")),
        in_bulk("reschedule_timeouts", hours=9),
    ],
}
"""What is done one after the other, half an hour apart. The queries of the last count."""


def run(acts: list[Act], policy: Any) -> int:
    """Do all of `acts`; return how many queries the last one sent."""
    moment, sent = at("Mon 10:00"), 0
    for act in acts:
        moment += timedelta(minutes=30)
        with clock.set_to(moment), CaptureQueriesContext(connection) as captured:
            act(policy, Timeout.objects.all())
        sent = len(captured)
    return sent


def forget() -> None:
    """Delete all rows."""
    for model in (Timeout, PolicyChange, PolicyControl, Ticket, Team):
        model.objects.all().delete()


@pytest.mark.parametrize("kind", ["plain", "by the calendar of a team"])
@pytest.mark.parametrize("name", ACTS)
def test_the_queries_of_a_page_do_not_grow_with_its_rows(declare: Declare, name: str, kind: str) -> None:
    policy, counts = declared(declare, kind), dict[int, int]()
    for number in (1, 5, 30):  # the first one fills what the process remembers
        forget()
        store(number)
        counts[number] = run(ACTS[name], policy)
        assert Timeout.objects.filter(slot_taken=1).count() == number
    # Rounds that continue are inserted with all of their columns, of which SQLite takes 999 values in one statement.
    is_split = connection.vendor == "sqlite" and name in {"a sync arms again", "a sync arms what is on hold"}
    assert counts[5] == counts[30] - is_split


@pytest.mark.skipif(connection.vendor != "sqlite", reason="the page of the other databases is the same")
@pytest.mark.parametrize("name", ["a sync arms", "hold", "resume"])
def test_a_full_page_is_one_of_them(declare: Declare, name: str) -> None:
    policy, counts = declared(declare, "by the calendar of a team"), list[int]()
    for number in (1, 5, statements.CHUNK - 1):
        forget()
        store(number)
        counts.append(run(ACTS[name], policy))
    assert counts[1] == counts[2]


def rows_of_all(names: dict[str, str]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the waiting rows by policy and ticket, without what differs in each run."""
    found, own = {}, {"id", "object_id", "slot", "idempotency_key", "terms"}
    columns = [field.attname for field in Timeout._meta.concrete_fields if field.name not in own]
    for row in Timeout.objects.filter(slot_taken=1).order_by("id"):
        found[row.policy, names[row.object_id]] = {column: getattr(row, column) for column in columns}
    return found


@pytest.mark.parametrize("name", [name for name in ACTS if not name.startswith(("schedule", "a sync computes"))])
def test_each_row_of_a_page_gets_what_it_gets_alone(
    declare: Declare, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    policies = [declared(declare, "plain", "first"), declared(declare, "by the team", "second")]
    policies.append(declared(declare, "by the team", "third"))
    outcomes = []
    for size in (500, 1):
        forget()
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
