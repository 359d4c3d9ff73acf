"""What REST shows of timeouts, policies and their reports: permissions, pages, filters, and the pages for people."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from html import unescape
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.contrib.contenttypes.models import ContentType
from django.core.cache import cache
from django.utils import timezone
from rest_framework.test import APIClient
from rest_framework.throttling import ScopedRateThrottle

import django_delayq as dq
from django_delayq import clock, operations
from django_delayq.contrib.rest_framework import TimeoutViewSet
from django_delayq.ledger import search
from django_delayq.ledger.rollups import BY_HOUR
from django_delayq.models import Timeout
from django_delayq.monitoring import reports
from tests.integration.contrib.rest.conftest import ClientWith, Schedule, ids, ready_for, settle, url
from tests.integration.contrib.rest.places import LIST, POLICY, POLICY_VERBS, REMIND, STATUS, VERBS
from tests.integration.management.conftest import a_worker
from tests.integration.monitoring.rounds import settled_row
from tests.support.typed import Patch
from tests.testapp.models import Customer, Order

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


def test_a_policy_tells_how_it_was_declared(viewer: APIClient) -> None:
    shown = viewer.get("/api/policies/testapp.order.cancel_unpaid/").json()
    told = {"declared_seconds": 1800, "seconds": 1800, "stop": None, "until": None, "since": "created_at"}
    told |= {"automatic": True, "model": "testapp.order", "limits": None, "condition": 'status = "unpaid"'}
    assert shown == {**shown, **told, "handler": "tests.testapp.timeouts.cancel_unpaid"}
    labels = [policy["label"] for policy in viewer.get("/api/policies/").json()]
    assert labels == sorted(policy.label for policy in dq.get_policies())


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


def test_it_is_shown_why_nothing_fires(viewer: APIClient, schedule: Schedule) -> None:
    row = schedule()

    def found(address: str) -> list[tuple[str, str]]:
        return [(each["code"], each["policy"] or each["queue"]) for each in viewer.get(address).json()["obstacles"]]

    detail = f"{LIST}{row.pk}/"
    for address in (LIST, detail, STATUS):
        assert found(address) == [("no_worker", "")]
    a_worker(queues=["default"])
    assert found(LIST) == found(detail) == found(STATUS) == []
    operations.pause(REMIND, by="admin:alice", reason="outage")
    schedule("linger")
    assert found(LIST) == found(detail) == [("paused", REMIND)]
    settle(row)
    assert (found(detail), found(f"{LIST}?state=fired")) == ([], []), "nothing keeps a settled timeout from firing"


def all_pages(client: APIClient, query: str) -> list[list[int]]:
    found, url = [], f"{LIST}?{query}"
    while url:
        answer = client.get(url)
        found.append(ids(answer))
        url = answer.data["next"]
    return found


def all_rows(client: APIClient, query: str) -> list[int]:
    return [pk for page in all_pages(client, query) for pk in page]


def test_pages_have_neither_gap_nor_double_also_through_equal_moments(viewer: APIClient, schedule: Schedule) -> None:
    at = timezone.now() + timedelta(hours=1)
    rows = [schedule(minutes=None, at=at + timedelta(minutes=number // 4)).pk for number in range(10)]
    assert all_rows(viewer, "page_size=3") == rows[::-1]
    assert all_rows(viewer, "page_size=3&state=pending") == rows
    first = viewer.get(f"{LIST}?page_size=2").data["next"]
    schedule()
    Timeout.objects.filter(pk=rows[9]).delete()
    assert ids(viewer.get(first)) == rows[7:5:-1], "rows that come and go between pages move nothing"
    Timeout.objects.update(state="fired", cause="due", settled_at=timezone.now(), slot_taken=None)
    assert all_rows(viewer, "page_size=3&state=fired")[1:] == rows[8::-1]
    assert len(all_pages(viewer, "page_size=10")) == 1


def test_what_no_index_finds_is_looked_for_a_bounded_way(
    viewer: APIClient, schedule: Schedule, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(search, "MAX_COUNT", 4)
    rows = [schedule(minutes=number + 1).pk for number in range(11)]
    Timeout.objects.filter(pk__in=[rows[0], rows[9]]).update(queue="slow")
    assert all_pages(viewer, "queue=slow") == [[rows[9]], [], [rows[0]]]
    assert all_pages(viewer, "queue=slow&state=pending") == [[rows[0]], [], [rows[9]]]
    assert all_pages(viewer, "queue=default&page_size=3") == [
        [rows[10], rows[8], rows[7]], rows[6:3:-1], rows[3:0:-1], [],
    ]  # fmt: skip


@pytest.mark.dialect
def test_a_cursor_is_a_position_in_its_own_order_whatever_it_contains(viewer: APIClient, schedule: Schedule) -> None:
    rows = [schedule().pk for _ in range(2)]
    url = viewer.get(f"{LIST}?page_size=1&state=pending").data["next"]
    assert viewer.get(url.replace("state=pending", "queue=default")).status_code == 400
    # As a value for an automatic key MySQL and MariaDB refuse zero; PostgreSQL refuses offsets of 16 hours and more.
    assert ids(viewer.get(f"{LIST}?cursor=-id,0")) == []
    assert ids(viewer.get(f"{LIST}?state=pending&cursor=run_at,2000-01-01T00:00:00%2B23:59,5")) == rows
    assert viewer.get(f"{LIST}?due_from=2000-01-01T00:00:00%2B23:59").status_code == 200


def test_bad_input_is_named(viewer: APIClient) -> None:
    new_year = "2026-01-01T00:00:00Z"
    for query in (
        *("stat=dead", "overdue=maybe", "policy=%00", "key=%00", "policy=remind", "policy=testapp.order.remnd"),
        *("due_from=0001-01-01T00:00:00%2B14:00", "due_until=9999-12-31T23:59:59-14:00"),
        *("cursor=x", "cursor=%00", "cursor=W10", "page_size=0", "page_size=x", "page_size=%C2%B2"),
        *(f"state=pending&settled_from={new_year}", "object=testapp.order%00:1", "object=testapp.voucher:A%00B"),
    ):
        answer = viewer.get(f"{LIST}?{query}")
        assert answer.status_code == 400, query
        assert query.partition("=")[0] in answer.data or "non_field_errors" in answer.data, query


LABEL = "testapp.order.cancel_unpaid"
ADDRESS = f"/api/policies/{LABEL}/report/"


@pytest.fixture
def rows() -> None:
    now, order = clock.now(), Order.objects.create(status="s", customer=Customer.objects.create(name="Ann"))
    in_time = {"due_at": now + timedelta(minutes=5), "since_at": now - timedelta(minutes=25)}
    paid = settled_row(now, "cancelled", "condition", label=LABEL, object_id="gone", **in_time)
    Timeout.objects.bulk_create([settled_row(now, label=LABEL, object_id=str(order.pk)), paid])


def test_it_is_the_same_as_in_python(viewer: APIClient, rows: None) -> None:
    found: Any = viewer.get(ADDRESS, {"by": "month"}).json()
    (line,), total = found["lines"], found["total"]
    expected = reports.policy_report(LABEL, by="month")
    assert [line[name] for name in reports.FIGURES] == [getattr(expected.lines[0], name) for name in reports.FIGURES]
    assert (total["rounds"], total["in_time"], total["share"]) == (2, 1, 0.5)
    assert (found["policy"], found["first"], found["counted_until"]) == (LABEL, str(expected.first), None)


def test_the_days_are_chosen_and_wrong_ones_refused(viewer: APIClient, admin_client: Any, rows: None) -> None:
    assert viewer.get(ADDRESS, {"first": "2020-01-01", "last": "2020-12-31"}).json()["total"]["rounds"] == 0
    assert len(viewer.get(ADDRESS).json()["lines"]) == 1
    for asked, field in (
        *(({"first": "2026-02-02", "last": "2026-01-01"}, "first"), ({"last": "9999-12-31"}, "first")),
        *(({"first": "x"}, "first"), ({"by": ""}, "by"), ({"days": "3"}, "days")),
    ):
        answer = viewer.get(ADDRESS, asked)
        assert (answer.status_code, {*answer.json()}) == (400, {field}), asked
    for by in ("created_at__year", "pk", "__", "timeouts", "customer__", "customer__nothing"):
        answer = admin_client.get(ADDRESS, {"by": by})
        assert (answer.status_code, {*answer.json()}) == (400, {"by"}), by


def test_it_needs_the_permission_to_view_timeouts(client_with: ClientWith, rows: None) -> None:
    assert client_with("view_policycontrol").get(ADDRESS).status_code == 403
    assert client_with().get(ADDRESS).status_code == 403
    assert client_with("view_timeout").get(ADDRESS.replace(LABEL, "testapp.order.never")).status_code == 404


def test_a_column_needs_the_permission_to_view_its_model(viewer: APIClient, rows: None) -> None:
    assert viewer.get(ADDRESS, {"by": "customer__name"}).status_code == 403
    User.objects.get().user_permissions.add(*Permission.objects.filter(codename__in=["view_customer", "view_order"]))
    found = viewer.get(ADDRESS, {"by": "customer__name"}).json()
    assert [(line["name"], line["rounds"]) for line in found["lines"]] == [("(deleted)", 1), ("Ann", 1)]


def page(client: APIClient, address: str) -> str:
    answer = client.get(address, headers={"accept": "text/html"})
    assert answer["Content-Type"].startswith("text/html")
    return str(answer.content.decode())


def raw_data(shown: str) -> Any:
    (text,) = re.findall(r"<textarea[^>]*name=\"_content\"[^>]*>(.*?)</textarea>", shown, re.DOTALL)
    return json.loads(unescape(text))


def test_the_root_names_the_addresses_of_the_api(operator: APIClient, client_with: ClientWith) -> None:
    found = operator.get("/api/").json()
    assert found == {name: f"http://testserver/api/{name}/" for name in ("timeouts", "policies", "status")}
    assert all(operator.get(address).status_code == 200 for address in found.values())
    assert 'href="http://testserver/api/timeouts/"' in page(operator, "/api/")
    assert client_with("view_policycontrol").get("/api/").status_code == 200
    assert client_with().get("/api/").status_code == 403
    assert APIClient().get("/api/").status_code in (401, 403)


@pytest.mark.parametrize("verb", [*VERBS, *POLICY_VERBS])
def test_the_form_of_an_action_has_fields_and_data_that_it_accepts(
    operator: APIClient, schedule: Schedule, verb: str
) -> None:
    """`shadow` offers null, as declared, which is in force."""
    if verb == "resume":
        assert operator.post(f"{POLICY}pause/").status_code == 200
    row = ready_for(verb, schedule(payload={"a": "<script>alert(1)</script>"}))
    address = url(row, verb) if verb in VERBS else f"{POLICY}{verb}/"
    shown = page(operator, address)
    assert {*re.findall(r'name="(\w+)"', shown)} >= {
        "reason",
        *(POLICY_VERBS.get(verb) or ["dry_run"] * (verb in VERBS)),
    }
    assert 'name="policy"' not in shown and "<script>alert" not in shown
    assert operator.options(address).status_code == 200
    answer = operator.post(address, raw_data(shown), format="json")
    assert answer.status_code == (409 if verb == "shadow" else 200), answer.data
