"""Other services schedule, cancel and guard by a number, and get an answer that they can act on."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
from tests.integration.contrib.rest.conftest import ClientWith, stored
from tests.integration.contrib.rest.places import REMIND
from tests.support.typed import Declare, Patch
from tests.testapp.models import ExpressOrder, Order, Parcel, Voucher

pytestmark = pytest.mark.django_db
NUMBERED = "testapp.order.numbered"
ADDRESSES = {"schedule": "schedule_timeout", "cancel": "cancel_timeout", "guard": "cancel_timeout"}


@pytest.fixture(autouse=True)
def numbered(declare: Declare) -> TimeoutPolicy[Any]:
    """A policy whose orders are known by their note."""
    options: dict[str, Any] = {"after": timedelta(minutes=30), "since": "created_at", "when": Q(status="unpaid")}
    return declare(Order, name="numbered", search="note", **options)


@pytest.fixture
def service(client_with: ClientWith) -> APIClient:
    """The user of another service, who may view orders."""
    return client_with("schedule_timeout", "cancel_timeout", "view_order")


@pytest.fixture
def order() -> Order:
    return Order.objects.create(status="unpaid", note="A-2026-0050", created_at=timezone.now())


def ask(client: APIClient, what: str, **body: Any) -> Any:
    return client.post(f"/api/{what}/", body, format="json")


@contextmanager
def nothing_changes() -> Iterator[None]:
    before = stored()
    yield
    assert stored() == before


def rounds() -> list[tuple[str, str]]:
    return list(Timeout.objects.filter(policy=NUMBERED).order_by("pk").values_list("state", "reason"))


def test_scheduled_by_its_number_an_order_gets_its_deadline(service: APIClient, order: Order) -> None:
    answer = ask(service, "schedule", policy=NUMBERED, search=order.note, hours=2, minutes=3, reason="asked for time")
    row, by = Timeout.objects.get(policy=NUMBERED), f"rest:{User.objects.get().username}"
    assert (answer.status_code, answer.data["refusal"], answer.data["timeout"]["id"]) == (200, None, row.pk)
    assert timedelta(hours=2) < row.due_at - timezone.now() < timedelta(hours=2, minutes=4)
    assert row.reason == f"asked for time ({by})"
    assert "payload" not in answer.data["timeout"]
    Timeout.objects.all().delete()
    assert ask(service, "schedule", policy=NUMBERED, object=order.pk).status_code == 200
    row = Timeout.objects.get()
    assert row.is_computed and row.due_at == order.created_at + timedelta(minutes=30)  # type: ignore[operator]
    at = timezone.now() + timedelta(days=3)
    body = {"policy": REMIND, "object": str(order.pk), "key": " sms ", "payload": {"to": ["+49"]}, "at": at.isoformat()}
    assert ask(service, "schedule", **body).status_code == 200
    row = Timeout.objects.get(policy=REMIND)
    assert (row.key, row.payload, row.due_at, row.reason) == (" sms ", {"to": ["+49"]}, at, by)
    form = {"policy": REMIND, "object": order.pk, "search": "", "hours": "1", "payload": '{"a": 1}', "at": ""}
    assert service.post("/api/schedule/", form, format="multipart").status_code == 200
    assert Timeout.objects.get(policy=REMIND, key="").payload == {"a": 1}


@pytest.mark.dialect
@pytest.mark.parametrize(("on_conflict", "status"), [("replace", 200), ("keep", 200), ("once", 200), ("error", 409)])
def test_a_pending_one_is_replaced_kept_or_reported(
    service: APIClient, order: Order, on_conflict: str, status: int
) -> None:
    first = dq.schedule_timeout(order, REMIND, hours=1)
    at = (timezone.now() + timedelta(hours=5)).isoformat()
    answer = ask(service, "schedule", policy=REMIND, object=order.pk, at=at, on_conflict=on_conflict)
    assert (answer.status_code, answer.data["timeout"]["id"]) == (status, first.pk)
    moved = Timeout.objects.get(pk=first.pk).due_at > first.due_at
    assert moved is (on_conflict in {"replace", "once"})
    assert (answer.data["refusal"] or {}).get("code") == ("pending" if status == 409 else None)


def test_a_deadline_beyond_the_limit_of_the_policy_is_refused(service: APIClient, declare: Declare) -> None:
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
    assert ask(service, "cancel", policy=NUMBERED, search=order.note).data["cancelled"] is True
    order.save()
    assert [state for state, _ in rounds()] == ["cancelled"]
    none = {"policy": REMIND, "object": order.pk}
    assert ask(service, "cancel", **none).data == {"cancelled": True, "timeout": None}
    assert ask(service, "guard", **none).data == {"in_time": True, "refusal": None, "timeout": None}
    for key in ("a", "b"):
        dq.schedule_timeout(order, REMIND, hours=1, key=key)
    assert ask(service, "cancel", **none, key="a").data["timeout"]["key"] == "a"
    assert dict(Timeout.objects.filter(policy=REMIND).values_list("key", "state")) == {"a": "cancelled", "b": "pending"}


def test_after_the_firing_a_cancel_and_an_event_are_too_late(service: APIClient, order: Order) -> None:
    about = {"policy": REMIND, "object": order.pk}
    dq.schedule_timeout(order, REMIND, seconds=0)
    with nothing_changes():
        strict = ask(service, "guard", **about, strict=True)
    assert (strict.status_code, strict.data["refusal"]["code"]) == (409, "passed"), "before it fired"
    assert fire_due("testapp.order.remind") == 1
    answer = ask(service, "cancel", **about)
    assert (answer.status_code, answer.data["cancelled"], answer.data["timeout"]["state"]) == (200, False, "fired")
    answer = ask(service, "guard", **about)
    assert (answer.status_code, answer.data["in_time"]) == (409, False)
    assert (answer.data["refusal"]["code"], answer.data["timeout"]["state"]) == ("passed", "fired")


def test_an_event_in_time_cancels_the_timeout_and_may_proceed(service: APIClient, order: Order) -> None:
    Order.objects.filter(pk=order.pk).update(status="paid")
    with nothing_changes():
        second = ask(service, "guard", policy=NUMBERED, search=order.note, waiting=True)
    assert (second.status_code, second.data["refusal"]["code"]) == (409, "not_waiting"), "a second payment"
    Order.objects.filter(pk=order.pk).update(status="unpaid")
    answer = ask(service, "guard", policy=NUMBERED, search=order.note, waiting=True, strict=True)
    assert (answer.status_code, answer.data["in_time"], answer.data["refusal"]) == (200, True, None)
    order.save()  # it is not armed again
    assert [state for state, _ in rounds()] == ["cancelled"]


@pytest.mark.parametrize("what", ADDRESSES)
def test_each_request_needs_its_permission_and_a_search_that_to_view(
    what: str, client_with: ClientWith, order: Order
) -> None:
    codename = ADDRESSES[what]
    others = {"view_timeout", "postpone_timeout", "fire_timeout", *ADDRESSES.values()} - {codename}
    body = {"policy": REMIND, "object": order.pk} | ({"hours": 1} if what == "schedule" else {})
    allowed = client_with(codename)
    with nothing_changes():
        assert ask(APIClient(), what, **body).status_code in (401, 403)
        for refused in (client_with(), client_with(*others), client_with(codename, staff=False)):
            assert ask(refused, what, **body).status_code == 403
        for number in (order.note, "A-2026-9999"):  # numbers cannot be tried out
            assert ask(allowed, what, policy=NUMBERED, search=number).status_code == 403
        answer = allowed.post(f"/api/{what}/?strict=true", body, format="json")
        assert (answer.status_code, [*answer.data]) == (400, ["strict"]), "parameters in the address are refused"
    assert ask(allowed, what, **body).status_code == 200
    assert allowed.get(f"/api/{what}/").status_code == 405


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


BAD: list[tuple[dict[str, Any], str]] = [
    *(({"policy": value}, "policy") for value in ("testapp.order.nothing", "remind", "", None)),
    *(({"object": "seventeen"}, "object"), ({"object": None}, "object"), ({"search": "A-1"}, "object")),
    *(({"key": "k" * 201}, "key"), ({"key": "\0"}, "key"), ({"untill": "2030-01-01"}, "untill"), ({"\ud800": 1}, "?")),
]
BAD_DEADLINES: list[tuple[dict[str, Any], str]] = [
    *((change, "delay") for change in ({}, {"weeks": 1e8}, {"hours": 1, "at": "2030-01-01T00:00:00Z"})),
    *(
        ({"hours": -1}, "hours"),
        ({"at": "9999-01-01T00:00:00Z"}, "at"),
        ({"hours": 1, "on_conflict": "x"}, "on_conflict"),
    ),
    *(({"hours": 1, "payload": value}, "payload") for value in ("\0", ["\ud800"], "x" * 1_000_001)),
    *((({"on_conflict": "once", **delay}), "delay") for delay in ({"hours": 5}, {})),
]
"""`once` needs a deadline that does not count from now."""


@pytest.mark.parametrize("what", ADDRESSES)
def test_bad_input_is_refused_by_its_name_and_changes_nothing(service: APIClient, order: Order, what: str) -> None:
    dq.schedule_timeout(order, REMIND, hours=1)
    with nothing_changes():
        for change, name in (*BAD, *(BAD_DEADLINES if what == "schedule" else [])):
            body = json.dumps({"policy": REMIND, "object": order.pk, **change})
            answer = service.post(f"/api/{what}/", body, content_type="application/json")
            assert (answer.status_code, [*answer.json()]) == (400, [name]), change
        for shapeless in ("{}", "[]", f'{{"policy": "{REMIND}"}}'):
            answer = service.post(f"/api/{what}/", shapeless, content_type="application/json")
            assert answer.status_code == 400


def test_a_model_without_numbers_is_found_by_its_key(service: APIClient, declare: Declare) -> None:
    parcel, voucher = Parcel.objects.create(), Voucher.objects.create(code="Go 7")
    refused = ask(service, "cancel", policy="testapp.parcel.chase", search=str(parcel.pk))
    assert (refused.status_code, [*refused.data]) == (400, ["search"])
    assert ask(service, "cancel", policy="testapp.parcel.chase", object=parcel.pk.hex).status_code == 200
    assert ask(service, "cancel", policy="testapp.voucher.expire", object="Go 7").status_code == 200
    missing = ask(service, "cancel", policy="testapp.voucher.expire", object="Go 8")
    assert (missing.status_code, voucher.pk) == (404, "Go 7")
    declare(ExpressOrder, name="ship")
    User.objects.get().user_permissions.add(Permission.objects.get(codename="view_expressorder"))
    express = ExpressOrder.objects.create(status="new", note="E-1")
    answer = ask(service, "schedule", policy="testapp.expressorder.ship", search="E-1", hours=1)
    assert (answer.status_code, answer.data["timeout"]["object"]["id"]) == (200, str(express.pk)), (
        "by its parent's number"
    )


def test_a_project_may_admit_requests_without_a_user(settings: Any, order: Order, monkeypatch: Patch) -> None:
    """They may not search, and have keys of their own."""
    settings.REST_FRAMEWORK = {**settings.REST_FRAMEWORK, "UNAUTHENTICATED_USER": None}
    monkeypatch.setattr(CancelView, "permission_classes", [AllowAny])
    assert ask(APIClient(), "cancel", policy=NUMBERED, search=order.note).status_code == 403
    headers = {"Idempotency-Key": "k"}
    body = {"policy": NUMBERED, "object": order.pk}
    answers = [APIClient().post("/api/cancel/", body, format="json", headers=headers) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[1]["Idempotent-Replayed"] == "true"
    assert Timeout.objects.get(policy=NUMBERED).reason == "rest:"
