"""Views that a project derives from ours keep what it has set in Django REST framework's way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User
from rest_framework.filters import BaseFilterBackend
from rest_framework.pagination import PageNumberPagination
from rest_framework.serializers import ModelSerializer
from rest_framework.test import APIClient, APIRequestFactory, force_authenticate
from rest_framework.versioning import QueryParameterVersioning, URLPathVersioning

from django_delayq.contrib.rest_framework import PolicyViewSet, StatusView, TimeoutViewSet
from django_delayq.models import Timeout
from tests.testapp.models import ExpressOrder

pytestmark = pytest.mark.django_db
Schedule = Callable[..., Timeout]


class Mine(BaseFilterBackend):
    """Only rows with the key `mine`."""

    def filter_queryset(self, request: Any, queryset: Any, view: Any) -> Any:
        return queryset.filter(key="mine")


class OfMethod(TimeoutViewSet):
    def get_queryset(self) -> Any:
        return super().get_queryset().filter(key="mine")


class OfAttribute(TimeoutViewSet):
    queryset: Any = Timeout.objects.filter(key="mine")


class OfBackend(TimeoutViewSet):
    filter_backends = [Mine]


def answer(view: Any, method: str, action: str, query: str = "", **path: Any) -> Any:
    request = getattr(APIRequestFactory(), method)(f"/{query}")
    force_authenticate(request, User.objects.get_or_create(username="boss", is_staff=True, is_superuser=True)[0])
    return view.as_view({method: action})(request, **path)


QUERIES = ["", "?state=pending", "?policy=testapp.order.remind", "?search={id}", "?object=testapp.order:{id}", "?key=k"]


@pytest.mark.parametrize("view", [OfMethod, OfAttribute, OfBackend])
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


class Whole(Numbered):
    pagination_class = None


def test_a_view_keeps_its_own_pages_and_serializer(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageNumberPagination, "page_size", 1)
    first, second = schedule(), schedule()
    found = answer(Numbered, "get", "list", "?page=2&queue=default").data
    assert (found["count"], found["results"]) == (2, [{"id": first.pk}])
    assert answer(Whole, "get", "list").data == [{"id": second.pk}, {"id": first.pk}]
    assert answer(Whole, "get", "list", "?page=2").status_code == 400
    assert answer(Whole, "get", "list", "?queue=none").data == []


def test_addresses_may_have_further_arguments_such_as_a_version_or_the_key_of_a_parent(schedule: Schedule) -> None:
    one: dict[str, Any] = {"pk": schedule().pk}
    label, all_ = {"label": "testapp.order.remind"}, dict[str, Any]()
    views: list[tuple[Any, str, dict[str, Any]]] = [(TimeoutViewSet, "list", all_), (TimeoutViewSet, "retrieve", one)]
    views += [(PolicyViewSet, "list", all_), (PolicyViewSet, "retrieve", label)]
    for view, action, path in views:
        assert answer(view, "get", action, version="v1", order_pk="7", **path).status_code == 200
    assert answer(TimeoutViewSet, "post", "cancel", version="v1", **one).status_code == 200
    assert answer(PolicyViewSet, "post", "pause", version="v1", **label).status_code == 200
    request = APIRequestFactory().get("/")
    force_authenticate(request, User.objects.get(username="boss"))
    assert StatusView.as_view()(request, version="v1").status_code == 200


class Versioned(TimeoutViewSet):
    versioning_class = QueryParameterVersioning


class VersionedByAddress(TimeoutViewSet):
    versioning_class = URLPathVersioning


def test_the_query_may_have_a_version_where_the_project_asks_for_one(schedule: Schedule) -> None:
    assert len(answer(Versioned, "get", "list", f"?version=v1&object=testapp.order:{schedule().object_id}").data) == 4
    assert answer(TimeoutViewSet, "get", "list", "?version=v1").status_code == 400
    assert answer(VersionedByAddress, "get", "list", "?version=v1", version="v1").status_code == 400


def test_a_request_without_a_user_is_refused(settings: Any) -> None:
    settings.REST_FRAMEWORK = {**settings.REST_FRAMEWORK, "UNAUTHENTICATED_USER": None}
    for view in (TimeoutViewSet, PolicyViewSet):
        assert view.as_view({"get": "list"})(APIRequestFactory().get("/")).status_code in {401, 403}


def test_an_object_is_found_by_the_model_of_its_child(viewer: APIClient, schedule: Schedule) -> None:
    row = schedule(order=ExpressOrder.objects.create())
    schedule()
    found = viewer.get(f"/api/timeouts/?object=testapp.expressorder:{row.object_id}").json()["results"]
    assert [each["id"] for each in found] == [row.pk]


@pytest.mark.parametrize("value", ["testapp%00.order:1", "testapp.order%00:1", "testapp.voucher:A%00B"])
def test_an_object_with_a_nul_is_refused(viewer: APIClient, value: str) -> None:
    assert viewer.get(f"/api/timeouts/?object={value}").status_code == 400
