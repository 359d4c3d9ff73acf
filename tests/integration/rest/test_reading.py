"""REST lists and shows timeouts and policies, and why none fires: permissions, number of queries, and answers."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from django.contrib.contenttypes.models import ContentType
from django.core.cache import cache
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from rest_framework.test import APIClient
from rest_framework.throttling import ScopedRateThrottle

import django_delayq as dq
from django_delayq import clock, operations
from django_delayq.contrib.rest_framework import TimeoutViewSet
from django_delayq.ledger.rollups import BY_HOUR
from django_delayq.models import Timeout
from tests.integration.commands.conftest import a_worker
from tests.integration.rest.conftest import ClientWith, Schedule, ids, settle
from tests.integration.rest.places import LIST, POLICY, REMIND, STATUS
from tests.support.typed import Declare, Patch
from tests.testapp.models import Order, Parcel

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("url", [LIST, f"{LIST}{{pk}}/", "/api/policies/", POLICY, STATUS, "/api/overview/"])
def test_only_staff_with_the_permission_sees(url: str, client_with: ClientWith, schedule: Schedule) -> None:
    url = url.format(pk=schedule().pk)
    assert APIClient().get(url).status_code in (401, 403)
    assert client_with().get(url).status_code == 403
    assert client_with("view_timeout", staff=False).get(url).status_code == 403
    assert client_with("view_timeout").get(url).status_code == 200


def test_a_row_says_what_the_ledger_has(viewer: APIClient, schedule: Schedule) -> None:
    row = schedule(key="k1", reason="asked for", payload={"n": 1})
    (shown,) = viewer.get(LIST).json()["results"]
    told = {"policy": REMIND, "state": "pending", "key": "k1", "reason": "asked for", "failing": False}
    told |= {"object": {"model": "testapp.order", "id": row.object_id}}
    assert shown == {**shown, **told, "due_at": timezone.localtime(row.due_at).isoformat()}
    assert not {"payload", "history", "idempotency_key"} & shown.keys()
    Timeout.objects.update(policy="gone.thing.rule", content_type_id=99999)
    ContentType.objects.clear_cache()
    (shown,) = viewer.get(LIST).data["results"]
    assert shown["object"] == {"model": None, "id": row.object_id}
    assert viewer.get(f"{LIST}{row.pk}/").status_code == 200
    (gone,) = [policy for policy in viewer.get(STATUS).json()["policies"] if not policy["is_declared"]]
    assert (gone["label"], gone["pending"]["value"], gone["stop"]) == ("gone.thing.rule", 1, None)


def test_a_list_takes_the_same_few_queries_however_long_it_is(viewer: APIClient, schedule: Schedule) -> None:
    schedule()
    parcel = Parcel.objects.create(sent_at=timezone.now())
    viewer.get(LIST)  # the kinds of objects are known now
    counts = []
    for _ in range(2):
        with CaptureQueriesContext(connection) as captured:
            assert len(ids(viewer.get(LIST))) == Timeout.objects.count()
        statements = [query["sql"] for query in captured][:-1]
        counts.append(len([sql for sql in statements if "django_delayq_timeout" in sql]))
        assert not any(word in sql for word in ("COUNT(", "testapp_order", "payload", "history") for sql in statements)
        for _ in range(10):
            schedule()
    assert counts == [3, 3], "the rows, whether anything keeps them from firing, and whether their clocks run"
    assert parcel.timeouts.count() == 1


def test_the_detail_tells_the_story_and_the_failures(viewer: APIClient, schedule: Schedule) -> None:
    row = schedule(payload={"n": 1})
    dq.extend_timeout(row, minutes=5, reason="asked for it")
    error = {"error": "KeyError", "message": "'x'", "traceback": "T"}
    row.refresh_from_db()
    Timeout.objects.update(history=[*row.history, {"at": "2026-01-01T00:00:00+00:00", "what": "failed", **error}])
    shown = viewer.get(f"{LIST}{row.pk}/").json()
    assert [event["what"] for event in shown["story"]["events"]] == ["failed", "scheduled", "extended"]
    assert "asked for it" in shown["story"]["events"][2]["text"]
    assert shown["story"]["outlook"].startswith("It is due at")
    at = "2025-12-31T21:00:00-03:00"  # in the zone of all other times of the response
    assert shown["errors"] == [{"at": at, **error}]
    assert (shown["payload"], shown["idempotency_key"]) == ({"n": 1}, row.idempotency_key)


def test_a_policy_is_found_under_its_former_names(viewer: APIClient, schedule: Schedule, declare: Declare) -> None:
    row = schedule()
    Timeout.objects.update(policy="testapp.order.nudge_before")
    declare(Order, name="nudge", aliases=["nudge_before"])
    assert ids(viewer.get(f"{LIST}?policy=testapp.order.nudge")) == [row.pk]
    shown = viewer.get("/api/policies/testapp.order.nudge_before/").data
    assert (shown["label"], shown["former_labels"]) == ("testapp.order.nudge", ["testapp.order.nudge_before"])


def test_a_policy_tells_how_it_was_declared(viewer: APIClient, declare: Any) -> None:
    shown = viewer.get("/api/policies/testapp.order.cancel_unpaid/").json()
    told = {"declared_seconds": 1800, "seconds": 1800, "stop": None, "until": None, "since": "created_at"}
    told |= {"automatic": True, "model": "testapp.order", "limits": None, "condition": 'status = "unpaid"'}
    assert shown == {**shown, **told, "handler": "tests.testapp.timeouts.cancel_unpaid"}
    labels = [policy["label"] for policy in viewer.get("/api/policies/").json()]
    assert labels == sorted(policy.label for policy in dq.get_policies())
    rate = dq.Rate(20, per=timedelta(minutes=1), by="status")
    declare(Order, name="text", limits=dq.Limits(rate=rate, total=timedelta(1)))
    shown = viewer.get("/api/policies/testapp.order.text/").json()["limits"]
    rates = {"count": 20, "per_seconds": 60.0, "by": "status"}
    assert shown == {"run_seconds": None, "rate": rates, "snoozes": None, "total_seconds": 86400.0}


def test_the_time_of_the_server_is_like_the_other_times(viewer: APIClient, schedule: Schedule, settings: Any) -> None:
    detail, at = f"{LIST}{schedule().pk}/", timezone.now() + timedelta(hours=3)
    with clock.set_to(at), timezone.override("Asia/Kolkata"):
        for address, name in ((LIST, "server_time"), (detail, "server_time"), (STATUS, "at")):
            shown = viewer.get(address).json()[name]
            assert datetime.fromisoformat(shown) == at and shown.endswith("+05:30")
    settings.REST_FRAMEWORK = {"DATETIME_FORMAT": "%Y"}
    assert viewer.get(LIST).json()["server_time"] == str(timezone.now().year)


def test_a_project_may_limit_requests_by_scope_or_leave_it(
    viewer: APIClient, settings: Any, monkeypatch: Patch
) -> None:
    settings.CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache", "LOCATION": "scopes"}}
    monkeypatch.setattr(TimeoutViewSet, "throttle_classes", [ScopedRateThrottle])
    for rates, codes in (({}, [200, 200]), ({"delayq": "1/hour"}, [200, 429])):
        settings.REST_FRAMEWORK = {**settings.REST_FRAMEWORK, "DEFAULT_THROTTLE_RATES": rates}
        monkeypatch.setattr(ScopedRateThrottle, "THROTTLE_RATES", rates)  # as when Django starts with these settings
        cache.clear()
        assert [viewer.get(LIST).status_code for _ in codes] == codes


def test_status_and_overview_count_what_waits_and_say_who_works(viewer: APIClient, schedule: Schedule) -> None:
    schedule(), schedule("linger")
    late = timezone.now() - timedelta(minutes=1)
    Timeout.objects.filter(pk=schedule(minutes=0).pk).update(run_at=late, created_at=late)
    operations.pause("testapp.order.linger", by="admin:ann")
    a_worker(host="h", queues=["default"])
    shown, overview = viewer.get(STATUS).json(), viewer.get("/api/overview/").json()
    assert shown["pending"] == {"value": 3, "is_capped": False}
    assert shown["overdue"]["value"] == 1 and shown["oldest_overdue_seconds"] >= 60
    assert [(one["name"], one["queues"]) for one in shown["workers"]] == [("h:7", ["default"])]
    stops = {policy["label"]: policy["stop"] for policy in shown["policies"]}
    assert (stops["testapp.order.linger"], stops[REMIND]) == ("paused", None)
    assert overview.keys() == shown.keys() and overview["policies"][0]["urgency"] == "overdue"
    assert len(overview["hours"]) == 24 and set(overview["hours"][0]) == {"begins_at", *BY_HOUR}


def test_failing_timeouts_are_listed_with_the_next_attempt_first_and_counted(
    viewer: APIClient, schedule: Schedule
) -> None:
    later, sooner, other = schedule(minutes=9), schedule(minutes=8), schedule("linger", minutes=1)
    Timeout.objects.update(attempts=2)
    schedule()
    assert ids(viewer.get(f"{LIST}?failing=true")) == [other.pk, sooner.pk, later.pk]
    assert ids(viewer.get(f"{LIST}?failing=true&policy={REMIND}&state=pending")) == [sooner.pk, later.pk]
    for contradiction in ("failing=true&state=dead", "failing=1&settled_from=2026-01-01"):
        assert viewer.get(f"{LIST}?{contradiction}").status_code == 400
    assert viewer.get(f"{LIST}{later.pk}/").json()["failing"] is True
    assert viewer.get(POLICY).json()["failing"] == 2
    assert viewer.get(STATUS).json()["failing"] == {"value": 3, "is_capped": False}


def test_it_is_shown_why_nothing_fires(viewer: APIClient, schedule: Schedule, declare: Declare) -> None:
    declare(Order, name="mailed", queue="mail")
    row = schedule()

    def found(address: str) -> list[tuple[str, str]]:
        return [(each["code"], each["policy"] or each["queue"]) for each in viewer.get(address).json()["obstacles"]]

    detail = f"{LIST}{row.pk}/"
    for address in (LIST, detail, STATUS):
        assert found(address) == [("no_worker", "")]
    a_worker(queues=["default"])
    assert (found(LIST), found(detail), found(STATUS)) == ([], [], [("no_worker_for_queue", "mail")])
    operations.pause(REMIND, by="admin:alice", reason="outage")
    schedule("linger")
    assert found(LIST) == found(detail) == [("paused", REMIND)]
    (shown,) = viewer.get(detail).json()["obstacles"]
    assert (shown["by"], shown["reason"], shown["until"]) == ("admin:alice", "outage", None)
    assert shown["text"] == "Its policy is paused by admin:alice until an operator resumes it. (outage)"
    settle(row)
    assert (found(detail), found(f"{LIST}?state=fired")) == ([], []), "nothing keeps a settled timeout from firing"
