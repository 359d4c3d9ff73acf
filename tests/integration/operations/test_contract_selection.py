"""A parameter of a selection means the same by command, by REST and in the admin, alone and beside another one.

`CONDITIONS` has the meaning once. The tests go through every parameter and every edge that offers it, so that a new
parameter is tested when it is declared and has an example here.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from django_delayq import schedule_timeout
from django_delayq.contrib.rest_framework.inputs import Selection
from django_delayq.management.options import SELECTING
from django_delayq.models import Timeout
from django_delayq.operations.selection import CONDITIONS
from tests.integration.operations.conftest import as_if, pending
from tests.integration.operations.names import HOUR, MINUTE
from tests.testapp.models import Customer, Order

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("admin_and_rest")]

ALONE, LINGER = "testapp.order.alone", "testapp.order.linger"
EVERY_STATE = list(Timeout.State.values)
Rows = dict[str, Timeout]
EXAMPLES: dict[str, tuple[Callable[[Rows], Any], str]] = {
    "policy": (lambda rows: LINGER, "later dead"),
    "object": (lambda rows: f"testapp.order:{rows['soon'].object_id}", "soon"),
    "related": (lambda rows: f"testapp.customer:{Customer.objects.get().pk}", "soon dead"),
    "where": (lambda rows: "note=N-1", "soon late"),
    "key": (lambda rows: "k", "later dead"),
    "search": (lambda rows: "N-1", "soon late"),
    "queue": (lambda rows: "slow", "later fired"),
    "state": (lambda rows: "dead", "dead"),
    "due_until": (lambda rows: timezone.now() + HOUR, "soon late"),
    "due_from": (lambda rows: timezone.now() + HOUR, "later computed"),
    "overdue": (lambda rows: True, "late"),
    "failing": (lambda rows: True, "late"),
    "settled_from": (lambda rows: timezone.now() - 4 * HOUR, "dead"),
    "settled_until": (lambda rows: timezone.now() - 4 * HOUR, "fired"),
    "set_by": (lambda rows: "policy", "computed"),
}
"""A value of each parameter, and the rows that it selects."""
OF_WAITING = {"due_until", "due_from"}
"""They select among the rows that wait, unless commands are asked for another state."""
BAD: dict[str, list[str]] = {
    "policy": ["testapp.order.nothing"],
    "object": ["17", ":", "no.thing:1", "testapp.order", "testapp.order:x", "testapp.order:\0"],
    "related": ["17", ":", "no.thing:1", "testapp.order:x", "a.b:\0", "contenttypes.contenttype:1"],
    "where": ["nothing=1", "id=x", "note"],
    "state": ["dying"],
    "due_until": ["soon"],
    "due_from": ["soon"],
}
IN_COMMANDS = {"due_until": "due_before", "due_from": "due_after"}
IN_ADMIN: dict[str, str | tuple[str, str]] = {
    **{name: name for name in ("policy", "object", "related", "queue", "set_by")},
    "state": "state__exact",
    "search": "q",
    "overdue": ("due", "overdue"),
    "failing": ("due", "failing"),
}


@pytest.fixture
def rows(declare: Callable[..., Any]) -> Rows:
    """One row of each kind that the parameters distinguish."""
    declare(Order, name="alone", search="note", owner="customer")
    declare(Order, name="counted", after=5 * HOUR, since="created_at", when=None)
    now, ada = timezone.now(), Customer.objects.create(name="Ada")
    first, second = (Order.objects.create(status="new", note="N-1", customer=owner) for owner in (ada, None))
    third = Order.objects.create(status="new", customer=ada)
    others = [Order.objects.create(created_at=now) for _ in "ab"]
    found = {
        "soon": schedule_timeout(first, "alone", hours=0.5),
        "late": schedule_timeout(second, "alone", hours=1),
        "later": schedule_timeout(others[0], "linger", key="k", hours=5),
        "computed": schedule_timeout(others[0], "counted"),
        "dead": as_if(pending(third, "linger", key="k", hours=1), "dead", "retries", settled_at=now - 3 * HOUR),
        "fired": as_if(schedule_timeout(others[1], "remind", hours=1), "fired", "due", settled_at=now - 5 * HOUR),
    }
    Timeout.objects.filter(pk__in=[found["later"].pk, found["fired"].pk]).update(queue="slow")
    Timeout.objects.filter(pk=found["late"].pk).update(run_at=now - MINUTE, created_at=now - HOUR, attempts=2)
    return found


def by_command(**asked: Any) -> list[int]:
    given = {IN_COMMANDS.get(name, name): value for name, value in asked.items()}
    if "object" in given:
        given["model"], _colon, given["object"] = given["object"].rpartition(":")
    if OF_WAITING.isdisjoint(asked):
        given.setdefault("state", EVERY_STATE)
    call_command("delayq_list", json=True, limit=99, stdout=(out := io.StringIO()), **given)
    return [row["id"] for row in json.loads(out.getvalue())]


def boss() -> Client:
    client = Client()
    client.force_login(User.objects.get_or_create(username="boss", is_superuser=True, is_staff=True)[0])
    return client


def by_rest(**asked: Any) -> list[int]:
    query = {name: value.isoformat() if isinstance(value, datetime) else value for name, value in asked.items()}
    answer = boss().get("/api/timeouts/", query)
    if answer.status_code == 400:
        assert set(answer.json()) & {*asked, "non_field_errors"}
        raise ValueError(answer.json())
    return [row["id"] for row in answer.json()["results"]]


def in_admin(**asked: Any) -> list[int]:
    names = {name: IN_ADMIN[name] for name in asked}
    query = {name: value for name, value in asked.items() if isinstance(names[name], str)}
    query = {str(names[name]): value for name, value in query.items()}
    query |= dict(shown for shown in names.values() if isinstance(shown, tuple))
    answer = boss().get(reverse("admin:django_delayq_timeout_changelist"), query)
    return [row.pk for row in answer.context["cl"].result_list]


EDGES: dict[str, tuple[Callable[..., list[int]], set[str]]] = {
    "command": (by_command, {name for name in EXAMPLES if IN_COMMANDS.get(name, name) in {*SELECTING, "failing"}}),
    "rest": (by_rest, set(Selection().fields)),
    "admin": (in_admin, set(IN_ADMIN)),
}
each_edge = pytest.mark.parametrize("edge", EDGES)


def value_of(name: str, rows: Rows) -> dict[str, Any]:
    more = {"policy": ALONE} if name == "where" else {}
    return {name: EXAMPLES[name][0](rows), **more}


def test_each_parameter_has_an_example_and_an_edge() -> None:
    assert set(EXAMPLES) == {*CONDITIONS, "search", "where"}
    assert set().union(*(names for _call, names in EDGES.values())) == set(EXAMPLES)


@each_edge
def test_a_parameter_selects_the_same_rows_everywhere(rows: Rows, edge: str) -> None:
    call, names = EDGES[edge]
    for name in sorted(names):
        expected = {rows[each].pk for each in EXAMPLES[name][1].split()}
        assert set(call(**value_of(name, rows))) & {row.pk for row in rows.values()} == expected, name


@each_edge
def test_a_value_that_makes_no_sense_selects_nothing(rows: Rows, edge: str) -> None:
    call, names = EDGES[edge]
    for name, value in ((each, value) for each in BAD if each in names for value in BAD[each]):
        try:
            found = call(**{**value_of(name, rows), name: value})
        except (CommandError, ValueError):
            assert edge != "admin"
        else:
            assert edge == "admin" and found == [], (name, value)
