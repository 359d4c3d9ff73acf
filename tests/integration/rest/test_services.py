"""Other services schedule, cancel and guard by a number, and get an answer that they can act on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.db.models import Q
from django.utils import timezone
from rest_framework.permissions import AllowAny
from rest_framework.test import APIClient

import django_delayq as dq
from django_delayq import TimeoutPolicy
from django_delayq.contrib.rest_framework import CancelView
from django_delayq.models import Timeout
from django_delayq.testing import fire_due
from tests.testapp.models import ExpressOrder, Order, Parcel, Voucher

pytestmark = pytest.mark.django_db
ClientWith = Callable[..., APIClient]
REMIND = "testapp.order.remind"
NUMBERED = "testapp.order.numbered"
ADDRESSES = {"schedule": "schedule_timeout", "cancel": "cancel_timeout", "guard": "cancel_timeout"}


@pytest.fixture(autouse=True)
def numbered(declare: Callable[..., TimeoutPolicy[Any]]) -> TimeoutPolicy[Any]:
    """A policy whose orders are known by their note."""
    options: dict[str, Any] = {"after": timedelta(minutes=30), "since": "created_at", "when": Q(status="unpaid")}
    return declare(Order, name="numbered", search="note", **options)


@pytest.fixture
def service(client_with: ClientWith) -> APIClient:
    """The user of another service, who may view orders."""
    client = client_with("schedule_timeout", "cancel_timeout")
    user = User.objects.get()
    user.user_permissions.add(Permission.objects.get(codename="view_order", content_type__app_label="testapp"))
    client.force_login(user)
    return client


@pytest.fixture
def order() -> Order:
    return Order.objects.create(status="unpaid", note="A-2026-0050", created_at=timezone.now())


def ask(client: APIClient, what: str, **body: Any) -> Any:
    return client.post(f"/api/{what}/", body, format="json")


@contextmanager
def nothing_changes() -> Iterator[None]:
    columns = [field.attname for field in Timeout._meta.concrete_fields]
    before = list(Timeout.objects.order_by("pk").values(*columns))
    yield
    assert list(Timeout.objects.order_by("pk").values(*columns)) == before


def rounds() -> list[tuple[str, str]]:
    return list(Timeout.objects.filter(policy=NUMBERED).order_by("pk").values_list("state", "reason"))


def test_scheduled_by_its_number_an_order_gets_its_deadline(service: APIClient, order: Order) -> None:
    answer = ask(service, "schedule", policy=NUMBERED, search=order.note, hours=2, minutes=3, reason="asked for time")
    row = Timeout.objects.get(policy=NUMBERED)
    assert (answer.status_code, answer.data["refusal"], answer.data["timeout"]["id"]) == (200, None, row.pk)
    assert timedelta(hours=2) < row.due_at - timezone.now() < timedelta(hours=2, minutes=4)
    assert row.reason == f"asked for time (rest:{User.objects.get().username})"
    assert "payload" not in answer.data["timeout"]


def test_without_a_delay_the_policy_computes_the_deadline(service: APIClient, order: Order) -> None:
    Timeout.objects.all().delete()
    assert ask(service, "schedule", policy=NUMBERED, object=order.pk).status_code == 200
    row = Timeout.objects.get(policy=NUMBERED)
    assert row.due_at == order.created_at + timedelta(minutes=30)  # type: ignore[operator]
    assert row.is_computed


def test_key_payload_and_a_deadline_at_a_time_are_stored(service: APIClient, order: Order) -> None:
    at = timezone.now() + timedelta(days=3)
    body = {"policy": REMIND, "object": str(order.pk), "key": " sms ", "payload": {"to": ["+49"]}, "at": at.isoformat()}
    assert ask(service, "schedule", **body).status_code == 200
    row = Timeout.objects.get(policy=REMIND)
    assert (row.key, row.payload, row.due_at) == (" sms ", {"to": ["+49"]}, at)
    assert row.reason == f"rest:{User.objects.get().username}"


@pytest.mark.dialect
@pytest.mark.parametrize(("on_conflict", "status"), [("replace", 200), ("keep", 200), ("once", 200), ("error", 409)])
def test_a_pending_timeout_is_replaced_kept_or_reported(
    service: APIClient, order: Order, on_conflict: str, status: int
) -> None:
    first = dq.schedule_timeout(order, REMIND, hours=1)
    at = (timezone.now() + timedelta(hours=5)).isoformat()
    answer = ask(service, "schedule", policy=REMIND, object=order.pk, at=at, on_conflict=on_conflict)
    assert (answer.status_code, answer.data["timeout"]["id"]) == (status, first.pk)
    moved = Timeout.objects.get(pk=first.pk).due_at > first.due_at
    assert moved is (on_conflict in {"replace", "once"})
    assert (answer.data["refusal"] or {}).get("code") == ("pending" if status == 409 else None)


@pytest.mark.parametrize("delay", [{"hours": 5}, {}], ids=str)
def test_once_needs_a_deadline_that_does_not_count_from_now(
    service: APIClient, order: Order, delay: dict[str, int]
) -> None:
    with nothing_changes():
        answer = ask(service, "schedule", policy=REMIND, object=order.pk, on_conflict="once", **delay)
    assert answer.status_code == 400 and "Give at=" in str(answer.data["delay"])


def test_a_deadline_beyond_the_limit_of_the_policy_is_refused(
    service: APIClient, declare: Callable[..., TimeoutPolicy[Any]]
) -> None:
    policy = declare(Order, name="limited", limits=dq.Limits(total=timedelta(hours=1)))
    order = Order.objects.create(status="new")
    dq.schedule_timeout(order, policy, minutes=5)
    with nothing_changes():
        answer = ask(service, "schedule", policy="testapp.order.limited", object=order.pk, hours=2)
    assert (answer.status_code, answer.data["refusal"]["code"]) == (409, "limit")


def test_cancelled_by_its_number_it_does_not_fire(service: APIClient, order: Order) -> None:
    answer = ask(service, "cancel", policy=NUMBERED, search=order.note, reason="paid")
    assert (answer.status_code, answer.data["cancelled"]) == (200, True)
    assert answer.data["timeout"]["state"] == "cancelled"
    assert [state for state, _ in rounds()] == ["cancelled"]
    assert ask(service, "cancel", policy=NUMBERED, search=order.note).data["cancelled"] is True
    order.save()
    assert [state for state, _ in rounds()] == ["cancelled"]


def test_a_cancel_that_is_too_late_reports_it(service: APIClient, order: Order) -> None:
    dq.schedule_timeout(order, REMIND, seconds=0)
    assert fire_due("testapp.order.remind") == 1
    answer = ask(service, "cancel", policy=REMIND, object=order.pk)
    assert (answer.status_code, answer.data["cancelled"], answer.data["timeout"]["state"]) == (200, False, "fired")


def test_only_the_timeout_with_the_key_is_cancelled(service: APIClient, order: Order) -> None:
    for key in ("a", "b"):
        dq.schedule_timeout(order, REMIND, hours=1, key=key)
    answer = ask(service, "cancel", policy=REMIND, object=order.pk, key="a")
    assert answer.data["timeout"]["key"] == "a"
    assert dict(Timeout.objects.filter(policy=REMIND).values_list("key", "state")) == {"a": "cancelled", "b": "pending"}


def test_what_has_no_timeout_is_cancelled_and_shows_none(service: APIClient) -> None:
    order = Order.objects.create(status="new")
    assert ask(service, "cancel", policy=REMIND, object=order.pk).data == {"cancelled": True, "timeout": None}
    guarded = ask(service, "guard", policy=REMIND, object=order.pk)
    assert guarded.data == {"in_time": True, "refusal": None, "timeout": None}


def test_an_event_in_time_cancels_the_timeout_and_may_proceed(service: APIClient, order: Order) -> None:
    answer = ask(service, "guard", policy=NUMBERED, search=order.note, waiting=True, strict=True)
    assert (answer.status_code, answer.data["in_time"], answer.data["refusal"]) == (200, True, None)
    assert [state for state, _ in rounds()] == ["cancelled"]
    order.save()  # it is not armed again
    assert [state for state, _ in rounds()] == ["cancelled"]


def test_an_event_after_the_firing_is_too_late(service: APIClient, order: Order) -> None:
    dq.schedule_timeout(order, REMIND, seconds=0)
    assert fire_due("testapp.order.remind") == 1
    answer = ask(service, "guard", policy=REMIND, object=order.pk)
    assert (answer.status_code, answer.data["in_time"]) == (409, False)
    assert (answer.data["refusal"]["code"], answer.data["timeout"]["state"]) == ("passed", "fired")


def test_a_strict_guard_refuses_a_deadline_that_has_passed_before_it_fired(service: APIClient, order: Order) -> None:
    dq.schedule_timeout(order, REMIND, seconds=0)
    with nothing_changes():
        answer = ask(service, "guard", policy=REMIND, object=order.pk, strict=True)
    assert (answer.status_code, answer.data["refusal"]["code"]) == (409, "passed")
    assert ask(service, "guard", policy=REMIND, object=order.pk).status_code == 200


def test_a_second_payment_is_refused_if_the_condition_must_hold(service: APIClient, order: Order) -> None:
    Order.objects.filter(pk=order.pk).update(status="paid")
    with nothing_changes():
        answer = ask(service, "guard", policy=NUMBERED, search=order.note, waiting=True)
    assert (answer.status_code, answer.data["refusal"]["code"]) == (409, "not_waiting")
    assert answer.data["timeout"]["state"] == "pending"
    assert ask(service, "guard", policy=NUMBERED, search=order.note).status_code == 200


def test_while_a_handler_decides_the_caller_is_asked_to_return(service: APIClient, order: Order) -> None:
    row = dq.schedule_timeout(order, "send_outside", hours=1)
    Timeout.objects.filter(pk=row.pk).update(state="firing", slot_taken=None)
    with nothing_changes():
        answer = ask(service, "guard", policy="testapp.order.send_outside", object=order.pk)
    assert (answer.status_code, answer["Retry-After"]) == (503, "5")
    assert "nothing is decided" in answer.data["detail"]


@pytest.mark.parametrize("what", ADDRESSES)
def test_each_request_needs_its_own_permission(what: str, client_with: ClientWith, order: Order) -> None:
    codename = ADDRESSES[what]
    others = {"view_timeout", "postpone_timeout", "fire_timeout", *ADDRESSES.values()} - {codename}
    body = {"policy": REMIND, "object": order.pk} | ({"hours": 1} if what == "schedule" else {})
    with nothing_changes():
        assert ask(APIClient(), what, **body).status_code in (401, 403)
        for refused in (client_with(), client_with(*others), client_with(codename, staff=False)):
            assert ask(refused, what, **body).status_code == 403
    allowed = client_with(codename)
    assert ask(allowed, what, **body).status_code == 200
    assert allowed.get(f"/api/{what}/").status_code == 405


@pytest.mark.parametrize("what", ADDRESSES)
def test_who_may_not_view_the_model_cannot_try_out_numbers(what: str, client_with: ClientWith, order: Order) -> None:
    client = client_with(ADDRESSES[what])
    for number in (order.note, "A-2026-9999"):
        assert ask(client, what, policy=NUMBERED, search=number).status_code == 403


def test_a_number_of_no_object_is_404_and_of_several_409(service: APIClient, order: Order) -> None:
    Order.objects.create(status="unpaid", note=order.note)
    for what in ADDRESSES:
        with nothing_changes():
            missing = ask(service, what, policy=NUMBERED, search="A-2026-9999")
            several = ask(service, what, policy=NUMBERED, search=order.note)
            gone = ask(service, what, policy=NUMBERED, object=987654)
        assert (missing.status_code, several.status_code, gone.status_code) == (404, 409, 404)
        assert missing.data["detail"] == 'There is no order "A-2026-9999".'
        assert "Give the primary key" in several.data["detail"]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"policy": "testapp.order.nothing"}, "policy"),
        ({"policy": "remind"}, "policy"),
        ({"policy": ""}, "policy"),
        ({"object": "seventeen"}, "object"),
        ({"object": None}, "object"),
        ({"search": "A-1"}, "object"),
        ({"key": "k" * 201}, "key"),
        ({"key": "\0"}, "key"),
        ({"reason": "r" * 256}, "reason"),
        ({"untill": "2030-01-01"}, "untill"),
        ({"\ud800": 1}, "?"),
    ],
)
@pytest.mark.parametrize("what", ADDRESSES)
def test_bad_input_is_refused_by_its_name_and_changes_nothing(
    service: APIClient, order: Order, what: str, change: dict[str, Any], name: str
) -> None:
    dq.schedule_timeout(order, REMIND, hours=1)
    body = {"policy": REMIND, "object": order.pk, **change}
    with nothing_changes():
        answer = service.post(f"/api/{what}/", json.dumps(body), content_type="application/json")
    assert (answer.status_code, [*answer.json()]) == (400, [name])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"hours": -1}, "hours"),
        ({"hours": "soon"}, "hours"),
        ({"hours": 1, "at": "2030-01-01T00:00:00Z"}, "delay"),
        ({"weeks": 1e8}, "delay"),
        ({"at": "9999-01-01T00:00:00Z"}, "at"),
        ({"at": "tomorrow"}, "at"),
        ({}, "delay"),
        ({"hours": 1, "on_conflict": "kep"}, "on_conflict"),
        ({"hours": 1, "payload": "\0"}, "payload"),
        ({"hours": 1, "payload": ["\ud800"]}, "payload"),
        ({"hours": 1, "payload": "x" * 1_000_001}, "payload"),
    ],
)
def test_a_wrong_deadline_or_payload_is_refused_and_nothing_is_scheduled(
    service: APIClient, change: dict[str, Any], name: str
) -> None:
    body = {"policy": REMIND, "object": Order.objects.create(status="new").pk, **change}
    answer = service.post("/api/schedule/", json.dumps(body), content_type="application/json")
    assert (answer.status_code, [*answer.json()]) == (400, [name])
    assert not Timeout.objects.exists()


@pytest.mark.parametrize("body", [{"policy": REMIND}, {}, []])
@pytest.mark.parametrize("what", ADDRESSES)
def test_a_request_names_a_policy_and_an_object(service: APIClient, what: str, body: Any) -> None:
    answer = service.post(f"/api/{what}/", json.dumps(body), content_type="application/json")
    assert answer.status_code == 400


@pytest.mark.parametrize("what", ADDRESSES)
def test_parameters_in_the_address_are_refused(service: APIClient, order: Order, what: str) -> None:
    with nothing_changes():
        answer = service.post(f"/api/{what}/?strict=true", {"policy": REMIND, "object": order.pk}, format="json")
    assert (answer.status_code, [*answer.data]) == (400, ["strict"])


def test_a_model_without_numbers_is_found_by_its_key_only(service: APIClient) -> None:
    parcel, voucher = Parcel.objects.create(), Voucher.objects.create(code="Go 7")
    refused = ask(service, "cancel", policy="testapp.parcel.chase", search=str(parcel.pk))
    assert (refused.status_code, [*refused.data]) == (400, ["search"])
    assert ask(service, "cancel", policy="testapp.parcel.chase", object=parcel.pk.hex).status_code == 200
    assert ask(service, "cancel", policy="testapp.voucher.expire", object="Go 7").status_code == 200
    missing = ask(service, "cancel", policy="testapp.voucher.expire", object="Go 8")
    assert (missing.status_code, voucher.pk) == (404, "Go 7")


def test_a_child_is_found_by_the_number_of_its_parent(
    service: APIClient, declare: Callable[..., TimeoutPolicy[Any]]
) -> None:
    declare(ExpressOrder, name="ship")
    User.objects.get().user_permissions.add(Permission.objects.get(codename="view_expressorder"))
    express = ExpressOrder.objects.create(status="new", note="E-1")
    answer = ask(service, "schedule", policy="testapp.expressorder.ship", search="E-1", hours=1)
    assert (answer.status_code, answer.data["timeout"]["object"]["id"]) == (200, str(express.pk))


def test_a_form_serves_too(service: APIClient, order: Order) -> None:
    body = {"policy": REMIND, "object": order.pk, "search": "", "hours": "1", "payload": '{"a": 1}', "at": ""}
    answer = service.post("/api/schedule/", body, format="multipart")
    assert (answer.status_code, Timeout.objects.get(policy=REMIND).payload) == (200, {"a": 1})


@pytest.mark.parametrize("unauthenticated", [None, "django.contrib.auth.models.AnonymousUser"])
def test_a_project_may_admit_requests_without_a_user(
    settings: Any, order: Order, monkeypatch: pytest.MonkeyPatch, unauthenticated: Any
) -> None:
    """They may not search, and have keys of their own."""
    settings.REST_FRAMEWORK = {**settings.REST_FRAMEWORK, "UNAUTHENTICATED_USER": unauthenticated}
    monkeypatch.setattr(CancelView, "permission_classes", [AllowAny])
    assert ask(APIClient(), "cancel", policy=NUMBERED, search=order.note).status_code == 403
    headers = {"Idempotency-Key": "k"}
    body = {"policy": NUMBERED, "object": order.pk}
    answers = [APIClient().post("/api/cancel/", body, format="json", headers=headers) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[1]["Idempotent-Replayed"] == "true"
    assert Timeout.objects.get(policy=NUMBERED).reason == "rest:"
