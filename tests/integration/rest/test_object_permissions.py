"""Every address about an object asks the object's permission; services are restricted to their policies and tenant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.urls import reverse
from rest_framework.permissions import BasePermission
from rest_framework.test import APIClient, APIRequestFactory, force_authenticate

import django_delayq as dq
from django_delayq import TimeoutPolicy
from django_delayq.contrib.rest_framework import CancelView, GuardView, ScheduleView, StaffWithPermission
from django_delayq.contrib.rest_framework.urls import urlpatterns as ours
from django_delayq.models import PolicyChange, StoredAnswer, Timeout
from tests.testapp.models import ExpressOrder, Order, Parcel

pytestmark = pytest.mark.django_db
REMIND = "testapp.order.remind"
SERVICES = {"schedule": ScheduleView, "cancel": CancelView, "guard": GuardView}
BODIES: dict[str, Any] = {
    "timeout-postpone": {"minutes": 5},
    "timeout-reschedule": {"shift_seconds": 60},
    "policy-late": {"off": True},
    "policy-brake": {"most": 5, "per_seconds": 60},
    "policy-shadow": {"share": 5},
}
KEY = {"Idempotency-Key": "k"}


class IsBuyer(BasePermission):
    """A buyer has no account, but a receipt."""

    def has_object_permission(self, request: Any, view: Any, obj: Any) -> bool:
        return bool(request.headers.get("X-Receipt") == str(obj.pk))


def addresses() -> list[tuple[str, str, str]]:
    """Name, method and argument of each address in the URL configuration."""
    found = []
    for pattern in ours:
        callback: Any = pattern.callback
        actions = getattr(callback, "actions", None) or [
            each for each in ("get", "post") if hasattr(callback.cls, each)
        ]
        argument = next((each for each in ("pk", "label") if f"<{each}>" in str(pattern.pattern)), "")
        found += [(str(pattern.name), method, argument) for method in actions]
    return found


@pytest.fixture
def order() -> Order:
    return Order.objects.create(status="new", note="A-1")


def stored() -> list[Any]:
    """All rows that a request may change."""
    columns = [field.attname for field in Timeout._meta.concrete_fields]
    rows: list[Any] = [*Timeout.objects.order_by("pk").values(*columns), *StoredAnswer.objects.values()]
    return [*rows, PolicyChange.objects.count()]


@pytest.mark.parametrize("with_key", [False, True])
def test_each_address_with_an_object_asks_the_permission_of_the_object(
    order: Order, monkeypatch: pytest.MonkeyPatch, with_key: bool
) -> None:
    """`with_key`: also if an earlier answer is stored."""
    row, client = dq.schedule_timeout(order, REMIND, hours=1), APIClient()
    client.force_login(User.objects.create_superuser("boss"))
    about_it: dict[str, Any] = {"policy": REMIND, "object": order.pk}
    bodies = {**BODIES, **dict.fromkeys(SERVICES, about_it), "schedule": {**about_it, "minutes": 9}}
    values: dict[str, Any] = {"pk": {"pk": row.pk}, "label": {"label": REMIND}, "": {}}

    def ask(name: str, method: str, argument: str) -> Any:
        options: dict[str, Any] = {"headers": {"Idempotency-Key": name} if with_key else {}, "format": "json"}
        address = reverse(f"django_delayq:{name}", kwargs=values[argument])
        return (
            client.post(address, bodies.get(name, {}), **options)
            if method == "post"
            else getattr(client, method)(address)
        )

    if with_key:
        assert [ask(each, "post", "").status_code for each in SERVICES] == [200] * 3
    monkeypatch.setattr(StaffWithPermission, "has_object_permission", lambda *_: False)
    asked, before = set(), stored()
    for name, method, argument in addresses():
        if argument or name in SERVICES:
            asked.add(name)
            assert ask(name, method, argument).status_code in (403, 404), name
    assert stored() == before
    assert {name for name, _, _ in addresses()} - asked == {"root", "timeout-list", "policy-list", "status", "overview"}
    assert asked >= {"timeout-detail", "timeout-cancel", "policy-pause", "policy-report", *SERVICES}


class OfBuyer(CancelView):
    permission_classes = [IsBuyer]


class OfTenant(CancelView):
    """Tenants are known by the status of their orders."""

    policies = [REMIND, "testapp.expressorder.ship"]

    def get_queryset(self) -> Any:
        return self.policy.model.objects.filter(status=self.request.headers["X-Tenant"])


class OfQuerySet(CancelView):
    policies = ["testapp.order.remind", "testapp.parcel.chase"]
    queryset = Order.objects.exclude(status="secret")


def ask(view: Any, user: User | None, headers: dict[str, str], **body: Any) -> Any:
    request = APIRequestFactory(headers=headers).post("/", body, format="json")
    force_authenticate(request, user)
    return view.as_view()(request)


def test_a_stranger_cannot_distinguish_an_order_of_another_from_none(order: Order) -> None:
    dq.schedule_timeout(order, REMIND, hours=1)
    for headers in ({}, KEY):
        before = stored()
        other = ask(OfBuyer, None, headers, policy=REMIND, object=order.pk)
        none = ask(OfBuyer, None, headers, policy=REMIND, object=order.pk + 1)
        assert (other.status_code, none.status_code, stored()) == (404, 404, before)
        assert str(other.data).replace(str(order.pk), str(order.pk + 1)) == str(none.data)
    assert ask(OfBuyer, None, {"X-Receipt": str(order.pk)}, policy=REMIND, object=order.pk).data["cancelled"] is True


def test_callers_without_a_user_do_not_share_the_keys_of_other_objects(order: Order) -> None:
    """One who takes a key first neither gets the answer of another, nor keeps that key from being used."""
    other = Order.objects.create(status="new")
    answers = [
        ask(OfBuyer, None, {"X-Receipt": str(each.pk), **KEY}, policy=REMIND, object=each.pk, reason=reason)
        for each, reason in ((order, ""), (other, ""), (order, ""), (order, "another"))
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 422]
    assert ["Idempotent-Replayed" in answer.headers for answer in answers] == [False, False, True, False]
    Order.objects.filter(pk=order.pk).delete()
    gone = ask(OfBuyer, None, {"X-Receipt": str(order.pk), **KEY}, policy=REMIND, object=order.pk)
    assert gone.status_code == 404, "whether the caller may see it can no longer be asked"


def test_a_view_serves_its_policies_and_objects_only(declare: Callable[..., TimeoutPolicy[Any]]) -> None:
    """Two tenants have an order with the same number."""
    declare(Order, name="numbered", search="note")
    declare(ExpressOrder, name="ship")
    boss, tenant = User.objects.create_superuser("boss"), {"X-Tenant": "new"}
    own, other, express = (
        model.objects.create(status=status, note=note)
        for model, status, note in ((Order, "new", "N-1"), (Order, "paid", "N-1"), (ExpressOrder, "new", "E-1"))
    )
    for obj, policy, status in (
        *((own, REMIND, 200), (other, REMIND, 404), (own, "testapp.order.numbered", 400)),
        *((express, "testapp.expressorder.ship", 200), (express, REMIND, 200)),
    ):
        for headers in (tenant, {**tenant, "Idempotency-Key": f"{policy}{obj.pk}"}):
            assert ask(OfTenant, boss, headers, policy=policy, object=obj.pk).status_code == status
    dq.schedule_timeout(own, REMIND, hours=1)
    assert ask(CancelView, boss, {}, policy=REMIND, search="N-1").status_code == 409
    assert ask(OfTenant, boss, tenant, policy=REMIND, search="N-1").data["timeout"]["object"]["id"] == str(own.pk)
    assert ask(OfTenant, boss, {"X-Tenant": "old"}, policy=REMIND, search="N-1").status_code == 404


def test_the_queryset_of_a_view_serves_no_policy_of_another_model(order: Order) -> None:
    boss, parcel = User.objects.create_superuser("boss"), Parcel.objects.create()
    assert ask(OfQuerySet, boss, {}, policy=REMIND, object=order.pk).status_code == 200
    assert ask(OfQuerySet, boss, {}, policy="testapp.parcel.chase", object=str(parcel.pk)).status_code == 404
    Order.objects.update(status="secret")
    assert ask(OfQuerySet, boss, {}, policy=REMIND, object=order.pk).status_code == 404
