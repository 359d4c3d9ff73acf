"""`atomic=False`: between two transactions, at least once, with expiry, final attempt and newer rounds."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq import get_policy, timeout_dead
from django_delayq.firing import extend_firing, run, settle_expired
from django_delayq.firing.handler import set_checkpoint_hook
from django_delayq.firing.settling import settle
from django_delayq.firing.state import firing_state
from django_delayq.firing.works import Call
from django_delayq.models import Timeout
from django_delayq.policy.policies import registry
from django_delayq.rounds.after_attempt import WorkerDied
from django_delayq.signals import timeouts_settling
from tests.e2e.races.sessions import impatient
from tests.integration.firing.conftest import (
    FIRED,
    PENDING,
    UNTRIED,
    Declare,
    die_at,
    due,
    expire,
    fire,
    in_another_thread,
    locking,
    make_due,
    needs_row_locks,
    once_at,
    raising,
    receiving,
    state,
    tried,
    work_of,
    write,
    write_and_raise,
    written,
)
from tests.testapp.models import Effect, Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
LEASE = timedelta(seconds=60)
OUTSIDE: dict[str, Any] = {"name": "outside", "atomic": False}


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


def test_a_failure_undoes_nothing_and_climbs_the_ladder(order: Order, declare: Declare) -> None:
    handler = write_and_raise(ValueError("first"), ValueError("second"))
    row = due(order, declare(Order, handler, retry=dq.Retry([0]), **OUTSIDE))
    report = fire(row)
    assert (tried(row), row.slot_taken, report.again) == ((PENDING, 1), 1, {row.pk: row.run_at})
    fire(row)
    assert tried(row) == (("dead", "retries"), 2)
    assert [error["message"] for error in row.errors] == ["first", "second"]
    assert written() == [row.object_id] * 2


def test_while_it_fires_nobody_fires_it_again(order: Order) -> None:
    row = due(order, "send_outside")
    die_at(row, "committed")
    report = fire(row, deliveries=2)
    assert list(report.again) == [row.pk]
    assert report.again[row.pk] - timezone.now() > LEASE / 2
    assert not Effect.objects.exists()


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("handler", ["is interrupted", "fails"])
def test_an_interrupt_in_the_handler_or_before_its_failure_is_recorded_gives_the_row_back(
    order: Order, declare: Declare, handler: str
) -> None:
    """Recording is repeated for half a minute while the row is locked, so that an interrupt may well come then."""
    row = due(order, declare(Order, raising(ValueError() if handler == "fails" else KeyboardInterrupt()), **OUTSIDE))
    if handler == "fails":
        once_at("undone", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fire(row)
    assert tried(row) == UNTRIED


# Transient errors of the database


class Busy(Exception):
    """What a driver raises if the lock of another transaction is not free in time."""

    sqlstate, sqlite_errorcode = "55P03", 5


def raise_busy(*arguments: object) -> None:
    raise OperationalError("could not obtain lock on row") from Busy()


@pytest.mark.parametrize("atomic", [True, False], ids=["inside", "outside"])
def test_after_transient_errors_the_waits_grow_and_a_success_ends_them(
    order: Order, declare: Declare, caplog: pytest.LogCaptureFixture, atomic: bool
) -> None:
    caplog.set_level("DEBUG", "django_delayq.firing")
    policy, waits = declare(Order, raise_busy, name="busy", atomic=atomic), []
    row = due(order, policy)
    for _ in range(8):
        report = run(work_of(row), "default")
        assert report.now is not None
        waits.append((report.again[row.pk] - report.now).total_seconds())
        assert (report.untried, tried(row)) == ((row.pk,), UNTRIED)
        make_due(row)
    for number, wait in enumerate(waits):
        assert 0.05 * 2**number <= wait <= 0.15 * 2**number
    assert caplog.text.count("Not fired now") == len(waits)
    object.__setattr__(policy, "handler", lambda obj, timeout: None)
    assert fire(row).fired
    assert firing_state.backoff.next_wait("default", row.pk, "", 60).total_seconds() <= 0.15


@needs_row_locks
def test_a_row_that_is_held_when_the_handler_is_done_is_settled_when_it_is_free(
    order: Order, declare: Declare, monkeypatch: pytest.MonkeyPatch
) -> None:
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


# Leases that end


@pytest.mark.parametrize("by", ["sweep", "delivery"])
def test_an_attempt_whose_process_died_beside_others_is_repeated_alone_and_does_not_count(
    order: Order, by: str
) -> None:
    row = due(order, "send_outside")
    die_at(row, "committed")
    assert tried(row) == (("firing", ""), 1)
    assert settle_expired("default").again == {}
    expire(row)
    report = settle_expired("default") if by == "sweep" else fire(row, deliveries=2)
    assert (tried(row), row.deaths, row.errors) == (UNTRIED, 0, [])
    assert [event["what"] for event in row.history] == ["suspected"]
    assert report.again == {row.pk: row.run_at}
    assert work_of(row).suspect
    assert fire(row).fired == (row.pk,)
    assert tried(row) == (FIRED, 1)
    assert Effect.objects.get().idempotency_key == row.idempotency_key


def test_a_living_workers_row_does_not_expire(order: Order) -> None:
    row, other = due(order, "send_outside"), due(Order.objects.create(), "send_outside")
    die_at(row, "committed")
    expire(row)
    before = other.run_at
    extend_firing([row.pk, other.pk], "default")
    assert settle_expired("default") == dq.firing.Report()
    assert (state(row), state(other)) == (("firing", ""), PENDING)
    assert row.run_at - timezone.now() > LEASE - timedelta(seconds=5)
    assert other.run_at == before, "only rows that are firing are moved"


@needs_row_locks
def test_a_row_that_somebody_holds_keeps_no_other_from_being_extended(orders: list[Order]) -> None:
    rows = [due(order, "send_outside") for order in orders[:3]]
    for row in rows:
        die_at(row, "committed")
        expire(row)
    soon = timezone.now() + LEASE / 2

    def are_extended() -> list[bool]:
        moments = dict(Timeout.objects.values_list("pk", "run_at"))
        return [moments[row.pk] > soon for row in rows]

    with locking(rows[0]), impatient():
        assert not extend_firing([row.pk for row in rows], "default")
        assert are_extended() == [False, True, True]
        assert not settle_expired("default").done, "no other worker settles it meanwhile"
    assert extend_firing([row.pk for row in rows], "default")
    assert are_extended() == [True, True, True]


def test_an_expired_row_of_a_policy_that_is_not_declared_is_left_to_others_first(
    order: Order, declare: Declare
) -> None:
    """Another worker may know the policy and its retries; if none settles the row in a minute, this one does."""
    policy = declare(Order, **OUTSIDE)
    row = due(order, policy)
    die_at(row, "committed")
    registry.remove(policy)
    expire(row)
    assert settle_expired("default").again == {}
    Timeout.objects.update(run_at=timezone.now() - timedelta(seconds=61))
    assert list(settle_expired("default").again) == [row.pk]
    assert state(row) == PENDING


def test_a_worker_that_returns_late_settles_what_it_did_if_nobody_began_anew(order: Order, declare: Declare) -> None:
    """A worker that was suspended longer than its lease resumes when the sweep has released the row."""

    def handler(obj: Order, timeout: Timeout) -> None:
        write(obj, timeout)
        expire(timeout)
        settle_expired("default")

    row = due(order, declare(Order, handler, retry=dq.Retry([3600]), **OUTSIDE))
    assert fire(row).fired == (row.pk,)
    assert (state(row), written()) == (FIRED, [row.object_id])


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

    row = due(order, declare(Order, handler, retry=dq.Retry([3600]), **OUTSIDE))
    report = fire(row)
    assert (report.fired, list(report.again), state(row)) == ((), [row.pk], PENDING)


# Cancelled, paid or scheduled again while the handler runs


def test_whoever_cancels_during_the_firing_forbids_further_attempts(order: Order, declare: Declare) -> None:
    answers: list[bool] = []

    def handler(obj: Order, timeout: Timeout) -> None:
        answers.append(in_another_thread(lambda: dq.cancel_timeout(order, "outside")))
        raise ValueError

    row = due(order, declare(Order, handler, **OUTSIDE))
    assert fire(row).done == (row.pk,)
    assert (answers, state(row)) == ([False], ("cancelled", "hand"))
    assert [error["error"] for error in row.errors] == ["ValueError"]


def test_a_cancel_in_bulk_forbids_further_attempts_of_those_that_are_firing(order: Order, declare: Declare) -> None:
    answers = []

    def handler(obj: Order, timeout: Timeout) -> None:
        rows = Timeout.objects.filter(policy=timeout.policy)
        answers.append(in_another_thread(lambda: dq.cancel_timeouts(rows, reason="closed")))
        raise ValueError("no answer")

    policy = declare(Order, handler, retry=dq.Retry([0]), **OUTSIDE)
    row, other = due(order, policy), dq.schedule_timeout(Order.objects.create(), policy, hours=1)
    fire(row)
    assert answers == [1], "only the one that was pending is counted"
    assert state(row) == state(other) == ("cancelled", "hand")
    assert (row.history[0]["what"], row.history[0]["reason"]) == ("cancel_requested", "closed")


def test_a_cancel_while_a_process_died_is_kept(order: Order) -> None:
    row = due(order, "send_outside")
    die_at(row, "committed")
    assert dq.cancel_timeout(order, "send_outside") is False
    expire(row)
    assert settle_expired("default").done == (row.pk,)
    assert tried(row) == (("cancelled", "hand"), 0)


def test_a_firing_that_succeeds_although_it_was_cancelled_meanwhile_has_fired(order: Order, declare: Declare) -> None:
    row = due(order, declare(Order, lambda obj, timeout: dq.cancel_timeout(obj, "outside") and None, **OUTSIDE))
    fire(row)
    assert state(row) == FIRED


def test_a_firing_that_a_payment_came_too_late_for_is_retried(order: Order, declare: Declare) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        with pytest.raises(dq.DeadlinePassed), dq.before_deadline(obj, "outside"):
            pytest.fail("the payment was accepted")
        raise ValueError("the provider does not answer")

    row = due(order, declare(Order, handler, retry=dq.Retry([0]), **OUTSIDE))
    assert fire(row).again.keys() == {row.pk}
    assert (state(row), row.final_attempt) == (PENDING, False)


@pytest.mark.parametrize("newer", ["pending", "cancelled"])
@pytest.mark.parametrize("ends", ["raises", "dies", "snoozes"])
def test_a_newer_round_takes_the_place_of_a_firing_that_then_fails(
    order: Order, declare: Declare, ends: str, newer: str
) -> None:
    """Also if it was cancelled: `cancel_timeout` has answered that nothing will happen."""

    def meanwhile() -> None:
        dq.schedule_timeout(order, "outside", hours=1)
        assert newer == "pending" or dq.cancel_timeout(order, "outside") is True

    def handler(obj: Order, timeout: Timeout) -> None:
        meanwhile()
        raise dq.Snooze(minutes=5) if ends == "snoozes" else ValueError

    row = due(order, declare(Order, handler, **OUTSIDE))
    if ends == "dies":
        die_at(row, "committed")
        meanwhile()
        expire(row)
        assert settle_expired("default").done == (row.pk,)
    else:
        assert fire(row).done == (row.pk,)
    assert state(row) == ("skipped", "superseded")
    assert Timeout.objects.exclude(pk=row.pk).get().state == newer


def test_a_newer_round_that_comes_in_the_very_moment_of_the_failure_wins(
    order: Order, declare: Declare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The query found the slot free, but the unique constraint refuses it."""

    def handler(obj: Order, timeout: Timeout) -> None:
        dq.schedule_timeout(obj, "outside", hours=1)
        raise ValueError

    row = due(order, declare(Order, handler, **OUTSIDE))
    monkeypatch.setattr("django_delayq.ledger.marking.is_superseded", lambda *_: False)
    assert fire(row).done == (row.pk,)
    assert state(row) == ("skipped", "superseded")


