"""Signals report committed transitions, and no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import Model

import django_delayq as dq
from django_delayq.models import Timeout
from tests.integration.firing.conftest import due, fire
from tests.testapp.models import Order, OrderProxy

pytestmark = pytest.mark.django_db(transaction=True)
Declare = Callable[..., dq.TimeoutPolicy[Any]]
SIGNALS = {
    name: getattr(dq, f"timeout_{name}") for name in ("scheduled", "fired", "skipped", "failed", "dead", "cancelled")
}


@pytest.fixture
def heard() -> Iterator[list[tuple[str, type[Model], str, bool]]]:
    """Record the signals of firing: name, sender, state of the timeout, and whether a transaction was open."""
    said: list[tuple[str, type[Model], str, bool]] = []
    receivers = []
    for name, signal in SIGNALS.items():

        def hear(sender: type[Model], timeout: Timeout, name: str = name, **_: Any) -> None:
            said.append((name, sender, timeout.state, connection.in_atomic_block))

        receivers.append((signal, hear))
        signal.connect(hear)
    yield said
    for signal, hear in receivers:
        signal.disconnect(hear)


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
@pytest.mark.parametrize("atomic", [True, False])
def test_each_end_of_an_attempt_has_its_signal(  # noqa: PLR0917 - pytest passes by name
    order: Order, declare: Declare, heard: Any, error: Any, retry: Any, expected: Any, atomic: bool
) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        if error is not None:
            raise error

    row = due(order, declare(Order, handler, name="signals", retry=retry, atomic=atomic))
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
    row = due(order, declare(OrderProxy, name="of_proxy"))
    heard.clear()
    fire(row)
    assert [sender for _, sender, *_ in heard] == [OrderProxy]


@pytest.mark.parametrize("error", [ValueError(), SystemExit()])
def test_a_receiver_that_raises_changes_nothing(
    order: Order, heard: Any, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    def bad(**_: Any) -> None:
        raise error

    dq.timeout_fired.connect(bad)
    try:
        row = due(order)
        heard.clear()
        assert fire(row).fired == (row.pk,)
    finally:
        dq.timeout_fired.disconnect(bad)
    assert heard == [("fired", Order, "fired", False)]
    assert caplog.records


def test_a_receiver_without_a_name_may_raise_too(order: Order, heard: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Django logs `__qualname__`, which a partial does not have."""

    def bad(why: str, **_: Any) -> None:
        raise ValueError(why)

    dq.timeout_scheduled.connect(receiver := partial(bad, "no"))
    try:
        row = dq.schedule_timeout(order, "remind", minutes=5)
    finally:
        dq.timeout_scheduled.disconnect(receiver)
    assert Timeout.objects.pending().filter(pk=row.pk).exists()
    assert heard == [("scheduled", Order, "pending", False)]
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["no"]


def test_without_listeners_nothing_is_sent(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dq.timeout_fired, "send_robust", lambda *_, **__: pytest.fail("sent"))
    assert fire(due(order)).fired
