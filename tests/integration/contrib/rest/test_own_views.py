"""Views that a project derives from ours keep what it has set in Django REST framework's way."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.urls import reverse
from rest_framework.filters import BaseFilterBackend
from rest_framework.pagination import PageNumberPagination
from rest_framework.permissions import BasePermission
from rest_framework.serializers import ModelSerializer
from rest_framework.test import APIClient, APIRequestFactory, force_authenticate
from rest_framework.versioning import QueryParameterVersioning

import django_delayq as dq
from django_delayq.contrib.rest_framework import (
    CancelView,
    GuardView,
    PolicyViewSet,
    ScheduleView,
    StaffWithPermission,
    TimeoutViewSet,
)
from django_delayq.contrib.rest_framework.urls import urlpatterns as ours
from django_delayq.models import PolicyChange, StoredAnswer, Timeout
from tests.integration.contrib.rest.conftest import Schedule, stored
from tests.integration.contrib.rest.places import POLICY_VERBS, REMIND, VERBS
from tests.support.typed import Declare, Patch
from tests.testapp.models import ExpressOrder, Order

pytestmark = pytest.mark.django_db


class Mine(BaseFilterBackend):
    """Only rows with the key `mine`."""

    def filter_queryset(self, request: Any, queryset: Any, view: Any) -> Any:
        return queryset.filter(key="mine")


class OfMethod(TimeoutViewSet):
    def get_queryset(self) -> Any:
        return super().get_queryset().filter(key="mine")


class OfBackend(TimeoutViewSet):
    filter_backends = [Mine]


def answer(view: Any, method: str, action: str, query: str = "", **path: Any) -> Any:
    request = getattr(APIRequestFactory(), method)(f"/{query}")
    force_authenticate(request, User.objects.get_or_create(username="boss", is_staff=True, is_superuser=True)[0])
    return view.as_view({method: action})(request, **path)


QUERIES = ["", "?state=pending", "?policy=testapp.order.remind", "?search={id}", "?object=testapp.order:{id}", "?key=k"]


@pytest.mark.parametrize("view", [OfMethod, OfBackend])
def test_rows_that_a_view_leaves_out_are_neither_listed_nor_changed(view: Any, schedule: Schedule) -> None:
    own, other = schedule(key="mine"), schedule(key="k")
    for query in QUERIES:
        found = answer(view, "get", "list", query.format(id=other.object_id)).data["results"]
        assert [row["id"] for row in found] == ([own.pk] if query in QUERIES[:3] else [])
    assert answer(view, "get", "retrieve", pk=own.pk).status_code == 200
    assert answer(view, "get", "retrieve", pk=other.pk).status_code == 404
    assert answer(view, "post", "cancel", pk=other.pk).status_code == 404
    assert Timeout.objects.get(pk=other.pk).state == "pending"


class IdSerializer(ModelSerializer[Timeout]):
    class Meta:
        model = Timeout
        fields = ["id"]


class Numbered(TimeoutViewSet):
    serializer_class = IdSerializer
    pagination_class: Any = PageNumberPagination
    versioning_class = QueryParameterVersioning


class Whole(Numbered):
    pagination_class = None


def test_a_view_keeps_its_own_pages_and_serializer(schedule: Schedule, monkeypatch: Patch) -> None:
    monkeypatch.setattr(PageNumberPagination, "page_size", 1)
    first, second = schedule(), schedule()
    found = answer(Numbered, "get", "list", "?page=2&queue=default&version=v1").data
    assert (found["count"], found["results"]) == (2, [{"id": first.pk}])
    assert answer(Whole, "get", "list").data == [{"id": second.pk}, {"id": first.pk}]
    assert answer(Whole, "get", "list", "?page=2").status_code == 400
    assert answer(Whole, "get", "list", "?queue=none").data == []


def test_a_request_without_a_user_is_refused(settings: Any) -> None:
    settings.REST_FRAMEWORK = {**settings.REST_FRAMEWORK, "UNAUTHENTICATED_USER": None}
    for view in (TimeoutViewSet, PolicyViewSet):
        assert view.as_view({"get": "list"})(APIRequestFactory().get("/")).status_code in {401, 403}


SERVICES = {"schedule": ScheduleView, "cancel": CancelView, "guard": GuardView}


BODIES: dict[str, Any] = {
    **{f"timeout-{verb}": body for verb, (_, body) in VERBS.items()},
    **{f"policy-{verb}": body for verb, body in POLICY_VERBS.items()},
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


def everything() -> list[Any]:
    """All rows that a request may change."""
    return [*stored(), *StoredAnswer.objects.values(), PolicyChange.objects.count()]


@pytest.mark.parametrize("with_key", [False, True])
def test_each_address_with_an_object_asks_the_permission_of_the_object(
    order: Order, monkeypatch: Patch, with_key: bool
) -> None:
    """`with_key`: also if an earlier answer is stored."""
    row, client = dq.schedule_timeout(order, REMIND, hours=1), APIClient()
    client.force_login(User.objects.create_superuser("boss"))
    about_it: dict[str, Any] = {"policy": REMIND, "object": order.pk}
    bodies = {**BODIES, **dict.fromkeys(SERVICES, about_it), "schedule": {**about_it, "minutes": 9}}
    values: dict[str, Any] = {"pk": {"pk": row.pk}, "label": {"label": REMIND}, "": {}}

    def ask(name: str, method: str, argument: str) -> Any:
        options: dict[str, Any] = {"headers": {"Idempotency-Key": name} if with_key else {}, "format": "json"}
        sent = [bodies.get(name, {})] if method == "post" else []
        return getattr(client, method)(reverse(f"django_delayq:{name}", kwargs=values[argument]), *sent, **options)

    if with_key:
        assert [ask(each, "post", "").status_code for each in SERVICES] == [200] * 3
    monkeypatch.setattr(StaffWithPermission, "has_object_permission", lambda *_: False)
    asked, before = set(), everything()
    for name, method, argument in addresses():
        if argument or name in SERVICES:
            asked.add(name)
            assert ask(name, method, argument).status_code in (403, 404), name
    assert everything() == before
    assert {name for name, _, _ in addresses()} - asked == {"root", "timeout-list", "policy-list", "status", "overview"}
    assert asked >= {"timeout-detail", "timeout-cancel", "policy-pause", "policy-report", *SERVICES}


class OfBuyer(CancelView):
    permission_classes = [IsBuyer]


class OfTenant(CancelView):
    """Tenants are known by the status of their orders."""

    policies = [REMIND, "testapp.expressorder.ship"]

    def get_queryset(self) -> Any:
        return self.policy.model.objects.filter(status=self.request.headers["X-Tenant"])


def ask(view: Any, user: User | None, headers: dict[str, str], **body: Any) -> Any:
    request = APIRequestFactory(headers=headers).post("/", body, format="json")
    force_authenticate(request, user)
    return view.as_view()(request)


def test_a_stranger_cannot_distinguish_an_order_of_another_from_none(order: Order) -> None:
    dq.schedule_timeout(order, REMIND, hours=1)
    for headers in ({}, KEY):
        before = everything()
        other = ask(OfBuyer, None, headers, policy=REMIND, object=order.pk)
        none = ask(OfBuyer, None, headers, policy=REMIND, object=order.pk + 1)
        assert (other.status_code, none.status_code, everything()) == (404, 404, before)
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


def test_a_view_serves_its_policies_and_objects_only(declare: Declare) -> None:
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