def test_a_newer_round_that_fires_beside_an_older_one_succeeds(order: Order, declare: Declare) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        if not timeout.payload:
            dq.schedule_timeout(obj, "outside", hours=1, payload="newer")

    row = due(order, declare(Order, handler, **OUTSIDE))
    assert fire(row).fired
    newer = Timeout.objects.pending().get()
    make_due(newer)
    assert fire(newer).fired
    assert [state(one) for one in (row, newer)] == [FIRED] * 2


# Every worker settles attempts that died, in pages; only the first one logs it, and sends the signals


def expired(count: int, **values: Any) -> list[Timeout]:
    """Return rows whose process died while it fired them, and whose lease is over."""
    rows = [due(Order.objects.create(), "send_outside") for _ in range(count)]
    for row in rows:
        die_at(row, "committed")
        expire(row)
    Timeout.objects.update(**values) if values else None
    return rows


def at_the_third_death(count: int) -> list[Timeout]:
    return expired(count, suspected_at=timezone.now() - timedelta(seconds=1), deaths=2)


def test_an_attempt_that_died_is_told_once_however_many_workers_find_it(caplog: pytest.LogCaptureFixture) -> None:
    [row] = at_the_third_death(1)
    row.refresh_from_db()
    seen = {"state": row.state, "attempts": row.attempts, "run_at": row.run_at}  # as a second worker sees it
    settle_expired("default")
    settle(get_policy((Order, "send_outside")), WorkerDied("died"), "default", Call((row.pk,), seen))
    assert [found.getMessage().partition(":")[0] for found in caplog.records] == [
        f"Timeout {row.pk} ({row.policy}, object {row.object_id}) is dead"
    ]


