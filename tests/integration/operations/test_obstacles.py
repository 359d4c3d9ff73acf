"""Why due timeouts do not fire: one function, which status, doctor, explain, REST and the admin ask."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from django.core.checks import ERROR
from django.core.management import call_command
from django.utils import timezone, translation

from django_delayq.ledger.controls import BRAKE_ACTOR
from django_delayq.models import PolicyControl
from django_delayq.monitoring.doctor import examine
from django_delayq.monitoring.snapshot import obstacles, snapshot
from django_delayq.operations import hold, pause
from tests.integration.commands.conftest import a_worker
from tests.integration.operations.conftest import BY
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

REMIND, LINGER = "testapp.order.remind", "testapp.order.linger"


def codes(*labels: str, queues: tuple[str, ...] | None = None) -> list[tuple[str, str]]:
    return [(each.code, each.policy or each.queue) for each in obstacles("default", labels or None, queues)]


def test_without_a_worker_that_is_the_obstacle_of_every_policy() -> None:
    assert codes() == codes(REMIND) == [("no_worker", "")]
    a_worker(seen_at=timezone.now() - timedelta(minutes=1))
    assert codes() == [("no_worker", "")]
    a_worker()
    assert codes() == codes(REMIND) == []


def test_a_queue_that_no_worker_serves_is_the_obstacle_of_its_policies(declare: Any) -> None:
    declare(Order, name="mailed", queue="mail")
    a_worker(queues=["default"])
    assert codes() == codes("testapp.order.mailed") == [("no_worker_for_queue", "mail")]
    assert codes(REMIND) == []
    assert codes(REMIND, queues=("rare",)) == [("no_worker_for_queue", "rare")], "a row may have a queue of its own"


def test_stopped_policies_are_obstacles_with_who_and_why(declare: Any) -> None:
    former = declare(Order, name="nudge", aliases=["nudge_before"])
    a_worker()
    pause(REMIND, by=BY, reason="outage")
    hold(LINGER, by=BY)
    pause(former, by=BRAKE_ACTOR)
    assert codes() == [("held", LINGER), ("braked", "testapp.order.nudge"), ("paused", REMIND)]
    assert codes("testapp.order.nudge_before") == [("braked", "testapp.order.nudge")]
    (found,) = obstacles("default", [REMIND])
    assert str(found) == "Its policy is paused by admin:alice until an operator resumes it. (outage)"
    (found,) = obstacles("default", ["testapp.order.nudge"])
    assert str(found) == "Its policy is paused by its brake until an operator resumes it."
    PolicyControl.objects.update(until=timezone.now() - timedelta(seconds=1))
    assert codes(REMIND) == [], "the pause is over"


def test_a_label_that_no_policy_has_is_an_obstacle_of_its_rows() -> None:
    a_worker()
    assert codes(REMIND, "testapp.order.forgotten") == [("undeclared", "testapp.order.forgotten")]


def test_status_and_doctor_name_the_same_obstacles(declare: Any, capsys: pytest.CaptureFixture[str]) -> None:
    declare(Order, name="mailed", queue="mail")
    call_command("delayq_status")
    assert "No worker is running: nothing fires." in capsys.readouterr().out
    assert ("No worker is running: nothing fires.", ERROR) in {(each.msg, each.level) for each in examine(quick=True)}
    a_worker(queues=["default"])
    pause(REMIND, by=BY)
    with translation.override("de"):  # commands are in English, whatever LANGUAGE_CODE is
        call_command("delayq_status")
        assert "No worker serves the queue 'mail'." in capsys.readouterr().out
        assert [each.msg for each in examine(quick=True) if each.id == "workers.queues"] == [
            "No worker serves the queue 'mail', which policies name."
        ]
    assert [each.code for each in snapshot().obstacles] == ["no_worker_for_queue", "paused"]
    call_command("delayq_status", "--json")
    told = json.loads(capsys.readouterr().out)["obstacles"]
    assert [(each["code"], each["policy"], each["by"]) for each in told] == [
        ("no_worker_for_queue", "", ""),
        ("paused", REMIND, BY),
    ]


def test_obstacles_are_asked_with_as_many_queries_for_many_policies(django_assert_max_num_queries: Any) -> None:
    for labels in (None, [REMIND], [REMIND, LINGER]):
        with django_assert_max_num_queries(3):
            obstacles("default", labels)
