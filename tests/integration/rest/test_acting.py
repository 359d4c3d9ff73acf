"""The operator's verbs by REST: who may, what changes, and what is answered when nothing does."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.utils import timezone
from rest_framework.test import APIClient

import django_delayq as dq
from django_delayq import operations
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from django_delayq.testing import fire_due
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db
Schedule = Callable[..., Timeout]
ClientWith = Callable[..., APIClient]
POLICY = "/api/policies/testapp.order.remind/"
VERBS = {
    "cancel": ("cancel_timeout", {}),
    "fire": ("fire_timeout", {}),
    "postpone": ("postpone_timeout", {"minutes": 5}),
    "reschedule": ("postpone_timeout", {"shift_seconds": -60}),
    "retry": ("retry_timeout", {}),
    "refire": ("refire_timeout", {}),
    "erase": ("erase_timeout", {}),
}
POLICY_VERBS: dict[str, dict[str, Any]] = {
    **{verb: {} for verb in ("pause", "hold", "resume")},
    "late": {"after_seconds": 3600, "then": "dead"},
    "brake": {"most": 50, "per_seconds": 600},
    "shadow": {"share": 10},
}
ALL = [codename for codename, _ in VERBS.values()]


def url(row: Timeout, verb: str) -> str:
    return f"/api/timeouts/{row.pk}/{verb}/"


def kill(row: Timeout) -> Timeout:
    Timeout.objects.filter(pk=row.pk).update(
        state="dead", cause="retries", settled_at=timezone.now(), slot_taken=None, attempts=3
    )
    row.refresh_from_db()
    return row


def stored() -> dict[str, Any]:
    """All columns of the first row."""
    return dict(Timeout.objects.order_by("pk").values(*(field.attname for field in Timeout._meta.concrete_fields))[0])


def ready_for(verb: str, row: Timeout) -> Timeout:
    return kill(row) if verb in {"retry", "refire", "erase"} else row


def test_only_post_does_anything(client_with: ClientWith, schedule: Schedule) -> None:
    row, client, without_view = schedule(), client_with("view_timeout", *ALL), client_with(*ALL)
    for verb in VERBS:
        for method in ("get", "put", "patch", "delete"):
            assert getattr(client, method)(url(row, verb)).status_code == 405
            assert getattr(without_view, method)(url(row, verb)).status_code in (403, 405)
    assert not stored()["history"]


@pytest.fixture
def operator(client_with: ClientWith) -> APIClient:
    return client_with("view_timeout", "pause_policy", "change_policy_guards", *ALL)


def act(client: APIClient, row: Timeout, verb: str, **body: Any) -> Any:
    return client.post(url(row, verb), body, format="json")


def test_cancelled_it_tells_by_whom_and_why(operator: APIClient, schedule: Schedule) -> None:
    row = schedule()
    answer = act(operator, row, "cancel", reason="the customer called")
    assert (answer.status_code, answer.data["changed"], answer.data["refusal"]) == (200, True, None)
    assert (answer.data["timeout"]["state"], answer.data["timeout"]["cause"]) == ("cancelled", "hand")
    story = operator.get(f"/api/timeouts/{row.pk}/").json()["story"]
    assert any(event["by"].startswith("rest:user-") for event in story["events"])
    assert any("the customer called" in event["text"] for event in story["events"])


@pytest.mark.parametrize("body", [{"minutes": 10}, {"hours": 0.1, "minutes": 4}, {"at": True}])
def test_postponed_it_is_due_later(operator: APIClient, schedule: Schedule, body: dict[str, Any]) -> None:
    row = schedule(minutes=5)
    later = row.due_at + timedelta(minutes=10)
    answer = act(operator, row, "postpone", **({"at": later.isoformat()} if "at" in body else body))
    assert answer.status_code == 200
    row.refresh_from_db()
    assert row.due_at == later
    assert answer.json()["timeout"]["due_at"] == timezone.localtime(later).isoformat()


def test_fired_again_it_gets_a_new_round_that_its_story_names(operator: APIClient, schedule: Schedule) -> None:
    row = kill(schedule(minutes=0))
    answer = act(operator, row, "refire", reason="lost")
    assert (answer.status_code, answer.data["timeout"]["state"]) == (200, "dead")
    new = Timeout.objects.get(state="pending")
    story = operator.get(f"/api/timeouts/{row.pk}/").json()["story"]
    assert any(f"fired again by the new round {new.pk}" in event["text"] for event in story["events"])
    assert act(operator, row, "refire").data["refusal"]["code"] == "slot_taken"


@pytest.mark.parametrize("verb", VERBS)
def test_a_dry_run_says_what_would_happen_and_changes_nothing(
    operator: APIClient, schedule: Schedule, verb: str
) -> None:
    row = ready_for(verb, schedule())
    before = stored()
    answer = act(operator, row, verb, dry_run=True, **VERBS[verb][1])
    assert (answer.status_code, answer.data["changed"], answer.data["dry_run"]) == (200, True, True)
    assert stored() == before


@pytest.mark.parametrize(
    ("verb", "state", "code"),
    [
        *(("cancel", "fired", "settled"), ("cancel", "firing", "no_retry")),
        *(("fire", "dead", "dead"), ("retry", "pending", "not_dead"), ("refire", "pending", "not_settled")),
    ],
)
def test_who_comes_too_late_gets_409_and_learns_how_it_stands(
    operator: APIClient, schedule: Schedule, verb: str, state: str, code: str
) -> None:
    row = schedule()
    settled = state not in ("pending", "firing")
    Timeout.objects.filter(pk=row.pk).update(
        state=state, cause="due" if settled else "", settled_at=timezone.now() if settled else None,
        slot_taken=1 if state == "pending" else None,
    )  # fmt: skip
    answer = act(operator, row, verb, **VERBS[verb][1])
    assert (answer.status_code, answer.data["changed"]) == (409, False)
    assert (answer.data["refusal"]["code"], answer.data["timeout"]["state"]) == (code, state)
    assert answer.data["refusal"]["detail"]


def test_cancelling_what_is_firing_is_too_late_but_forbids_another_attempt(
    operator: APIClient, schedule: Schedule, settings: Any
) -> None:
    row = schedule()
    Timeout.objects.filter(pk=row.pk).update(state="firing", slot_taken=None)
    with transaction.atomic():  # as with ATOMIC_REQUESTS: a 409 undoes nothing
        assert act(operator, row, "cancel").status_code == 409
    row.refresh_from_db()
    assert row.final_attempt is True


def test_a_deadline_is_changed_to_an_earlier_one_and_the_answer_says_that_it_is_due(
    operator: APIClient, schedule: Schedule
) -> None:
    row = schedule()
    answer = act(operator, row, "reschedule", shift_seconds=-60)
    assert (answer.status_code, answer.data["due_at_once"]) == (200, False)
    for dry_run in (True, False):
        answer = act(operator, row, "reschedule", at=(timezone.now() - timedelta(days=1)).isoformat(), dry_run=dry_run)
        assert (answer.status_code, answer.data["changed"], answer.data["due_at_once"]) == (200, True, True)
        row.refresh_from_db()
        assert (row.due_at <= timezone.now()) is not dry_run
    assert act(operator, row, "reschedule", hours=1).status_code == 400, "a unit is of `postpone`"


WRONG_DELAYS: list[Any] = [
    *({"minutes": 1e300}, {"weeks": 9e8}, {"minutes": "nan"}, {"minutes": None}, [], "x"),
]
WRONG_REASONS: list[Any] = [{"reason": "x" * 256}, {"reason": "\0"}, {"reason": []}, {"reason": "\ud800"}]
WRONG = [
    *(("postpone", body) for body in WRONG_DELAYS),
    *(("cancel", body) for body in WRONG_REASONS),
    *(("retry", {"reason": {"a": 1}}), ("fire", {"dry_run": "?"})),
]


@pytest.mark.parametrize(("verb", "body"), WRONG)
def test_bad_input_is_400_and_changes_nothing(operator: APIClient, schedule: Schedule, verb: str, body: Any) -> None:
    row = ready_for(verb, schedule())
    before = stored()
    answer = operator.post(url(row, verb), json.dumps(body), content_type="application/json")
    assert answer.status_code == 400, answer.data
    assert stored() == before


def test_what_is_not_there_is_404(operator: APIClient) -> None:
    for verb, (_, body) in VERBS.items():
        assert operator.post(f"/api/timeouts/999/{verb}/", body, format="json").status_code == 404
    for verb, body in POLICY_VERBS.items():
        assert operator.post(f"/api/policies/testapp.order.nothing/{verb}/", body, format="json").status_code == 404


def test_a_policy_is_paused_and_resumed(operator: APIClient, schedule: Schedule) -> None:
    schedule(minutes=0)
    until = timezone.now() + timedelta(hours=1)
    answer = operator.post(f"{POLICY}pause/", {"until": until.isoformat(), "reason": "provider is down"}, format="json")
    assert (answer.status_code, answer.data["policy"]["stop"]) == (200, "paused")
    shown = operator.get(POLICY).json()
    assert (shown["stop"], shown["reason"]) == ("paused", "provider is down")
    assert shown["by"].startswith("rest:user-")
    assert fire_due() == 0
    resumed = operator.post(f"{POLICY}resume/")
    assert (resumed.status_code, resumed.data["policy"]["stop"]) == (200, None)
    assert fire_due() == 1


def test_a_pause_keeps_what_is_left_out_and_null_takes_its_end_away(operator: APIClient) -> None:
    until = (timezone.now() + timedelta(hours=1)).isoformat()
    operator.post(f"{POLICY}pause/", {"until": until, "reason": "outage"}, format="json")
    first = operator.get(POLICY).json()
    again = operator.post(f"{POLICY}pause/", {}, format="json")
    assert (again.status_code, again.data["changed"]) == (409, False), "as it was paused already"
    assert operator.get(POLICY).json() == first
    operator.post(f"{POLICY}pause/", {"reason": "still down"}, format="json")
    shown = operator.get(POLICY).json()
    assert (shown["until"], shown["reason"]) == (first["until"], "still down")
    endless = operator.post(f"{POLICY}pause/", {"until": None}, format="json").json()["policy"]
    assert (endless["until"], endless["reason"]) == (None, "still down")
    held = operator.post(f"{POLICY}hold/", {}, format="json").json()["policy"]
    assert (held["stop"], held["reason"]) == ("held", "still down")


def test_what_does_not_fit_what_is_in_force_is_409(operator: APIClient) -> None:
    nothing_to_resume = operator.post(f"{POLICY}resume/")
    assert (nothing_to_resume.status_code, nothing_to_resume.data["changed"]) == (409, False)
    assert operator.post(f"{POLICY}hold/").status_code == 200
    again = operator.post(f"{POLICY}pause/")
    assert again.status_code == 409
    assert "on hold" in again.data["detail"]
    assert PolicyControl.objects.get().stop == "held"


@pytest.mark.parametrize("guard", ["late", "brake", "shadow"])
def test_a_guard_is_set_switched_off_and_declared_again(operator: APIClient, guard: str) -> None:
    on: Any = {"late": {"after_seconds": 3600.0, "then": "dead"}, "brake": {"most": 50, "per_seconds": 600.0}}
    off: Any = {"shadow": {"share": 0}}.get(guard, {"off": True})
    declared: Any = {"shadow": {"share": None}}.get(guard, {"declared": True})
    body = on.get(guard, {"share": 10})
    answer = operator.post(f"{POLICY}{guard}/", {**body, "reason": "a campaign"}, format="json")
    assert (answer.status_code, answer.data["changed"], answer.data["finished"]) == (200, True, True)
    shown = operator.get(POLICY).json()
    assert shown[guard] == (10 if guard == "shadow" else body)
    assert [*shown["guards_set_by"]] == [guard]
    assert shown["guards_set_by"][guard].startswith("rest:user-")
    change = PolicyChange.objects.get()
    assert (change.what, change.reason, change.details["declared"]) == (guard, "a campaign", False)
    assert operator.post(f"{POLICY}{guard}/", body, format="json").status_code == 409, "it is in force already"
    for setting, set_by in ((off, [guard]), (declared, [])):
        changed = operator.post(f"{POLICY}{guard}/", setting, format="json").json()["policy"]
        assert (changed[guard], [*changed["guards_set_by"]]) == (0 if guard == "shadow" else None, set_by)


@pytest.mark.parametrize(
    ("guard", "body"),
    [
        *(("late", body) for body in ({"off": False}, {"off": True, "declared": True}, {"after_seconds": None})),
        *(("late", {"after_seconds": 60, "off": True}), ("brake", {"most": 5, "declared": True})),
    ],
    ids=str,
)
def test_a_guard_with_bad_input_is_400_and_changes_nothing(operator: APIClient, guard: str, body: Any) -> None:
    assert operator.post(f"{POLICY}{guard}/", body, format="json").status_code == 400
    assert not PolicyControl.objects.exists() and not PolicyChange.objects.exists()


def test_a_policy_that_its_brake_has_paused_is_marked(operator: APIClient) -> None:
    assert operator.get(POLICY).json()["braked"] is False
    operations.pause("testapp.order.remind", by="brake", reason="51 fired in 10 minutes")
    shown = operator.get(POLICY).json()
    assert (shown["braked"], shown["by"], shown["reason"]) == (True, "brake", "51 fired in 10 minutes")
    assert operator.post(f"{POLICY}resume/").json()["policy"]["braked"] is False


@pytest.mark.django_db(transaction=True)
def test_of_two_who_cancel_at_once_one_learns_that_it_was_too_late(client_with: ClientWith, schedule: Schedule) -> None:
    row = schedule()
    clients = [client_with("cancel_timeout") for _ in range(2)]
    codes: list[int] = []
    start = threading.Barrier(2)

    def cancel(client: APIClient) -> None:
        try:
            start.wait()
            codes.append(act(client, row, "cancel").status_code)
        finally:
            connection.close()

    threads = [threading.Thread(target=cancel, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(codes) == [200, 409]
    assert [event["what"] for event in Timeout.objects.get().history].count("cancel_requested") == 1


IMPATIENT = {
    "postgresql": "SET lock_timeout = '100ms'",
    "mysql": "SET SESSION innodb_lock_wait_timeout = 1",
    "sqlite": "PRAGMA busy_timeout = 100",
}


@pytest.mark.django_db(transaction=True)
def test_who_waits_too_long_for_a_lock_gets_409_and_may_try_again(client_with: ClientWith, schedule: Schedule) -> None:
    order = Order.objects.create(status="new")
    row = schedule(order=order)
    client = client_with("cancel_timeout")
    codes: list[int] = []

    def cancel() -> None:
        try:
            with connection.cursor() as cursor:
                cursor.execute(IMPATIENT[connection.vendor])
            codes.append(act(client, row, "cancel").status_code)
        finally:
            connection.close()

    with transaction.atomic():
        Order.objects.select_for_update().get(pk=order.pk)
        thread = threading.Thread(target=cancel)
        thread.start()
        thread.join(60)
    assert codes == [409]
    assert dq.get_deadline(order, "remind") is not None
    assert act(client, row, "cancel").status_code == 200
