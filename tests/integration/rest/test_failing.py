"""REST shows which timeouts fail, and why none fires."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from rest_framework.test import APIClient

from django_delayq import operations
from django_delayq.contrib.rest_framework import inputs
from django_delayq.models import Timeout
from tests.integration.commands.conftest import a_worker
from tests.integration.rest.test_reading import LIST, STATUS, Schedule, ids, settle
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db
REMIND = "testapp.order.remind"


def failing(row: Timeout, attempts: int = 2) -> Timeout:
    Timeout.objects.filter(pk=row.pk).update(attempts=attempts)
    return row


@pytest.mark.parametrize("few", [500, 1])
def test_failing_timeouts_are_listed_with_the_next_attempt_first(
    viewer: APIClient, schedule: Schedule, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    monkeypatch.setattr(inputs, "MAX_SORTED", few)
    later, sooner = failing(schedule(minutes=9)), failing(schedule(minutes=8))
    other = failing(schedule("linger", minutes=1))
    schedule()
    settle(failing(schedule()), "dead", "retries")
    assert ids(viewer.get(f"{LIST}?failing=true")) == [other.pk, sooner.pk, later.pk]
    assert ids(viewer.get(f"{LIST}?failing=true&policy={REMIND}&state=pending")) == [sooner.pk, later.pk]
    assert ids(viewer.get(f"{LIST}?failing=true&object=testapp.order:{later.object_id}")) == [later.pk]
    assert len(ids(viewer.get(f"{LIST}?failing=false"))) == 5
    for contradiction in ("failing=true&state=dead", "failing=true&state=firing", "failing=1&settled_from=2026-01-01"):
        assert viewer.get(f"{LIST}?{contradiction}").status_code == 400


def test_a_timeout_and_its_policy_show_that_it_fails(viewer: APIClient, schedule: Schedule) -> None:
    row = failing(schedule())
    settle(failing(schedule()), "dead", "retries")
    assert sorted(each["failing"] for each in viewer.get(LIST).json()["results"]) == [False, True]
    assert viewer.get(f"{LIST}{row.pk}/").json()["failing"] is True
    assert viewer.get(f"/api/policies/{REMIND}/").json()["failing"] == 1
    policies = {each["label"]: each["failing"] for each in viewer.get("/api/policies/").json()}
    assert (policies[REMIND], policies["testapp.order.linger"]) == (1, 0)
    status = viewer.get(STATUS).json()
    assert status["failing"] == {"value": 1, "is_capped": False}
    assert [each["failing"]["value"] for each in status["policies"] if each["label"] == REMIND] == [1]


def test_the_failing_timeouts_of_all_policies_are_counted_in_one_statement(
    viewer: APIClient, declare: Callable[..., Any]
) -> None:
    figures = []
    for name in ("first", "second"):
        viewer.get("/api/policies/")
        with CaptureQueriesContext(connection) as queries:
            viewer.get("/api/policies/")
        figures.append(len(queries))
        declare(Order, name=name)
    assert figures[0] == figures[1]


def test_it_is_shown_why_nothing_fires(viewer: APIClient, schedule: Schedule, declare: Callable[..., Any]) -> None:
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