def test_callbacks_of_receivers_run_after_a_death_is_recorded() -> None:
    [row] = at_the_third_death(1)
    called: list[str] = []

    def note(**_: Any) -> None:
        transaction.on_commit(lambda: called.append(state(row)[0]))

    with receiving(note, timeouts_settling):
        settle_expired("default")
    assert called == ["dead"]


def test_many_expired_rows_are_settled_in_pages() -> None:
    expired(5)
    assert [len(settle_expired("default", limit=3).again) for _ in range(3)] == [3, 2, 0]


def test_rows_that_were_settled_before_the_database_failed_are_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, undone, announced = at_the_third_death(3), list[str](), list[int]()

    def fail(step: str) -> None:
        if step == "undone":
            undone.append(step)
            if len(undone) == 3:
                monkeypatch.setattr(connection, "is_usable", lambda: False)  # it is lost
                raise OperationalError

    def note(timeout: Timeout, **_: Any) -> None:
        announced.append(timeout.pk)

    set_checkpoint_hook(fail)
    with receiving(note, timeout_dead), pytest.raises(OperationalError):
        settle_expired("default")
    assert [state(row)[0] for row in rows] == ["dead", "dead", "firing"]
    assert announced == [row.pk for row in rows[:2]]


def test_a_row_that_cannot_be_settled_does_not_keep_those_behind_it_from_being_settled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken, *others = expired(3)
    Timeout.objects.filter(pk=broken.pk).update(history=0)
    report = settle_expired("default")
    assert [state(row)[0] for row in others] == ["pending", "pending"]
    assert report.untried == (broken.pk,)
    assert f"Timeouts [{broken.pk}] of testapp.order.send_outside are released" in caplog.text
