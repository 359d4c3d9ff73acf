"""One line for each firing: policy, object, outcome, how late and how long; failures with the frames of the project."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import IntegrityError
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq.firing.state import firing_state
from django_delayq.ledger.error_texts import is_user_code
from django_delayq.models import Timeout
from django_delayq.operations import policies
from django_delayq.times.clock import brief
from tests.integration.firing.conftest import due, fire
from tests.testapp.models import Order, Voucher

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]
Declare = Callable[..., dq.TimeoutPolicy[Any]]


@pytest.fixture(autouse=True)
def at_debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "django_delayq.firing")


def lines(caplog: pytest.LogCaptureFixture, event: str) -> list[Any]:
    return [record for record in caplog.records if vars(record).get("event") == event]


@pytest.mark.parametrize("options", [{}, {"atomic": False}])
def test_a_firing_is_a_line_with_policy_object_lateness_and_duration(
    order: Order, declare: Declare, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    row = due(order, declare(Order, name="quick", **options))
    minutes_ago = timezone.now() - timedelta(minutes=5)
    Timeout.objects.update(due_at=minutes_ago, run_at=minutes_ago, created_at=minutes_ago)
    fire(row)
    [line] = lines(caplog, "timeout_fired")
    assert (line.levelno, line.timeout_id, line.policy) == (logging.INFO, row.pk, "testapp.order.quick")
    assert line.object_id == str(order.pk)
    assert 300 <= line.late_seconds < 360
    assert line.getMessage().startswith(f"Timeout {row.pk} (testapp.order.quick, object {order.pk}) fired 5 min")
    assert line.getMessage().endswith(f" late, in {brief(line.seconds)}")


@pytest.mark.parametrize(("options", "others"), [({"batch": 5}, ", together with 2 others"), ({"together": 5}, "ms")])
def test_the_lines_of_a_batch_share_a_duration_and_those_of_separate_calls_do_not(
    declare: Declare, caplog: pytest.LogCaptureFixture, options: dict[str, Any], others: str
) -> None:
    policy = declare(Order, name="several", **options)
    fire(*[due(Order.objects.create(), policy) for _ in range(3)])
    assert [line.getMessage().endswith(others) for line in lines(caplog, "timeout_fired")] == [True] * 3


def test_a_failure_at_the_deadline_is_not_early(
    order: Order, declare: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        time.sleep(0.01)
        raise LookupError

    row = due(order, declare(Order, fail, name="fails"))
    with dq.clock.set_to(row.due_at):
        fire(row)
    [line] = lines(caplog, "timeout_failed")
    assert line.late_seconds == 0
    assert "failed at attempt 1, 0 s late, after " in line.getMessage()


def test_a_skipped_timeout_is_a_line_with_its_reason(
    order: Order, declare: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    def skip(*_: Any) -> None:
        raise dq.Skip("it is a test order")

    rows = [due(order, "cancel_unpaid"), due(Order.objects.create(), declare(Order, skip, name="skips"))]
    gone = due(gone_order := Order.objects.create(), "remind")
    Order.objects.filter(pk=order.pk).update(status="paid")
    Order.objects.filter(pk=gone_order.pk).delete()
    Timeout.objects.filter(pk=gone.pk).update(state="pending", slot_taken=1, settled_at=None, cause="")
    for row in (*rows, gone):
        fire(row)
    assert [line.getMessage().partition(" is skipped: ")[2] for line in lines(caplog, "timeout_skipped")] == [
        "its condition does not hold",
        "it is a test order",
        "its object does not exist any more",
    ]


def test_a_snooze_is_a_line_with_the_next_time(
    order: Order, declare: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    def snooze(*_: Any) -> None:
        raise dq.Snooze(minutes=5, reason="the bank is closed")

    fire(due(order, declare(Order, snooze, name="snoozes")))
    [line] = lines(caplog, "timeout_snoozed")
    assert line.getMessage().endswith(" snoozes, and is tried again in 5 min: the bank is closed")
    assert line.levelno == logging.INFO


def raise_in_django(*_: Any) -> None:
    Voucher.objects.create(code="twice")
    Voucher.objects.create(code="twice")


@pytest.mark.parametrize("options", [{}, {"atomic": False}])
def test_a_failure_names_the_object_the_attempts_and_only_frames_of_the_project(
    order: Order, declare: Declare, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    row = due(order, declare(Order, raise_in_django, name="fails", retry=dq.Retry([120]), **options))
    fire(row)
    [line] = lines(caplog, "timeout_failed")
    assert f"(testapp.order.fails, object {order.pk}) failed at attempt 1, " in line.getMessage()
    assert "; attempt 2 follows in 2 min: IntegrityError: " in line.getMessage()
    assert line.attempt == 1
    assert line.next_at - timezone.now() > timedelta(seconds=60)
    kind, error, trace = line.exc_info
    assert kind is IntegrityError
    while error is not None:
        assert all(is_user_code(frame.filename) for frame in traceback.extract_tb(error.__traceback__))
        error = error.__cause__
    assert [frame.name for frame in traceback.extract_tb(trace)] == ["raise_in_django"]
    row.refresh_from_db()
    assert "django/db/backends" in row.errors[0]["traceback"], "the ledger keeps all of it"


def test_a_server_that_is_down_does_not_fill_the_log_with_tracebacks(
    declare: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    policy = declare(Order, raise_in_django, name="fails", retry=dq.Retry([120]), batch=10)
    fire(*[due(Order.objects.create(), policy) for _ in range(5)])
    assert [bool(line.exc_info) for line in lines(caplog, "timeout_failed")] == [True, *[False] * 4]


def test_exception_classes_that_are_made_for_each_call_are_one_kind_and_are_not_kept(
    declare: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    """As of an API client that makes its exception classes for each session: each one stayed in memory."""

    def refuse(*_: Any) -> None:
        raise type("QuotaExceeded", (Exception,), {})

    policy = declare(Order, refuse, name="fails", retry=dq.Retry([120]))
    for _ in range(3):
        fire(due(Order.objects.create(), policy))
    assert [bool(line.exc_info) for line in lines(caplog, "timeout_failed")] == [True, False, False]
    assert len(firing_state._log_interval._logged_at) == 1


def test_at_debug_a_line_states_why_a_timeout_does_not_fire(
    order: Order, declare: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    policy = declare(Order, name="waits")
    later, paused = due(order, "remind"), due(order, policy)
    Timeout.objects.filter(pk=later.pk).update(run_at=timezone.now() + timedelta(hours=1))
    policies.pause(policy, by="test", reason="an outage")
    fire(later)
    fire(paused)
    found = [line.getMessage() for line in lines(caplog, "not_fired")]
    assert found[0].startswith(f"Not fired now: {later.pk}: it is not due before ")
    assert found[1] == f"Not fired now: {paused.pk}: its policy is paused or on hold"


def test_nothing_is_prepared_for_lines_that_are_not_shown(
    order: Order, declare: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "django_delayq.firing")
    fire(due(order, declare(Order, name="quick")))
    assert caplog.records == []


def test_a_key_that_cannot_be_printed_does_not_begin_a_line(declare: Declare, caplog: pytest.LogCaptureFixture) -> None:
    voucher = Voucher.objects.create(code="a\nb")
    fire(due(voucher, declare(Voucher, name="quick")))
    [line] = lines(caplog, "timeout_fired")
    assert "object 'a\\nb')" in line.getMessage()


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 s"),
        (0.0042, "4 ms"),
        (0.9999, "1 s"),
        (1.25, "1.2 s"),
        (59.7, "1 min"),
        (5400, "1 h 30 min"),
        (-90, "-1 min 30 s"),
    ],
)
def test_durations_are_shown_in_two_units(seconds: float, shown: str) -> None:
    assert brief(seconds) == shown


@pytest.mark.parametrize("options", [{}, {"atomic": False}])
def test_the_first_failure_is_a_warning_and_from_the_second_on_each_is_an_error(
    order: Order, declare: Declare, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    def fail(*_: Any) -> None:
        raise ConnectionRefusedError("the mail server refuses")

    row = due(order, declare(Order, fail, name="mails", retry=dq.Retry([0, 0, 0]), **options))
    for _ in range(4):
        fire(row)
    levels = [line.levelname for event in ("timeout_failed", "timeout_dead") for line in lines(caplog, event)]
    assert levels == ["WARNING", "ERROR", "ERROR", "ERROR"]


@pytest.mark.parametrize("options", [{}, {"atomic": False}, {"batch": 5}])
def test_lines_name_the_object_as_people_do(
    declare: Declare, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    declare(Order, name="noted", search=("customer__name", "note"), **options)
    order = Order.objects.create(note="A-2026-0050")
    fire(due(order, "noted"))
    [line] = lines(caplog, "timeout_fired")
    assert f"(testapp.order.noted, object {order.pk} (A-2026-0050)) fired" in line.getMessage()
    assert line.object_id == str(order.pk)
    fire(due(Order.objects.create(note="two\nlines"), "noted"), due(unnamed := Order.objects.create(), "noted"))
    _, two_lines, without = [line.getMessage() for line in lines(caplog, "timeout_fired")]
    assert r"('two\nlines'))" in two_lines
    assert f"object {unnamed.pk})" in without


@pytest.mark.parametrize("options", [{}, {"atomic": False}])
@pytest.mark.parametrize("error", [LookupError("no"), dq.Snooze(minutes=5), dq.Skip("paid"), dq.GiveUp("closed")])
def test_lines_of_attempts_that_did_not_fire_name_the_object_too(
    declare: Declare, caplog: pytest.LogCaptureFixture, settings: Any, error: Exception, options: dict[str, Any]
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "SCRUB": lambda text, row: text.replace("A-", "X-")}

    def act(*_: Any) -> None:
        raise error

    declare(Order, act, name="noted", search="note", **options)
    fire(due(Order.objects.create(note="A-2026-0050"), "noted"))
    told = [record.getMessage() for record in caplog.records]
    assert any(" (X-2026-0050)) " in line for line in told), "names are scrubbed as errors are"
    assert not any("A-2026" in line for line in told)


def test_the_line_of_a_timeout_whose_condition_does_not_hold_names_the_object(
    declare: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    declare(Order, name="noted", search="note", when=Q(status="unpaid"))
    fire(due(Order.objects.create(note="A-2026-0050", status="paid"), "noted"))
    [line] = lines(caplog, "timeout_skipped")
    assert line.getMessage().endswith(" (A-2026-0050)) is skipped: its condition does not hold")
