"""`atomic=False`: between two transactions, at least once, with expiry, final attempt and newer rounds."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq.firing import extend_firing, plan, run, settle_expired
from django_delayq.firing.handler import set_checkpoint_hook
from django_delayq.firing.state import firing_state
from django_delayq.models import Timeout
from django_delayq.policy.policies import registry
from tests.e2e.races.sessions import impatient
from tests.integration.firing.conftest import (
    another_session,
    die_at,
    due,
    expire,
    fire,
    in_another_thread,
    locking,
    make_due,
    needs_row_locks,
    state,
)
from tests.testapp.models import Effect, Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
Declare = Callable[..., dq.TimeoutPolicy[Any]]
LEASE = timedelta(seconds=60)


def test_the_handler_runs_outside_a_transaction_on_a_committed_firing_row(order: Order, declare: Declare) -> None:
    seen: dict[str, Any] = {}

    def handler(obj: Order, timeout: Timeout) -> None:
        seen["atomic"] = connection.in_atomic_block
        seen["told"] = (timeout.state, timeout.attempts, timeout.idempotency_key)
        names = ("state", "attempts", "slot_taken")
        seen["others see"] = in_another_thread(lambda: Timeout.objects.values_list(*names).get(pk=timeout.pk))
        seen["expires in"] = timeout.run_at - timezone.now()

    row = due(order, declare(Order, handler, name="outside", atomic=False))
    assert fire(row).fired == (row.pk,)
    assert seen["atomic"] is False
    assert seen["told"] == ("firing", 1, row.idempotency_key)
    assert seen["others see"] == ("firing", 1, None)
    assert LEASE - timedelta(seconds=5) < seen["expires in"] <= LEASE
    assert (state(row), row.attempts) == (("fired", "due"), 1)


def test_what_no_longer_matches_or_is_gone_is_not_run(declare: Declare) -> None:
    policy = declare(
        Order, lambda obj, timeout: pytest.fail("ran"), name="outside", atomic=False, when=Q(status="unpaid")
    )
    paid, gone = due(Order.objects.create(status="paid"), policy), due(Order.objects.create(), policy)
    Timeout.objects.filter(pk=gone.pk).update(object_id="987654")
    fire(paid, gone)
    assert (state(paid), state(gone)) == (("skipped", "condition"), ("skipped", "gone"))


def test_a_failure_undoes_nothing_and_climbs_the_ladder(order: Order, declare: Declare) -> None:
    keys: set[str] = set()

    def handler(obj: Order, timeout: Timeout) -> None:
        keys.add(timeout.idempotency_key)
        Effect.objects.create(what="sent", object_id=obj.pk)
        raise ValueError(f"attempt {timeout.attempts}")

    row = due(order, declare(Order, handler, name="outside", atomic=False, retry=dq.Retry([0])))
    report = fire(row)
    assert (state(row), row.attempts, row.slot_taken) == (("pending", ""), 1, 1)
    assert report.again == {row.pk: row.run_at}
    fire(row)
    assert (state(row), row.attempts) == (("dead", "retries"), 2)
    assert [error["message"] for error in row.errors] == ["attempt 1", "attempt 2"]
    assert (Effect.objects.count(), len(keys)) == (2, 1)


@pytest.mark.parametrize(
    ("outcome", "expected", "attempts"),
    [
        (dq.Snooze(minutes=5), ("pending", ""), 0),
        (dq.Skip("no"), ("skipped", "handler"), 1),
        (dq.GiveUp("no"), ("dead", "handler"), 1),
    ],
)
def test_outcomes_settle_as_inside_a_transaction(
    order: Order, declare: Declare, outcome: Exception, expected: tuple[str, str], attempts: int
) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        raise outcome

    row = due(order, declare(Order, handler, name="outside", atomic=False))
    fire(row)
    assert (state(row), row.attempts) == (expected, attempts)


@pytest.mark.parametrize(
    "outcome",
    [None, dq.Skip("no need"), dq.GiveUp("no"), RuntimeError("failed")],
    ids=["fired", "skip", "dead", "retry"],
)
def test_a_settled_row_was_not_to_run_in_the_future(order: Order, declare: Declare, outcome: Exception | None) -> None:
    """While the handler runs, `run_at` is the end of the lease; nothing will run then."""

    def handler(obj: Order, timeout: Timeout) -> None:
        if outcome is not None:
            raise outcome

    row = due(order, declare(Order, handler, name="outside", atomic=False, retry=dq.Retry.never()))
    fire(row)
    row.refresh_from_db()
    assert row.settled_at is not None
    assert row.due_at <= row.run_at <= row.settled_at


def test_while_it_fires_nobody_fires_it_again(order: Order) -> None:
    row = due(order, "send_outside")
    Timeout.objects.filter(pk=row.pk).update(state="firing", slot_taken=None, attempts=1, run_at=timezone.now() + LEASE)
    report = fire(row, deliveries=2)
    assert list(report.again) == [row.pk]
    assert report.again[row.pk] - timezone.now() > LEASE / 2
    assert not Effect.objects.exists()


@pytest.mark.parametrize("by", ["sweep", "delivery"])
def test_an_attempt_whose_process_died_beside_others_is_repeated_alone_and_does_not_count(
    order: Order, by: str
) -> None:
    row = due(order, "send_outside")
    die_at(row, "committed")
    assert (state(row), row.attempts) == (("firing", ""), 1)
    assert settle_expired("default").again == {}
    expire(row)
    report = settle_expired("default") if by == "sweep" else fire(row, deliveries=2)
    assert (state(row), row.attempts, row.deaths, row.errors) == (("pending", ""), 0, 0, [])
    assert [event["what"] for event in row.history] == ["suspected"]
    assert report.again == {row.pk: row.run_at}
    [work], _ = dq.firing.plan({row.pk: 1}, "default")
    assert work.suspect
    assert fire(row).fired == (row.pk,)
    assert (state(row), row.attempts) == (("fired", "due"), 1)
    assert Effect.objects.get().idempotency_key == row.idempotency_key


def test_a_handler_that_kills_its_process_each_time_ends_dead(order: Order) -> None:
    row = due(order, "send_outside")
    for deaths in (0, 1, 2, 3):
        die_at(row, "committed")
        expire(row)
        settle_expired("default")
        state(row)
        assert (row.attempts, row.deaths) == (0, deaths)
    assert (state(row), row.errors) == (("dead", "retries"), [])
    assert row.reason == "The process died 3 times while this timeout ran alone in it."


def test_a_cancel_while_a_process_died_is_kept(order: Order) -> None:
    row = due(order, "send_outside")
    die_at(row, "committed")
    assert not dq.cancel_timeout(order, "send_outside")
    expire(row)
    settle_expired("default")
    assert (state(row), row.attempts) == (("cancelled", "hand"), 0)


def test_a_living_workers_row_does_not_expire(order: Order) -> None:
    row = due(order, "send_outside")
    die_at(row, "committed")
    other = due(Order.objects.create(), "send_outside")
    expire(row)
    extend_firing([row.pk, other.pk], "default")
    assert settle_expired("default") == dq.firing.Report()
    state(row)
    assert row.run_at - timezone.now() > LEASE - timedelta(seconds=5)
    before = other.run_at
    state(other)
    assert other.run_at == before, "only rows that are firing are moved"


@needs_row_locks
def test_a_row_that_somebody_holds_keeps_no_other_from_being_extended(orders: list[Order]) -> None:
    rows = [due(order, "send_outside") for order in orders[:3]]
    for row in rows:
        die_at(row, "committed")
        expire(row)
    held = rows[0]
    soon = timezone.now() + LEASE / 2

    def are_extended() -> list[bool]:
        moments = dict(Timeout.objects.values_list("pk", "run_at"))
        return [moments[row.pk] > soon for row in rows]

    with locking(held), impatient():
        assert not extend_firing([row.pk for row in rows], "default")
        assert are_extended() == [False, True, True]
        assert not settle_expired("default").done, "no other worker settles it meanwhile"
    assert extend_firing([row.pk for row in rows], "default")
    assert are_extended() == [True, True, True]


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
        [work], _report = plan({row.pk: 1}, "default")
        report = run(work, "default")
        assert report.now is not None
        waits.append((report.again[row.pk] - report.now).total_seconds())
        assert (report.untried, state(row), row.attempts) == ((row.pk,), ("pending", ""), 0)
        make_due(row)
    for number, wait in enumerate(waits):
        assert 0.05 * 2**number <= wait <= 0.15 * 2**number
    assert caplog.text.count("Not fired now") == len(waits)
    object.__setattr__(policy, "handler", lambda obj, timeout: None)
    assert fire(row).fired
    assert firing_state.backoff.next_wait("default", row.pk, "", 60).total_seconds() <= 0.15


def test_whoever_cancels_during_the_firing_forbids_further_attempts(order: Order, declare: Declare) -> None:
    answers: list[bool] = []

    def handler(obj: Order, timeout: Timeout) -> None:
        answers.append(in_another_thread(lambda: dq.cancel_timeout(order, "outside")))
        raise ValueError

    row = due(order, declare(Order, handler, name="outside", atomic=False))
    assert fire(row).done == (row.pk,)
    assert answers == [False]
    assert state(row) == ("cancelled", "hand")
    assert [error["error"] for error in row.errors] == ["ValueError"]


def test_a_cancel_in_bulk_forbids_further_attempts_of_those_that_are_firing(declare: Declare) -> None:
    firing, pending = Order.objects.create(), Order.objects.create()
    answers = []

    def handler(obj: Order, timeout: Timeout) -> None:
        rows = Timeout.objects.filter(policy=timeout.policy)
        answers.append(in_another_thread(lambda: dq.cancel_timeouts(rows, reason="closed")))
        raise ValueError("no answer")

    policy = declare(Order, handler, name="outside", atomic=False, retry=dq.Retry([0]))
    row, other = due(firing, policy), dq.schedule_timeout(pending, policy, hours=1)
    fire(row)
    assert answers == [1], "only the one that was pending is counted"
    assert state(row) == state(other) == ("cancelled", "hand")
    assert (row.history[0]["what"], row.history[0]["reason"]) == ("cancel_requested", "closed")


def test_a_worker_that_returns_late_settles_what_it_did_if_nobody_began_anew(order: Order, declare: Declare) -> None:
    """A worker that was suspended longer than its lease resumes when the sweep has released the row."""

    def handler(obj: Order, timeout: Timeout) -> None:
        Effect.objects.create(what="sent", object_id=obj.pk)
        expire(timeout)
        settle_expired("default")

    row = due(order, declare(Order, handler, name="outside", atomic=False, retry=dq.Retry([3600])))
    assert fire(row).fired == (row.pk,)
    assert state(row) == ("fired", "due")
    assert Effect.objects.count() == 1


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

    row = due(order, declare(Order, handler, name="outside", atomic=False, retry=dq.Retry([3600])))
    report = fire(row)
    assert (report.fired, list(report.again)) == ((), [row.pk])
    assert state(row) == ("pending", "")


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
    row = due(order, declare(Order, handler, name="outside", atomic=False))
    assert fire(row).fired == (row.pk,)
    assert len(pauses) == 3
    assert state(row) == ("fired", "due")


@needs_row_locks
def test_trouble_of_the_database_in_the_handler_counts_no_attempt(order: Order, declare: Declare) -> None:
    other = Order.objects.create()

    def handler(obj: Order, timeout: Timeout) -> None:
        with transaction.atomic():
            Order.objects.select_for_update(nowait=True).get(pk=other.pk)

    row = due(order, declare(Order, handler, name="outside", atomic=False))
    with another_session(lambda: Order.objects.select_for_update().get(pk=other.pk)):
        report = fire(row)
    assert (state(row), row.attempts, row.errors) == (("pending", ""), 0, [])
    assert report.again == {row.pk: row.run_at}
    assert row.run_at - timezone.now() < timedelta(seconds=1)


def test_keyboard_interrupt_in_the_handler_gives_the_row_back(order: Order, declare: Declare) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        raise KeyboardInterrupt

    row = due(order, declare(Order, handler, name="outside", atomic=False))
    with pytest.raises(KeyboardInterrupt):
        fire(row)
    assert (state(row), row.attempts) == (("pending", ""), 0)


def test_many_expired_rows_are_settled_in_pages(declare: Declare) -> None:
    rows = [due(Order.objects.create(), "send_outside") for _ in range(5)]
    for row in rows:
        die_at(row, "committed")
    Timeout.objects.update(run_at=timezone.now() - timedelta(seconds=1))
    assert len(settle_expired("default", limit=3).again) == 3
    assert len(settle_expired("default", limit=3).again) == 2
    assert settle_expired("default", limit=3).again == {}


def test_an_expired_row_of_a_policy_that_is_not_declared_is_left_to_others_first(
    order: Order, declare: Declare
) -> None:
    """Another worker may know the policy and its retries; if none settles the row in a minute, this one does."""
    policy = declare(Order, name="outside", atomic=False)
    row = due(order, policy)
    die_at(row, "committed")
    registry.remove(policy)
    expire(row)
    assert settle_expired("default").again == {}
    Timeout.objects.update(run_at=timezone.now() - timedelta(seconds=61))
    assert list(settle_expired("default").again) == [row.pk]
    assert state(row) == ("pending", "")


def test_keyboard_interrupt_before_the_failure_is_recorded_gives_the_row_back(order: Order, declare: Declare) -> None:
    """Recording is repeated for half a minute while the row is locked, so that an interrupt may well come then."""
    interrupted: list[str] = []

    def handler(obj: Order, timeout: Timeout) -> None:
        raise ValueError

    def interrupt(step: str) -> None:
        if step == "undone" and not interrupted:
            interrupted.append(step)
            raise KeyboardInterrupt

    row = due(order, declare(Order, handler, name="outside", atomic=False))
    set_checkpoint_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        fire(row)
    assert (state(row), row.attempts) == (("pending", ""), 0)
