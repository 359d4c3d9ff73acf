"""Where people see the next step, and what became of the others: the story, the log, the admin, commands and REST."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import pytest
from django.core.management import call_command
from django.test import Client

import django_delayq as dq
from django_delayq import Retry
from django_delayq.testing import fire_due
from tests.integration.firing.conftest import raising, receiving
from tests.integration.steps.days import DAY, Declare, at, dunning, row_of, sent
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def policy(declare: Declare) -> Any:
    return dunning(declare, retry=Retry.never())


@pytest.fixture
def order(policy: Any) -> Order:
    with at(0):
        return sent()


def outlook(order: Order, policy: Any) -> str:
    return dq.explain_timeout(order, policy).outlook


def test_the_story_tells_the_next_step_and_what_became_of_the_others(policy: Any, order: Order) -> None:
    with at(0):
        assert outlook(order, policy).startswith("Its step friendly is due at 2030-01-12")
        assert "Its deadline is 2030-01-15" in outlook(order, policy)
    with at(15):
        fire_due(policy)
        text = str(dq.explain_timeout(order, policy))
    assert "missed and passed: friendly, firm:1" in text
    assert "step ran: firm:2" in text
    with at(16):
        fire_due(policy)
        assert "It acts at 2030-01-18" in outlook(order, policy)


def test_the_log_has_a_line_for_each_step_and_an_error_for_a_dead_one(
    policy: Any, order: Order, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="django_delayq.firing")
    with at(11):
        fire_due(policy)
    (line,) = [record for record in caplog.records if record.levelno == logging.INFO]
    facts = vars(line)
    assert (facts["event"], facts["step"], facts["late_seconds"]) == ("step", "friendly", 0)
    assert "friendly ran 0 s late" in line.getMessage()


def test_a_dead_step_is_an_error_in_the_log_and_no_dead_timeout(
    declare: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    policy, heard = dunning(declare, retry=Retry.never()), list[tuple[Any, str]]()
    policy.step(-5 * DAY, name="early")(raising(ValueError("no address")))

    def hear(signal: Any, timeout: Any, **_: Any) -> None:
        heard.append((signal, timeout.step))

    with at(0):
        sent()
    with at(9), receiving(hear, dq.timeout_failed, dq.timeout_dead):
        fire_due(policy, raises=False)
    (line,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert (vars(line)["event"], vars(line)["step"]) == ("step_dead", "early")
    assert "early is dead, and what follows continues: ValueError: no address" in line.getMessage()
    assert line.exc_info is not None
    assert heard == [(dq.timeout_failed, "friendly")]


def test_the_admin_shows_the_next_step(policy: Any, order: Order, admin_client: Client) -> None:
    with at(1):
        listed = admin_client.get("/admin/django_delayq/timeout/").content.decode()
        page = admin_client.get(f"/admin/django_delayq/timeout/{row_of(order).pk}/change/").content.decode()
    assert "friendly: " in listed
    assert "friendly: " in page
    assert "Its step friendly is due at" in page


def test_commands_show_the_next_step(policy: Any, order: Order) -> None:
    out, rows = io.StringIO(), io.StringIO()
    with at(1):
        call_command("delayq_list", policy=[policy.label], stdout=out)
        call_command("delayq_explain", "testapp.order", str(order.pk), policy=policy.label, stdout=out)
        call_command("delayq_list", policy=[policy.label], json=True, stdout=rows)
    assert "next step" in out.getvalue()
    assert "Its step friendly is due at" in out.getvalue()
    assert json.loads(rows.getvalue())[0]["step"] == "friendly"
