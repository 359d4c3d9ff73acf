"""What a firing logs and sends: a line in the log with policy, object, outcome, how late and how long, and a signal."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq.firing.log_lines import log_suspect
from django_delayq.firing.state import firing_state
from django_delayq.ledger.error_texts import is_user_code
from django_delayq.logs import Formatter
from django_delayq.models import Timeout
from django_delayq.operations import policies
from django_delayq.times.clock import brief
from tests.integration.firing.conftest import (
    ATOMIC_OR_NOT,
    LIMITED_MODES,
    MODES,
    Declare,
    due,
    fire,
    logged,
    raising,
    receiving,
)
from tests.testapp.models import Order, OrderProxy, Voucher

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]
DAY = timedelta(days=1)


@pytest.fixture(autouse=True)
def at_debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "django_delayq.firing")


def raise_in_django(*_: Any) -> None:
    Voucher.objects.create(code="twice")
    Voucher.objects.create(code="twice")


@ATOMIC_OR_NOT
def test_a_firing_is_a_line_with_policy_object_lateness_and_duration(
    order: Order, declare: Declare, caplog: pytest.LogCaptureFixture, atomic: bool
) -> None:
    row = due(order, declare(Order, name="quick", atomic=atomic))
    minutes_ago = timezone.now() - timedelta(minutes=5)
    Timeout.objects.update(due_at=minutes_ago, run_at=minutes_ago, created_at=minutes_ago)
    fire(row)
    [line] = logged(caplog, "timeout_fired")
    assert (line.levelno, line.timeout_id, line.policy) == (logging.INFO, row.pk, "testapp.order.quick")
    assert line.object_id == str(order.pk)
    assert 300 <= line.late_seconds < 360
    assert line.getMessage().startswith(f"Timeout {row.pk} (testapp.order.quick, object {order.pk}) fired 5 min")
    assert line.getMessage().endswith(f" late, in {brief(line.seconds)}")


@pytest.mark.parametrize(("options", "end"), [({"batch": 5}, ", together with 2 others"), ({"together": 5}, "ms")])
def test_the_lines_of_a_batch_share_a_duration_and_those_of_separate_calls_do_not(
    declare: Declare, caplog: pytest.LogCaptureFixture, options: dict[str, Any], end: str
) -> None:
    policy = declare(Order, name="several", **options)
    fire(*[due(Order.objects.create(), policy) for _ in range(3)])
    assert [line.getMessage().endswith(end) for line in logged(caplog, "timeout_fired")] == [True] * 3


def test_a_skipped_timeout_is_a_line_with_its_reason(
    orders: list[Order], declare: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    by_handler = declare(Order, raising(dq.Skip("it is a test order")), name="skips")
    rows = [due(orders[0], "cancel_unpaid"), due(orders[1], by_handler), due(orders[2], "remind")]
    Order.objects.filter(pk=orders[0].pk).update(status="paid")
    Order.objects.filter(pk=orders[2].pk)._raw_delete("default")
    for row in rows:
        fire(row)
    assert [line.getMessage().partition(" is skipped: ")[2] for line in logged(caplog, "timeout_skipped")] == [
        "its condition does not hold",
        "it is a test order",
        "its object does not exist any more",
    ]


def test_a_snooze_is_a_line_with_the_next_time(
    order: Order, declare: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    snooze = raising(dq.Snooze(minutes=5, reason="the bank is closed"))
    fire(due(order, declare(Order, snooze, name="snoozes")))
    [line] = logged(caplog, "timeout_snoozed")
    assert line.getMessage().endswith(" snoozes, and is tried again in 5 min: the bank is closed")
    assert line.levelno == logging.INFO


def test_at_debug_a_line_states_why_a_timeout_does_not_fire(
    order: Order, declare: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    policy = declare(Order, name="waits")
    later, paused = dq.schedule_timeout(order, "remind", hours=1), due(order, policy)
    policies.pause(policy, by="test", reason="an outage")
    fire(later)
    fire(paused)
    found = [line.getMessage() for line in logged(caplog, "not_fired")]
    assert found[0].startswith(f"Not fired now: {later.pk}: it is not due before ")
    assert found[1] == f"Not fired now: {paused.pk}: its policy is paused or on hold"


# Failures


@ATOMIC_OR_NOT
def test_a_failure_names_the_object_the_attempts_and_only_frames_of_the_project(
    order: Order, declare: Declare, caplog: pytest.LogCaptureFixture, atomic: bool
) -> None:
    row = due(order, declare(Order, raise_in_django, name="fails", retry=dq.Retry([120]), atomic=atomic))
    fire(row)
    [line] = logged(caplog, "timeout_failed")
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


@ATOMIC_OR_NOT
def test_the_first_failure_is_a_warning_and_from_the_second_on_each_is_an_error(
    order: Order, declare: Declare, caplog: pytest.LogCaptureFixture, atomic: bool
) -> None:
    fails = raising(ConnectionRefusedError("the mail server refuses"))
    row = due(order, declare(Order, fails, name="mails", retry=dq.Retry([0, 0, 0]), atomic=atomic))
    for _ in range(4):
        fire(row)
    lines = [*logged(caplog, "timeout_failed"), *logged(caplog, "timeout_dead")]
    assert [line.levelname for line in lines] == ["WARNING", "ERROR", "ERROR", "ERROR"]


ENDS = {
    "give up": (dq.GiveUp("no such address"), "no such address"),
    "retries used up": (RuntimeError("no answer"), "no answer"),
    "a snooze beyond all time": (dq.Snooze(after=1000 * 360 * DAY), "InvalidDelay"),
}


@LIMITED_MODES
@pytest.mark.parametrize("end", ENDS)
def test_a_dead_timeout_is_an_error_with_the_event_that_the_docs_ask_to_alert_on(
    order: Order, declare: Declare, caplog: pytest.LogCaptureFixture, end: str, mode: str
) -> None:
    error, words = ENDS[end]
    row = due(order, declare(Order, raising(error), name="ends", retry=dq.Retry.never(), **MODES[mode]))
    fire(row)
    [record] = logged(caplog, "timeout_dead")
    assert (record.levelno, record.timeout_id, record.policy) == (logging.ERROR, row.pk, row.policy)
    assert words in record.getMessage()
    assert logged(caplog, "timeout_failed") == []


def test_a_server_that_is_down_does_not_fill_the_log_with_tracebacks(
    declare: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    policy = declare(Order, raise_in_django, name="fails", retry=dq.Retry([120]), batch=10)
    fire(*[due(Order.objects.create(), policy) for _ in range(5)])
    assert [bool(line.exc_info) for line in logged(caplog, "timeout_failed")] == [True, *[False] * 4]


def test_exception_classes_that_are_made_for_each_call_are_one_kind_and_are_not_kept(
    declare: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    """As of an API client that makes its exception classes for each session: each one stayed in memory."""

    def refuse(*_: Any) -> None:
        raise type("QuotaExceeded", (Exception,), {})

    policy = declare(Order, refuse, name="fails", retry=dq.Retry([120]))
    for _ in range(3):
        fire(due(Order.objects.create(), policy))
    assert [bool(line.exc_info) for line in logged(caplog, "timeout_failed")] == [True, False, False]
    assert len(firing_state._log_interval._logged_at) == 1


def test_a_message_of_megabytes_is_logged_cut(order: Order, declare: Declare, caplog: pytest.LogCaptureFixture) -> None:
    row = due(order, declare(Order, raising(ValueError("x" * 5_000_000)), name="failing"))
    fire(row)
    lines = [Formatter().format(record) for record in caplog.records if record.levelno >= logging.WARNING]
    assert "5,000,000 characters" in lines[0]
    assert sum(map(len, lines)) < 20_000


def test_of_many_suspects_one_line_a_minute_is_a_warning(orders: list[Order], caplog: pytest.LogCaptureFixture) -> None:
    for order in orders:
        log_suspect(due(order))
    found = [each.levelname for each in logged(caplog, "timeout_suspected")]
    assert found == ["WARNING", *["DEBUG"] * 4]


# How objects and durations are written


@LIMITED_MODES
def test_lines_name_the_object_as_people_do(declare: Declare, caplog: pytest.LogCaptureFixture, mode: str) -> None:
    policy = declare(Order, name="noted", search=("customer__name", "note"), **MODES[mode])
    orders = [Order.objects.create(note=note) for note in ("A-2026-0050", "two\nlines", None)]
    for order in orders:
        fire(due(order, policy))
    first, two_lines, without = logged(caplog, "timeout_fired")
    assert f"(testapp.order.noted, object {orders[0].pk} (A-2026-0050)) fired" in first.getMessage()
    assert first.object_id == str(orders[0].pk)
    assert r"('two\nlines'))" in two_lines.getMessage()
    assert f"object {orders[2].pk})" in without.getMessage()


@ATOMIC_OR_NOT
@pytest.mark.parametrize("error", [LookupError("no"), dq.Snooze(minutes=5), dq.Skip("paid"), dq.GiveUp("closed"), None])
def test_lines_of_attempts_that_did_not_fire_name_the_object_too(
    declare: Declare, caplog: pytest.LogCaptureFixture, settings: Any, error: Exception | None, atomic: bool
) -> None:
    """None: its condition does not hold."""
    settings.DELAYQ = {**settings.DELAYQ, "SCRUB": lambda text, row: text.replace("A-", "X-")}
    when = Q(status="paid" if error is None else "unpaid")
    policy = declare(Order, raising(error), name="noted", search="note", when=when, atomic=atomic)
    fire(due(Order.objects.create(note="A-2026-0050"), policy))
    told = [record.getMessage() for record in caplog.records]
    assert any(" (X-2026-0050)) " in line for line in told), "names are scrubbed as errors are"
    assert not any("A-2026" in line for line in told)


def test_a_key_that_cannot_be_printed_does_not_begin_a_line(declare: Declare, caplog: pytest.LogCaptureFixture) -> None:
    fire(due(Voucher.objects.create(code="a\nb"), declare(Voucher, name="quick")))
    [line] = logged(caplog, "timeout_fired")
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


# Signals report committed transitions, and no others


NAMES = ("scheduled", "fired", "skipped", "failed", "dead", "cancelled")


@pytest.fixture
def heard() -> Iterator[list[tuple[str, type, str, bool]]]:
    """Record the signals of firing: name, sender, state of the timeout, and whether a transaction was open."""
    said: list[tuple[str, type, str, bool]] = []

    def hear(name: str, sender: type, timeout: Timeout, **_: Any) -> None:
        said.append((name, sender, timeout.state, connection.in_atomic_block))

    hearers = {name: partial(hear, name) for name in NAMES}
    with ExitStack() as stack:
        for name, hearer in hearers.items():
            stack.enter_context(receiving(hearer, getattr(dq, f"timeout_{name}")))
        yield said


@pytest.mark.parametrize(
    ("error", "retry", "expected"),
    [
        (None, None, ("fired", "fired")),
        (ValueError(), dq.Retry([60]), ("failed", "pending")),
        (ValueError(), dq.Retry.never(), ("dead", "dead")),
        (dq.GiveUp(), None, ("dead", "dead")),
        (dq.Skip(), None, ("skipped", "skipped")),
        (dq.Snooze(minutes=1), None, None),
    ],
)
@ATOMIC_OR_NOT
def test_each_end_of_an_attempt_has_its_signal(  # noqa: PLR0917 - pytest passes by name
    order: Order, declare: Declare, heard: Any, error: Any, retry: Any, expected: Any, atomic: bool
) -> None:
    row = due(order, declare(Order, raising(error), name="signals", retry=retry, atomic=atomic))
    heard.clear()
    fire(row)
    assert heard == ([] if expected is None else [(expected[0], Order, expected[1], False)])


def test_without_autocommit_and_atomic_nothing_is_raised(order: Order, heard: Any) -> None:
    """Where one statement schedules, nothing is sent either: its end is not known. Elsewhere it follows the commit."""
    transaction.set_autocommit(False)
    try:
        row = dq.schedule_timeout(order, "remind", minutes=5)
        assert heard == []
        transaction.commit()
    finally:
        transaction.set_autocommit(True)
    assert heard in ([], [("scheduled", Order, "pending", False)])
    assert Timeout.objects.pending().filter(pk=row.pk).exists()


def test_a_skip_without_a_handler_is_told_too(order: Order, heard: Any) -> None:
    row = due(order, "cancel_unpaid")
    Order.objects.update(status="paid")
    heard.clear()
    fire(row)
    assert heard == [("skipped", Order, "skipped", False)]


def test_the_sender_is_the_policys_model(order: Order, declare: Declare, heard: Any) -> None:
    fire(due(order, declare(OrderProxy, name="of_proxy")))
    assert [sender for _, sender, *_ in heard] == [OrderProxy] * 2


@pytest.mark.parametrize("error", [ValueError(), SystemExit()])
def test_a_receiver_that_raises_changes_nothing(
    order: Order, heard: Any, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    def bad(**_: Any) -> None:
        raise error

    row = due(order)
    heard.clear()
    with receiving(bad, dq.timeout_fired):
        assert fire(row).fired == (row.pk,)
    assert heard == [("fired", Order, "fired", False)]
    assert caplog.records


def test_a_receiver_without_a_name_may_raise_too(order: Order, heard: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Django logs `__qualname__`, which a partial does not have."""

    def bad(why: str, **_: Any) -> None:
        raise ValueError(why)

    with receiving(partial(bad, "no"), dq.timeout_scheduled):
        row = dq.schedule_timeout(order, "remind", minutes=5)
    assert Timeout.objects.pending().filter(pk=row.pk).exists()
    assert heard == [("scheduled", Order, "pending", False)]
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["no"]


def test_without_listeners_nothing_is_sent(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dq.timeout_fired, "send_robust", lambda *_, **__: pytest.fail("sent"))
    assert fire(due(order)).fired
