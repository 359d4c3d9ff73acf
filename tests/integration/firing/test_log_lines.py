"""What a firing logs of a timeout, and which signals it sends: as people name objects, and after the commit."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.db import IntegrityError, connection
from django.utils import timezone

import django_delayq as dq
from django_delayq.ledger.error_texts import is_user_code
from django_delayq.models import Timeout
from django_delayq.times.clock import brief
from tests.integration.firing.conftest import due, fire
from tests.integration.firing.handlers import ATOMIC_OR_NOT, Declare, Log, raising
from tests.integration.firing.rows import logged, receiving
from tests.testapp.models import Order, OrderProxy, Voucher

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]


@pytest.fixture(autouse=True)
def at_debug(caplog: Log) -> None:
    caplog.set_level(logging.DEBUG, "django_delayq.firing")


@ATOMIC_OR_NOT
def test_a_firing_is_a_line_with_object_lateness_and_duration(declare: Declare, caplog: Log, atomic: bool) -> None:
    policy = declare(Order, name="noted", search=("customer__name", "note"), atomic=atomic)
    orders = [Order.objects.create(note=note) for note in ("A-2026-0050", "two\nlines", None)]
    rows = [due(order, policy) for order in orders]
    minutes_ago = timezone.now() - timedelta(minutes=5)
    Timeout.objects.update(due_at=minutes_ago, run_at=minutes_ago, created_at=minutes_ago)
    fire(*rows, due(Voucher.objects.create(code="a\nb"), declare(Voucher, name="quick")))
    shown = [f"{orders[0].pk} (A-2026-0050)", rf"{orders[1].pk} ('two\nlines')", str(orders[2].pk)]
    *lines, of_voucher = logged(caplog, "timeout_fired")
    for line, row, obj in zip(lines, rows, shown, strict=True):
        assert (line.levelno, line.timeout_id, line.policy) == (logging.INFO, row.pk, "testapp.order.noted")
        assert (line.object_id, 300 <= line.late_seconds < 360) == (row.object_id, True)
        assert line.getMessage().startswith(f"Timeout {row.pk} (testapp.order.noted, object {obj}) fired 5 min")
        assert line.getMessage().endswith(f" late, in {brief(line.seconds)}")
    assert "object 'a\\nb')" in of_voucher.getMessage()


def raise_in_django(*_: Any) -> None:
    Voucher.objects.create(code="twice")
    Voucher.objects.create(code="twice")


def test_of_failures_one_has_a_traceback_with_only_frames_of_the_project(declare: Declare, caplog: Log) -> None:
    policy = declare(Order, raise_in_django, name="fails", retry=dq.Retry([120]), batch=10)
    rows = [due(Order.objects.create(), policy) for _ in range(5)]
    fire(*rows)
    line, *others = logged(caplog, "timeout_failed")
    assert not any(other.exc_info for other in others)
    assert "; attempt 2 follows in 2 min: IntegrityError: " in line.getMessage()
    kind, error, trace = line.exc_info
    assert kind is IntegrityError
    while error is not None:
        assert all(is_user_code(frame.filename) for frame in traceback.extract_tb(error.__traceback__))
        error = error.__cause__
    assert [frame.name for frame in traceback.extract_tb(trace)] == ["raise_in_django"]
    rows[0].refresh_from_db()
    assert "django/db/backends" in rows[0].errors[0]["traceback"], "the ledger keeps all of it"


# Signals report committed transitions, and no others


@pytest.fixture
def heard() -> Iterator[list[tuple[str, type, str, bool]]]:
    """Record the signals of firing: name, sender, state of the timeout, and whether a transaction was open."""
    found: list[tuple[str, type, str, bool]] = []

    def hear(name: str, sender: type, timeout: Timeout, **_: Any) -> None:
        found.append((name, sender, timeout.state, connection.in_atomic_block))

    with ExitStack() as stack:
        receivers = []  # Django keeps weak references
        for name in ("scheduled", "fired", "skipped", "failed", "dead", "cancelled"):
            receivers.append(partial(hear, name))
            stack.enter_context(receiving(receivers[-1], getattr(dq, f"timeout_{name}")))
        yield found


@ATOMIC_OR_NOT
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, ("fired", "fired")),
        (ValueError(), ("failed", "pending")),
        (dq.GiveUp(), ("dead", "dead")),
        (dq.Skip(), ("skipped", "skipped")),
        (dq.Snooze(minutes=1), None),
    ],
)
def test_each_end_of_an_attempt_has_its_signal(
    declare: Declare, heard: Any, error: Any, expected: Any, atomic: bool
) -> None:
    """Its sender is the model of the policy."""
    row = due(Order.objects.create(), declare(OrderProxy, raising(error), name="signals", atomic=atomic))
    heard.clear()
    fire(row)
    assert heard == ([] if expected is None else [(expected[0], OrderProxy, expected[1], False)])


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit("no")])
def test_a_receiver_that_raises_changes_nothing(order: Order, heard: Any, caplog: Log, error: BaseException) -> None:
    """Also if it has no `__qualname__`, which Django logs. Who schedules may be ended by a `SystemExit`."""

    def bad(error: BaseException, **_: Any) -> None:
        raise error

    receiver, signals = partial(bad, error), [dq.timeout_fired, dq.timeout_scheduled]
    signals = signals[: 1 + isinstance(error, ValueError)]
    with receiving(receiver, *signals):
        assert fire(due(order)).fired
    assert [name for name, *_ in heard] == ["scheduled", "fired"]
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["no"] * len(signals)
