"""REST lists, finds and shows timeouts and policies: permissions, number of queries, and order."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import quote

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
from django_delayq.contrib.rest_framework import TimeoutViewSet, inputs
from django_delayq.ledger import search
from django_delayq.ledger.rollups import BY_HOUR
from django_delayq.models import Timeout, WorkerSeen
from tests.testapp.models import Order, Parcel, Voucher

pytestmark = pytest.mark.django_db
LIST = "/api/timeouts/"
Schedule = Callable[..., Timeout]


def ids(answer: Any) -> list[int]:
    assert answer.status_code == 200, answer.data
    return [row["id"] for row in answer.data["results"]]


def all_pages(client: APIClient, url: str) -> list[list[int]]:
    found = []
    while url:
        answer = client.get(url)
        found.append(ids(answer))
        url = answer.data["next"]
    return found


def all_rows(client: APIClient, url: str) -> list[int]:
    return [pk for page in all_pages(client, url) for pk in page]


def settle(row: Timeout, state: str = "fired", cause: str = "due", **changes: Any) -> Timeout:
    changes = {"settled_at": timezone.now(), "slot_taken": None, **changes}
    Timeout.objects.filter(pk=row.pk).update(state=state, cause=cause, **changes)
    return row


STATUS = "/api/status/"
READ = [LIST, f"{LIST}1/", "/api/policies/", "/api/policies/testapp.order.remind/", STATUS]


@pytest.mark.parametrize("url", READ)
def test_strangers_and_staff_without_the_permission_see_nothing(
    url: str, client_with: Callable[..., APIClient]
) -> None:
    assert APIClient().get(url).status_code in (401, 403)
    assert client_with().get(url).status_code == 403
    assert client_with("view_timeout", staff=False).get(url).status_code == 403


@pytest.mark.parametrize("url", [LIST, "/api/policies/", "/api/policies/testapp.order.remind/", STATUS])
def test_staff_with_the_permission_sees(url: str, viewer: APIClient) -> None:
    assert viewer.get(url).status_code == 200


def test_a_row_says_what_the_ledger_has(viewer: APIClient, schedule: Schedule) -> None:
    row = schedule(key="k1", reason="asked for", payload={"n": 1})
    (shown,) = viewer.get(LIST).json()["results"]
    assert shown["object"] == {"model": "testapp.order", "id": row.object_id}
    assert shown["due_at"] == timezone.localtime(row.due_at).isoformat()
    assert (shown["policy"], shown["state"], shown["key"], shown["reason"]) == (
        "testapp.order.remind", "pending", "k1", "asked for",
    )  # fmt: skip
    assert not {"payload", "history", "idempotency_key"} & shown.keys()


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
        assert not any("COUNT(" in sql or "testapp_order" in sql for sql in statements)
        assert not any("payload" in sql or "history" in sql for sql in statements)
        for _ in range(10):
            schedule()
    assert counts == [3, 3], "the rows, whether anything keeps them from firing, and whether their clocks run"
    assert parcel.timeouts.count() == 1


def test_rows_whose_model_or_policy_is_gone_are_still_shown(viewer: APIClient, schedule: Schedule) -> None:
    row = schedule()
    Timeout.objects.update(policy="gone.thing.rule", content_type_id=99999)
    ContentType.objects.clear_cache()
    (shown,) = viewer.get(LIST).data["results"]
    assert shown["object"] == {"model": None, "id": row.object_id}
    assert viewer.get(f"{LIST}{row.pk}/").status_code == 200


def test_the_detail_tells_the_story_and_the_failures(viewer: APIClient, schedule: Schedule) -> None:
    row = schedule(payload={"n": 1})
    dq.extend_timeout(row, minutes=5, reason="asked for it")
    failed = {
        "at": "2026-01-01T00:00:00+00:00",
        "what": "failed",
        "error": "KeyError",
        "message": "'x'",
        "traceback": "T",
    }
    row.refresh_from_db()
    Timeout.objects.update(history=[*row.history, failed])
    shown = viewer.get(f"{LIST}{row.pk}/").json()
    assert [event["what"] for event in shown["story"]["events"]] == ["failed", "scheduled", "extended"]
    assert "asked for it" in shown["story"]["events"][2]["text"]
    assert shown["story"]["outlook"].startswith("It is due at")
    at = "2025-12-31T21:00:00-03:00"  # in the zone of all other times of the response
    assert shown["errors"] == [{"at": at, "error": "KeyError", "message": "'x'", "traceback": "T"}]
    assert shown["payload"] == {"n": 1}
    assert shown["idempotency_key"] == row.idempotency_key


@pytest.mark.parametrize("pk", ["0", "999", "9" * 19, "9" * 60, "abc", "%C2%B2", "%00"])
def test_what_is_not_there_is_not_found(viewer: APIClient, pk: str) -> None:
    assert viewer.get(f"{LIST}{pk}/").status_code == 404
    assert viewer.get("/api/policies/testapp.order.nothing/").status_code == 404


@pytest.fixture
def many(schedule: Schedule) -> dict[str, Timeout]:
    """Create one row of each kind that filters distinguish."""
    now = timezone.now()
    order = Order.objects.create(status="new", created_at=now)
    rows = {
        "soon": schedule(minutes=5, order=order),
        "later": schedule(minutes=90),
        "keyed": schedule(minutes=200, key="k1"),
        "linger": schedule("linger", minutes=10),
        "late": schedule(minutes=0),
        "dead": settle(schedule(order=order, key="old"), "dead", "retries", settled_at=now - timedelta(hours=2)),
        "fired": settle(schedule(order=order, key="older"), settled_at=now - timedelta(hours=3)),
    }
    minute_ago = now - timedelta(minutes=1)
    Timeout.objects.filter(pk=rows["late"].pk).update(run_at=minute_ago, created_at=minute_ago)
    Timeout.objects.filter(pk=rows["linger"].pk).update(queue="slow")
    return rows


def moment(**ago: float) -> str:
    return quote((timezone.now() + timedelta(**ago)).isoformat())


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", "fired dead late linger keyed later soon"),
        ("state=pending", "late soon linger later keyed"),
        ("state=firing", ""),
        ("overdue=false&key=k1", "keyed"),
        ("due_from={minutes=30}", "later keyed"),
        ("due_until={minutes=30}", "late soon linger"),
        ("due_from={minutes=1}&due_until={minutes=100}", "soon linger later"),
        ("due_from={minutes=1}&policy=testapp.order.remind&due_until={minutes=100}", "soon later"),
        ("settled_until={minutes=1}", "dead fired"),
    ],
)
def test_filters_find_just_what_they_say(
    viewer: APIClient, many: dict[str, Timeout], query: str, expected: str
) -> None:
    while "{" in query:
        head, _, rest = query.partition("{")
        inside, _, tail = rest.partition("}")
        unit, _, number = inside.partition("=")
        query = head + moment(**{unit: float(number)}) + tail
    names = {row.pk: name for name, row in many.items()}
    found = [names[pk] for pk in ids(viewer.get(f"{LIST}?{query}")) if pk in names]
    assert found == expected.split()


def test_of_a_policy_with_few_rows_all_are_on_the_first_page(
    viewer: APIClient, schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "MAX_COUNT", 2)
    rare = [schedule("linger").pk, *(schedule().pk for _ in range(6)), schedule("linger").pk]
    assert all_pages(viewer, f"{LIST}?policy=testapp.order.linger") == [[rare[-1], rare[0]]]
    monkeypatch.setattr(inputs, "MAX_SORTED", 1)
    assert len(all_pages(viewer, f"{LIST}?policy=testapp.order.linger")) > 1
    assert all_rows(viewer, f"{LIST}?policy=testapp.order.linger") == [rare[-1], rare[0]]


def test_of_a_state_with_few_rows_all_are_on_the_first_page(
    viewer: APIClient, schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "MAX_COUNT", 2)
    rows = [settle(schedule(), "dead" if number in (0, 7) else "fired").pk for number in range(8)]
    assert all_pages(viewer, f"{LIST}?state=dead") == [[rows[7], rows[0]]]
    monkeypatch.setattr(inputs, "MAX_SORTED", 1)
    assert len(all_pages(viewer, f"{LIST}?state=dead")) > 1
    assert all_rows(viewer, f"{LIST}?state=dead") == [rows[7], rows[0]]


def test_the_timeouts_of_one_object_are_found(viewer: APIClient, many: dict[str, Timeout]) -> None:
    order: Any = many["soon"].content_object
    found = ids(viewer.get(f"{LIST}?object=testapp.Order:{order.pk}"))
    assert found == list(order.timeouts.order_by("-id").values_list("pk", flat=True))
    parcel = Parcel.objects.create(sent_at=timezone.now())
    assert len(ids(viewer.get(f"{LIST}?object=testapp.parcel:{parcel.pk.hex}"))) == 1


def test_a_policy_is_found_under_its_former_names(
    viewer: APIClient, schedule: Schedule, declare: Callable[..., Any]
) -> None:
    row = schedule()
    Timeout.objects.update(policy="testapp.order.nudge_before")
    declare(Order, name="nudge", aliases=["nudge_before"])
    assert ids(viewer.get(f"{LIST}?policy=testapp.order.nudge")) == [row.pk]
    shown = viewer.get("/api/policies/testapp.order.nudge_before/").data
    assert (shown["label"], shown["former_labels"]) == ("testapp.order.nudge", ["testapp.order.nudge_before"])


@pytest.mark.parametrize(
    "query",
    [
        *(
            "stat=dead",
            "object=testapp.parcel:7",
            "due_from=0001-01-01T00:00:00%2B14:00",
            "due_until=9999-12-31T23:59:59-14:00",
        ),
        *("overdue=maybe", "policy=%00", "key=%00", "cursor=x", "cursor=%00", "cursor=W10", "cursor=%C3%A9"),
        *("page_size=0", "page_size=x", "page_size=-1", "page_size=%C2%B2"),
        *("state=dead&overdue=true", "state=pending&settled_from=2026-01-01T00:00:00Z"),
        "due_from=2026-01-01T00:00:00Z&settled_from=2026-01-01T00:00:00Z",
    ],
)
def test_bad_input_is_named(viewer: APIClient, query: str) -> None:
    answer = viewer.get(f"{LIST}?{query}")
    assert answer.status_code == 400
    name = query.partition("=")[0]
    assert name in answer.data or "non_field_errors" in answer.data


def test_pages_follow_each_other_without_gap_or_double_also_through_equal_moments(
    viewer: APIClient, schedule: Schedule
) -> None:
    at = timezone.now() + timedelta(hours=1)
    rows = [schedule(minutes=None, at=at + timedelta(minutes=number // 4)).pk for number in range(10)]
    assert all_rows(viewer, f"{LIST}?page_size=3") == rows[::-1]
    assert all_rows(viewer, f"{LIST}?page_size=3&state=pending") == rows
    Timeout.objects.update(state="fired", cause="due", settled_at=timezone.now(), slot_taken=None)
    assert all_rows(viewer, f"{LIST}?page_size=3&state=fired") == rows[::-1]
    assert len(all_pages(viewer, f"{LIST}?page_size=10")) == 1


def test_rows_that_come_and_go_between_pages_move_nothing(viewer: APIClient, schedule: Schedule) -> None:
    rows = [schedule().pk for _ in range(6)]
    first = viewer.get(f"{LIST}?page_size=2")
    newer = schedule()
    Timeout.objects.filter(pk=rows[5]).delete()
    assert ids(viewer.get(first.data["next"])) == rows[3:1:-1]
    assert newer.pk not in all_rows(viewer, first.data["next"])


def test_what_no_index_finds_is_looked_for_a_bounded_way_a_page(
    viewer: APIClient, schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "MAX_COUNT", 4)
    rows = [schedule(minutes=number + 1).pk for number in range(11)]
    Timeout.objects.filter(pk__in=[rows[0], rows[9]]).update(queue="slow")
    assert all_pages(viewer, f"{LIST}?queue=slow") == [[rows[9]], [], [rows[0]]]
    assert all_pages(viewer, f"{LIST}?queue=slow&state=pending") == [[rows[0]], [], [rows[9]]]
    assert all_pages(viewer, f"{LIST}?queue=default&page_size=3") == [
        [rows[10], rows[8], rows[7]], rows[6:3:-1], rows[3:0:-1], [],
    ]  # fmt: skip


def test_a_policy_tells_how_it_was_declared(viewer: APIClient) -> None:
    shown = viewer.get("/api/policies/testapp.order.cancel_unpaid/").json()
    assert shown["declared_seconds"] == shown["seconds"] == 1800
    assert (shown["stop"], shown["until"]) == (None, None)
    assert (shown["since"], shown["automatic"], shown["model"]) == ("created_at", True, "testapp.order")
    assert "unpaid" in shown["condition"]
    assert shown["handler"] == "tests.testapp.timeouts.cancel_unpaid"
    assert shown["limits"] is None
    labels = [policy["label"] for policy in viewer.get("/api/policies/").json()]
    assert labels == sorted(policy.label for policy in dq.get_policies())


def test_a_policy_shows_its_limits(viewer: APIClient, declare: Any) -> None:
    declare(
        Order,
        name="text",
        limits=dq.Limits(rate=dq.Rate(20, per=timedelta(minutes=1), by="status"), total=timedelta(1)),
    )
    shown = viewer.get("/api/policies/testapp.order.text/").json()["limits"]
    rate = {"count": 20, "per_seconds": 60.0, "by": "status"}
    assert shown == {"run_seconds": None, "rate": rate, "snoozes": None, "total_seconds": 86400.0}


def test_the_page_says_what_time_the_server_has(viewer: APIClient) -> None:
    at = timezone.now() + timedelta(hours=3)
    with clock.set_to(at):
        assert datetime.fromisoformat(viewer.get(LIST).data["server_time"]) == at


@pytest.mark.parametrize(("rates", "codes"), [({}, [200, 200]), ({"delayq": "1/hour"}, [200, 429])])
def test_a_project_may_limit_requests_by_scope_or_leave_it(
    viewer: APIClient, settings: Any, monkeypatch: pytest.MonkeyPatch, rates: dict[str, str], codes: list[int]
) -> None:
    settings.CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache", "LOCATION": str(rates)}}
    settings.REST_FRAMEWORK = {**settings.REST_FRAMEWORK, "DEFAULT_THROTTLE_RATES": rates}
    monkeypatch.setattr(ScopedRateThrottle, "THROTTLE_RATES", rates)  # as when Django starts with these settings
    monkeypatch.setattr(TimeoutViewSet, "throttle_classes", [ScopedRateThrottle])
    cache.clear()
    assert [viewer.get(LIST).status_code for _ in codes] == codes


def test_the_status_counts_what_waits_and_says_who_works(viewer: APIClient, many: dict[str, Timeout]) -> None:
    operations.pause("testapp.order.linger", by="somebody")
    worker = {"host": "h", "pid": 7, "queues": ["default"], "concurrency": 4, "uses_redis": True, "version": "1"}
    moments = dict.fromkeys(("started_at", "seen_at", "passed_at"), timezone.now())
    WorkerSeen.objects.create(**worker, **moments)
    shown = viewer.get(STATUS).json()
    assert shown["pending"] == {"value": Timeout.objects.pending().count(), "is_capped": False}
    assert shown["overdue"]["value"] == 1
    assert shown["oldest_overdue_seconds"] >= 60
    assert [(one["name"], one["queues"]) for one in shown["workers"]] == [("h:7", ["default"])]
    stops = {policy["label"]: policy["stop"] for policy in shown["policies"]}
    assert (stops["testapp.order.linger"], stops["testapp.order.remind"]) == ("paused", None)


def test_the_overview_has_the_last_hours_and_the_most_urgent_policy_first(
    viewer: APIClient, many: dict[str, Timeout]
) -> None:
    shown = viewer.get("/api/overview/").json()
    assert len(shown["hours"]) == 24
    assert set(shown["hours"][0]) == {"begins_at", *BY_HOUR}
    assert shown["policies"][0]["urgency"] == "overdue"
    assert shown.keys() == viewer.get(STATUS).json().keys()


def test_the_status_names_policies_that_nobody_declares_any_more(viewer: APIClient, schedule: Schedule) -> None:
    schedule()
    Timeout.objects.update(policy="gone.thing.rule")
    (gone,) = [policy for policy in viewer.get(STATUS).json()["policies"] if not policy["is_declared"]]
    assert (gone["label"], gone["pending"]["value"], gone["stop"]) == ("gone.thing.rule", 1, None)


@pytest.mark.parametrize("path", ["", "{pk}/", "{pk}/cancel/", "{pk}/postpone/"])
def test_people_may_look_with_a_browser_too(admin_user: Any, schedule: Schedule, path: str) -> None:
    client = APIClient(headers={"Accept": "text/html"})
    client.force_login(admin_user)
    url = LIST + path.format(pk=schedule(payload={"a": "<script>alert(1)</script>"}).pk)
    shown = client.get(url)
    assert shown.status_code == (405 if path.endswith(("cancel/", "postpone/")) else 200)
    assert shown["Content-Type"].startswith("text/html")
    assert "<script>alert" not in shown.content.decode()
    assert client.options(url).status_code == 200


@pytest.mark.parametrize("url", ["/api/policies/", "/api/policies/testapp.order.remind/", STATUS])
def test_policies_and_status_have_pages_too(admin_user: Any, url: str) -> None:
    client = APIClient(headers={"Accept": "text/html"})
    client.force_login(admin_user)
    assert client.get(url).status_code == client.options(url).status_code == 200


def test_the_status_counts_rows_of_a_policy_that_is_not_declared_and_marks_it(
    viewer: APIClient, schedule: Schedule
) -> None:
    values = {"state": "dead", "cause": "retries", "settled_at": timezone.now(), "slot_taken": None}
    Timeout.objects.filter(pk=schedule().pk).update(policy="gone.order.old", **values)
    told = viewer.get(STATUS).data
    assert told["dead"]["value"] == 1
    (shown,) = [policy for policy in told["policies"] if policy["label"] == "gone.order.old"]
    assert (shown["is_declared"], shown["dead"]["value"]) == (False, 1)


@pytest.mark.parametrize("parameter", ["key", "search", "object"])
def test_blanks_belong_to_a_key(viewer: APIClient, schedule: Schedule, parameter: str) -> None:
    """Without them it is the key of another timeout, which an operator would then cancel."""
    # In front: MariaDB takes keys that differ by blanks at their end for the same.
    trimmed, blank = (Voucher.objects.create(code=code) for code in ("A", " A"))
    rows = [dq.schedule_timeout(each, "expire", key=f"{each.code}k", minutes=5) for each in (trimmed, blank)]
    value = {"key": " Ak", "search": " Ak", "object": "testapp.voucher: A"}[parameter]
    assert ids(viewer.get(LIST, {parameter: value})) == [rows[1].pk]
    assert ids(viewer.get(LIST, {parameter: value.replace(" ", "")})) == [rows[0].pk]
    assert ids(viewer.get(LIST, {parameter: value.replace(" ", "  ")})) == []
