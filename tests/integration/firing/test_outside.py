"""`atomic=False`: between two transactions, at least once, with expiry, final attempt and newer rounds."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq.firing import run, settle_expired
from django_delayq.firing.state import firing_state
from django_delayq.models import Timeout
from django_delayq.policy.policies import registry
from tests.e2e.races.sessions import needs_row_locks
from tests.integration.firing.conftest import due, fire, in_another_thread, locking, make_due, state, work_of
from tests.integration.firing.handlers import (
    ATOMIC_OR_NOT,
    Declare,
    Log,
    Patch,
    once_at,
    raising,
)
from tests.integration.firing.rows import FIRED, PENDING, UNTRIED, tried
from tests.testapp.models import Effect, Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
LEASE = timedelta(seconds=60)
OUTSIDE: dict[str, Any] = {"name": "outside", "atomic": False}
HOURLY = dq.Retry([3600])


def die(row: Timeout) -> None:
    """The process that fires `row` is gone while its handler runs."""
    once_at("committed", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        run(work_of(row), "default")


def expire(row: Timeout) -> None:
    assert Timeout.objects.filter(pk=row.pk, state="firing").update(run_at=timezone.now() - timedelta(seconds=1))


def test_the_handler_runs_outside_a_transaction_on_a_committed_firing_row(order: Order, declare: Declare) -> None:
    seen: dict[str, Any] = {}

    def handler(obj: Order, timeout: Timeout) -> None:
        seen["atomic"] = connection.in_atomic_block
        seen["told"] = (timeout.state, timeout.attempts, timeout.idempotency_key)
        names = ("state", "attempts", "slot_taken")
        seen["others see"] = in_another_thread(lambda: Timeout.objects.values_list(*names).get(pk=timeout.pk))
        seen["expires in"] = timeout.run_at - timezone.now()

    row = due(order, declare(Order, handler, **OUTSIDE))
    assert fire(row).fired == (row.pk,)
    assert LEASE - timedelta(seconds=5) < seen.pop("expires in") <= LEASE
    told = ("firing", 1, row.idempotency_key)
    assert seen == {"atomic": False, "told": told, "others see": ("firing", 1, None)}
    assert tried(row) == (FIRED, 1)


def test_what_no_longer_matches_or_is_gone_is_not_run(declare: Declare) -> None:
    policy = declare(Order, lambda obj, timeout: pytest.fail("ran"), when=Q(status="unpaid"), **OUTSIDE)
    paid, gone = due(Order.objects.create(status="paid"), policy), due(Order.objects.create(), policy)
    Timeout.objects.filter(pk=gone.pk).update(object_id="987654")
    fire(paid, gone)
    assert (state(paid), state(gone)) == (("skipped", "condition"), ("skipped", "gone"))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupt_gives_the_row_back(order: Order, declare: Declare, error: type[BaseException]) -> None:
    """Recording is repeated for half a minute while the row is locked, so that an interrupt may well come then."""
    row = due(order, declare(Order, raising(error()), **OUTSIDE))
    if error is ValueError:
        once_at("undone", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        fire(row)
    assert tried(row) == UNTRIED


class Busy(Exception):
    """What a driver raises if the lock of another transaction is not free in time."""

    sqlstate, sqlite_errorcode = "55P03", 5


def raise_busy(*arguments: object) -> None:
    raise OperationalError("could not obtain lock on row") from Busy()


@ATOMIC_OR_NOT
def test_after_transient_errors_the_waits_grow(order: Order, declare: Declare, caplog: Log, atomic: bool) -> None:
    caplog.set_level("DEBUG", "django_delayq.firing")
    policy = declare(Order, raise_busy, name="busy", atomic=atomic)
    row = due(order, policy)
    for number in range(8):
        report = run(work_of(row), "default")
        assert report.now is not None
        wait = (report.again[row.pk] - report.now).total_seconds()
        assert 0.05 * 2**number <= wait <= 0.15 * 2**number
        assert (report.untried, tried(row)) == ((row.pk,), UNTRIED)
        make_due(row)
    assert caplog.text.count("Not fired now") == 8
    object.__setattr__(policy, "handler", lambda obj, timeout: None)
    assert fire(row).fired
    assert firing_state.backoff.next_wait("default", row.pk, "", 60).total_seconds() <= 0.15


@needs_row_locks
def test_a_row_that_is_held_is_settled_when_it_is_free(order: Order, declare: Declare, monkeypatch: Patch) -> None:
    held: list[Any] = []
    pauses: list[float] = []

    def handler(obj: Order, timeout: Timeout) -> None:
        held.append(locking(timeout))
        held[0].__enter__()

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            held[0].__exit__(None, None, None)

    monkeypatch.setattr("django_delayq.firing.settling.time.sleep", sleep)
    row = due(order, declare(Order, handler, **OUTSIDE))
    assert fire(row).fired == (row.pk,)
    assert (state(row), len(pauses)) == (FIRED, 3)


@pytest.mark.parametrize("by", ["sweep", "delivery"])
def test_what_died_is_repeated_alone_when_its_lease_ends_and_not_counted(order: Order, by: str) -> None:
    row = due(order, "send_outside")
    die(row)
    assert tried(row) == (("firing", ""), 1)
    assert settle_expired("default").again == {}
    assert fire(row, deliveries=2).again[row.pk] - timezone.now() > LEASE / 2
    expire(row)
    report = settle_expired("default") if by == "sweep" else fire(row, deliveries=2)
    assert (tried(row), row.deaths, row.errors) == (UNTRIED, 0, [])
    assert [event["what"] for event in row.history] == ["suspected"]
    assert report.again == {row.pk: row.run_at}
    assert work_of(row).suspect
    assert fire(row).fired == (row.pk,)
    assert tried(row) == (FIRED, 1)
    assert Effect.objects.get().idempotency_key == row.idempotency_key


def test_an_expired_row_of_an_unknown_policy_is_left_to_others_first(order: Order, declare: Declare) -> None:
    """Another worker may know the policy and its retries; if none settles the row in a minute, this one does."""
    policy = declare(Order, **OUTSIDE)
    row = due(order, policy)
    die(row)
    registry.remove(policy)
    expire(row)
    assert settle_expired("default").again == {}
    Timeout.objects.update(run_at=timezone.now() - timedelta(seconds=61))
    assert list(settle_expired("default").again) == [row.pk]
    assert state(row) == PENDING


@pytest.mark.parametrize("meanwhile", ["began another attempt", "moved"])
def test_a_worker_that_returns_late_changes_nothing_if_others_went_on(
    order: Order, declare: Declare, meanwhile: str
) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        expire(timeout)
        settle_expired("default")
        if meanwhile == "moved":
            dq.reschedule_timeout(obj, "outside", hours=2)
        else:
            Timeout.objects.filter(pk=timeout.pk).update(attempts=2)

    row = due(order, declare(Order, handler, retry=HOURLY, **OUTSIDE))
    report = fire(row)
    assert (report.fired, list(report.again), state(row)) == ((), [row.pk], PENDING)


# Cancelled, paid or scheduled again while the handler runs


def cancel_in_bulk(order: Order, policy: str) -> int:
    return dq.cancel_timeouts(Timeout.objects.filter(policy=f"testapp.order.{policy}"), reason="closed")


@pytest.mark.parametrize("cancel", [dq.cancel_timeout, cancel_in_bulk])
@pytest.mark.parametrize(("error", "expected"), [(ValueError(), ("cancelled", "hand")), (None, FIRED)])
def test_a_cancel_during_the_firing_is_too_late_and_forbids_further_attempts(
    order: Order, declare: Declare, error: Any, expected: Any, cancel: Any
) -> None:
    answers: list[int] = []

    def handler(obj: Order, timeout: Timeout) -> None:
        answers.append(in_another_thread(lambda: cancel(order, "outside")))
        raising(error)(obj, timeout)

    row = due(order, declare(Order, handler, **OUTSIDE))
    assert fire(row).done == (row.pk,)
    assert (answers, state(row)) == ([0], expected)
    assert [each["error"] for each in row.errors] == ["ValueError"] * (error is not None)


@pytest.mark.parametrize("newer", ["pending", "cancelled", "not seen by the query"])
def test_a_newer_round_replaces_a_firing_that_fails(
    order: Order, declare: Declare, newer: str, monkeypatch: Patch
) -> None:
    """Also if it was cancelled: `cancel_timeout` has answered that nothing will happen.

    If the query found the slot free, because the round came in between, the unique constraint refuses it.
    """

    def handler(obj: Order, timeout: Timeout) -> None:
        dq.schedule_timeout(order, "outside", hours=1)
        assert newer != "cancelled" or dq.cancel_timeout(order, "outside") is True
        raise ValueError

    row = due(order, declare(Order, handler, **OUTSIDE))
    if newer == "not seen by the query":
        monkeypatch.setattr("django_delayq.ledger.marking.is_superseded", lambda *_: False)
    assert fire(row).done == (row.pk,)
    assert state(row) == ("skipped", "superseded")
    assert Timeout.objects.exclude(pk=row.pk).get().state == ("cancelled" if newer == "cancelled" else "pending")


# Every worker settles attempts that died, in pages; only the first one logs it, and sends the signals


def expired(count: int) -> list[Timeout]:
    """Return rows whose process died while it fired them, and whose lease is over."""
    rows = [due(Order.objects.create(), "send_outside") for _ in range(count)]
    for row in rows:
        die(row)
        expire(row)
    return rows


def test_rows_are_settled_in_pages_and_one_that_cannot_be_holds_no_other_up(caplog: Log) -> None:
    broken, *others = expired(5)
    Timeout.objects.filter(pk=broken.pk).update(history=0)
    reports = [settle_expired("default", limit=3) for _ in range(2)]
    assert [state(row)[0] for row in others] == ["pending"] * 4
    assert [report.untried for report in reports] == [(broken.pk,)] * 2
    assert f"Timeouts [{broken.pk}] of testapp.order.send_outside are released" in caplog.text
