"""The operator's verbs by REST: what they answer, what is refused by its name, and what two at once learn."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.utils import timezone, translation
from rest_framework.test import APIClient

from django_delayq import operations
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from django_delayq.operations import changes
from django_delayq.sql import statements
from tests.integration.contrib.rest.conftest import ClientWith, Schedule, act, ready_for, settle, stored, url
from tests.integration.contrib.rest.places import ALL, LIST, POLICY, POLICY_VERBS, REMIND, VERBS
from tests.support.threads import in_threads
from tests.support.typed import Patch
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db


def sent(client: Any, address: str, body: Any) -> Any:
    return client.post(address, json.dumps(body), content_type="application/json")


def controlled() -> list[Any]:
    return [*PolicyControl.objects.values(), *PolicyChange.objects.values()]


@pytest.mark.parametrize("verb", VERBS)
def test_a_dry_run_and_each_method_but_post_change_nothing(
    operator: APIClient, client_with: ClientWith, schedule: Schedule, verb: str
) -> None:
    row, without_view = ready_for(verb, schedule()), client_with(*ALL)
    before = stored()
    answer = act(operator, row, verb, dry_run=True, **VERBS[verb][1])
    assert (answer.status_code, answer.data["changed"], answer.data["dry_run"]) == (200, True, True)
    for method in ("get", "put", "patch", "delete"):
        assert getattr(operator, method)(url(row, verb)).status_code == 405
        assert getattr(without_view, method)(url(row, verb)).status_code in (403, 405)
    assert stored() == before
    assert operator.post(f"/api/timeouts/999/{verb}/", VERBS[verb][1], format="json").status_code == 404


@pytest.mark.parametrize(
    ("verb", "state", "code"),
    [("cancel", "fired", "settled"), ("cancel", "firing", "no_retry"), ("retry", "pending", "not_dead")],
)
def test_who_comes_too_late_learns_how_it_stands(
    operator: APIClient, schedule: Schedule, verb: str, state: str, code: str
) -> None:
    row = schedule()
    if state == "firing":
        settle(row, "firing", "", settled_at=None)
    elif state != "pending":
        settle(row, state)
    with transaction.atomic():  # as with ATOMIC_REQUESTS: a 409 undoes nothing
        answer = act(operator, row, verb, **VERBS[verb][1])
    assert (answer.status_code, answer.data["changed"]) == (409, False)
    row.refresh_from_db()
    assert (answer.data["refusal"]["code"], answer.data["timeout"]["state"]) == (code, row.state)
    assert answer.data["refusal"]["detail"]
    assert row.final_attempt is (state == "firing"), "a cancel forbids another attempt"


PAST = "2001-01-01T00:00:00Z"
NAMED: list[tuple[str, Any, str]] = [
    *(("postpone", body, "delay") for body in ({}, {"weeks": 9e8}, {"days": 1e6}, {"minutes": 1, "at": PAST})),
    *(("postpone", {"minutes": value}, "minutes") for value in ("nan", 1e300, None)),
    *(("postpone", [], "non_field_errors"), ("postpone", {"at": PAST}, "at"), ("reschedule", {"hours": 1}, "hours")),
    *(("cancel", {"reason": value}, "reason") for value in ("x" * 256, "\0", "\ud800")),
    *(("cancel", {"dryrun": True}, "dryrun"), ("pause", {"untill": PAST}, "untill"), ("pause", {"\ud800": 1}, "?")),
    *(("pause", {"dry_run": True}, "dry_run"), ("pause", {"until": PAST}, "until"), ("fire", {"reason": []}, "reason")),
    *(("late", {**POLICY_VERBS["late"], name: "\ud800"}, name) for name in ("then", "after_seconds")),
    *(("late", body, "guard") for body in ({"off": False}, {"after_seconds": 60, "off": True})),
    *(("brake", {"most": 5}, "per_seconds"), ("brake", {"most": 5, "declared": True}, "guard")),
]
"""What is wrong with a body, and the name of the field in the answer."""


def test_bad_input_is_400_by_its_name_and_changes_nothing(operator: APIClient, schedule: Schedule) -> None:
    row = schedule()
    before = (stored(), controlled())
    for verb, body, name in NAMED:
        answer = sent(operator, url(row, verb) if verb in VERBS else f"{POLICY}{verb}/", body)
        assert (answer.status_code, [*answer.json()]) == (400, [name]), (verb, body)
    many = sent(operator, f"{POLICY}pause/", {f"n{number}": 1 for number in range(50_000)})
    assert many.status_code == 400 and len(many.content) < 10_000, "not each name with a list of all fields"
    assert (stored(), controlled()) == before


def test_an_action_refuses_what_its_address_has_beside(operator: APIClient, schedule: Schedule) -> None:
    """`?dry_run=true` would otherwise cancel."""
    row = schedule()
    for query, names in (("dry_run=true", ["dry_run"]), ("hours=2&minutes=1", ["hours", "minutes"])):
        answer = operator.post(f"{url(row, 'cancel')}?{query}", format="json")
        assert (answer.status_code, sorted(answer.data)) == (400, names)
    assert operator.post(url(row, "cancel"), {"dryrun": True}, format="multipart").status_code == 400
    assert Timeout.objects.get().state == "pending"
    assert operator.post(f"{url(row, 'cancel')}?format=json", format="json").status_code == 200


def test_a_pause_keeps_what_is_left_out_and_null_takes_its_end_away(operator: APIClient) -> None:
    assert operator.post("/api/policies/testapp.order.nothing/pause/", format="json").status_code == 404

    def stop(verb: str = "pause", **body: Any) -> Any:
        answer = operator.post(f"{POLICY}{verb}/", body, format="json")
        return answer.status_code, answer.data.get("policy") or answer.data

    until = timezone.now() + timedelta(hours=1)
    assert stop(until=until.isoformat(), reason="outage")[1]["stop"] == "paused"
    first = operator.get(POLICY).json()
    assert first["by"].startswith("rest:user-") and first["reason"] == "outage"
    assert stop()[0] == 409, "as it was paused already"
    assert operator.get(POLICY).json() == first
    status, shown = stop(reason="still down")
    assert (status, shown["until"], shown["reason"]) == (200, timezone.localtime(until).isoformat(), "still down")
    assert stop(until=None)[1]["until"] is stop("resume")[1]["stop"] is None
    nothing = operator.post(f"{POLICY}resume/")
    assert (nothing.status_code, nothing.data["refusal"]["code"]) == (409, "in_force")
    assert stop("hold", reason="outage")[0] == 200
    assert stop()[0] == 409 and "on hold" in stop()[1]["detail"]


def test_an_answer_is_in_the_language_of_its_reader(client_with: ClientWith, schedule: Schedule, settings: Any) -> None:
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "django.middleware.locale.LocaleMiddleware"]
    client, row = client_with("view_timeout", "cancel_timeout", "postpone_timeout"), schedule()
    client.credentials(HTTP_ACCEPT_LANGUAGE="de")
    with translation.override(translation.get_language()):  # the middleware leaves its last visitor's behind
        wrong = act(client, row, "postpone")
        assert wrong.data == {"delay": ["Um wie viel oder auf wann? Bitte eines von beiden angeben."]}
        assert client.get(f"{LIST}?nonsense=1").data == {"nonsense": ["Einen solchen Filter gibt es nicht."]}
        assert act(client, row, "cancel").status_code == 200
        refusal = act(client, row, "cancel").data["refusal"]
    assert refusal == {"code": "settled", "detail": "schon abgeschlossen"}


@pytest.mark.django_db(transaction=True)
def test_a_request_moves_rows_for_a_limited_time(monkeypatch: Patch, operator: APIClient, schedule: Schedule) -> None:
    monkeypatch.setattr(statements, "CHUNK", 1)
    limit = changes.time_limit
    monkeypatch.setattr(changes, "time_limit", lambda: limit(-1.0))
    for _ in range(3):
        schedule()
    operations.hold(REMIND, by="a test")
    answer = operator.post(f"{POLICY}resume/")
    assert (answer.status_code, answer.json()["finished"]) == (200, False)
    assert PolicyChange.objects.get(finished_at=None).moved == 1
    assert changes.continue_moves("default") == 1
    assert PolicyChange.objects.get(what="resumed").moved == 3


IMPATIENT = {
    "postgresql": "SET lock_timeout = '100ms'",
    "mysql": "SET SESSION innodb_lock_wait_timeout = 1",
    "sqlite": "PRAGMA busy_timeout = 100",
}


@pytest.mark.django_db(transaction=True)
def test_who_waits_too_long_for_a_lock_gets_409_and_may_try_again(client_with: ClientWith, schedule: Schedule) -> None:
    order = Order.objects.create(status="new")
    row, client, codes = schedule(order=order), client_with("cancel_timeout"), list[int]()

    def cancel() -> None:
        with connection.cursor() as cursor:
            cursor.execute(IMPATIENT[connection.vendor])
        codes.append(act(client, row, "cancel").status_code)

    with transaction.atomic():
        Order.objects.select_for_update().get(pk=order.pk)
        in_threads(cancel)
    assert codes == [409]
    assert Timeout.objects.get().state == "pending"
    assert act(client, row, "cancel").status_code == 200
