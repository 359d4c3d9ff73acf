"""What a handler raises or returns, and what becomes of its timeout: failures, outcomes, snoozes."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq import clock
from django_delayq.models import Timeout
from tests.integration.firing.conftest import MODES, due, fire, in_another_thread, make_due, state
from tests.integration.firing.handlers import Declare, Handler, Log, once_at, raising, write, write_and_raise
from tests.integration.firing.rows import FIRED, PENDING, UNTRIED, hearing, logged, tried, written
from tests.testapp.models import Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
HOURLY = dq.Retry([3600])


@pytest.mark.parametrize("recovers", [False, True])
def test_failures_undo_the_work_and_climb_the_ladder(order: Order, declare: Declare, recovers: bool) -> None:
    now = datetime(2026, 5, 1, tzinfo=UTC)
    handler = write_and_raise(*[ValueError("again")] * 3, None if recovers else ValueError("again"))
    with clock.set_to(now):
        row = due(order, declare(Order, handler, name="ladder", retry=dq.Retry([0, 60, 600])))
    for number, wait in enumerate((0, 60, 600), 1):
        with clock.set_to(now):
            report = fire(row)
        assert (tried(row), written(), row.slot_taken, row.settled_at) == ((PENDING, number), [], 1, None)
        assert report.again == {row.pk: now + timedelta(seconds=wait)} == {row.pk: row.run_at}
        now = row.run_at
    with clock.set_to(now):
        assert fire(row).done == (row.pk,)
    assert (tried(row), row.slot_taken) == ((FIRED if recovers else ("dead", "retries"), 4), None)
    assert (row.reason, written()) == (("", [row.object_id]) if recovers else ("ValueError: again", []))
    errors = [(error["error"], error["attempt"], error["message"]) for error in row.errors]
    assert errors == [("ValueError", number, "again") for number in (1, 2, 3, 4)[: 4 - recovers]]
    assert "raise error" in row.errors[0]["traceback"]
    assert row.due_at < row.run_at


def test_without_a_ladder_of_its_own_it_has_that_of_the_settings(order: Order, declare: Declare, settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "RETRY": dq.Retry([7200])}
    row = due(order, declare(Order, raising(ValueError()), name="default"))
    fire(row)
    assert timedelta(minutes=119) < Timeout.objects.get().run_at - timezone.now() <= timedelta(hours=2)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("not even this")


STRANGE = {
    "the end of the process": (SystemExit(3), "SystemExit"),
    "letters that no database takes": (ValueError("no\0 \ud800"), "ValueError"),
    "an error without a message": (Unspeakable(), "Unspeakable"),
    "a snooze beyond all calendars": (dq.Snooze(weeks=10_000), "InvalidDelay"),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_whatever_is_raised_is_recorded_as_a_failure(order: Order, declare: Declare, caplog: Log, kind: str) -> None:
    caplog.set_level(logging.CRITICAL, logger="django_delayq.firing")  # what records the log cannot send it on
    error, name = STRANGE[kind]
    row = due(order, declare(Order, write_and_raise(error), name="strange", retry=HOURLY))
    fire(row)
    assert (tried(row), row.errors[0]["error"], written()) == ((PENDING, 1), name, [])


def test_a_condition_that_cannot_be_read_counts_as_failed_attempts(order: Order, declare: Declare) -> None:
    """It must neither stop the worker nor be retried indefinitely unnoticed."""
    row = due(order, declare(Order, name="ahead", retry=HOURLY))
    object.__setattr__(dq.get_policy(row.policy), "when", Q(no_such_field=1))
    fire(row)
    assert (tried(row), row.errors[0]["error"]) == ((PENDING, 1), "FieldError")


@pytest.mark.parametrize("meanwhile", ["moved", "cancelled"])
def test_a_failure_loses_against_a_change_of_the_row(order: Order, declare: Declare, meanwhile: str) -> None:
    policy = declare(Order, raising(ValueError()), name="loses", retry=dq.Retry([0]))
    row = due(order, policy)

    def change() -> Any:
        if meanwhile == "moved":
            return dq.reschedule_timeout(order, policy, hours=5)
        return dq.cancel_timeout(order, policy)

    once_at("undone", lambda: in_another_thread(change))
    report = fire(row)
    if meanwhile == "cancelled":
        assert (state(row), report.done) == (("cancelled", "hand"), (row.pk,))
    else:
        assert (tried(row), row.errors, report.again) == (UNTRIED, [], {row.pk: row.run_at})
        assert row.run_at - timezone.now() > timedelta(hours=4)


# Outcomes. One that is returned is committed together with the work; one that is raised undoes it


SNOOZE = dq.Snooze(minutes=5, reason="the bank has not decided")
OUTCOMES: dict[str, tuple[Any, tuple[str, str], str, str]] = {
    "skip": (dq.Skip("found paid"), ("skipped", "handler"), "timeout_skipped", "found paid"),
    "class": (dq.Skip, ("skipped", "handler"), "timeout_skipped", ""),
    "give up": (dq.GiveUp("no such payment"), ("dead", "handler"), "timeout_dead", "no such payment"),
    "fired": (dq.Fired("found paid"), FIRED, "timeout_fired", "found paid"),
    "snooze": (SNOOZE, PENDING, "timeout_snoozed", ""),
}
"""With the state and cause of the timeout, the event in the log, and the reason that is stored."""
ENDS = (dq.timeout_skipped, dq.timeout_dead, dq.timeout_fired, dq.timeout_failed)


def returning(outcome: Any) -> Handler:
    def handler(target: Any, timeouts: Any) -> Any:
        write(target, timeouts)
        return outcome

    return handler


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", OUTCOMES)
def test_a_returned_outcome_keeps_the_work(order: Order, declare: Declare, mode: str, kind: str, caplog: Log) -> None:
    outcome, expected, event, reason = OUTCOMES[kind]
    row = due(order, declare(Order, returning(outcome), name="returns", **MODES[mode]))
    with caplog.at_level(logging.INFO), hearing(*ENDS) as heard:
        report = fire(row)
    assert (state(row), written()) == (expected, [row.object_id])
    assert (report.fired, row.reason) == ((row.pk,) if kind == "fired" else (), reason)
    assert [vars(each)["event"] for each in caplog.records if vars(each).get("timeout_id") == row.pk] == [event]
    if kind != "snooze":
        assert heard == [(getattr(dq, event), row.pk)]
        assert (row.attempts, row.slot_taken, row.is_settled) == (1, None, True)
        return
    assert (heard, row.attempts, row.snoozes, row.slot_taken, row.settled_at) == ([], 0, 1, 1, None)
    assert timedelta(minutes=4) < row.run_at - timezone.now() <= timedelta(minutes=5)
    assert (row.history[-1]["what"], row.history[-1]["reason"]) == ("snoozed", "the bank has not decided")
    assert report.again == {row.pk: row.run_at}


class Endless:
    def end(self, since: Any, obj: Any) -> Any:
        raise ValueError("never")


@pytest.mark.parametrize("mode", ["alone", "outside"])
@pytest.mark.parametrize("snooze", [dq.Snooze, dq.Snooze(after=Endless())], ids=["class", "endless"])
def test_a_snooze_without_an_end_is_a_failure(order: Order, declare: Declare, mode: str, snooze: Any) -> None:
    row = due(order, declare(Order, returning(snooze), name="returns", retry=HOURLY, **MODES[mode]))
    fire(row)
    assert (tried(row), len(written())) == ((PENDING, 1), int(mode == "outside"))


@pytest.mark.parametrize("kind", ["skip", "snooze", "give up"])
def test_a_raised_outcome_undoes_the_work_and_warns(order: Order, declare: Declare, kind: str, caplog: Log) -> None:
    outcome, expected, *_ = OUTCOMES[kind]
    policy = declare(Order, write_and_raise(outcome), name="raises")
    for each in (order, Order.objects.create()):
        row = due(each, policy)
        fire(row)
        assert (state(row), written()) == (expected, [])
    [line] = logged(caplog, "outcome_undoes")
    name = type(outcome).__name__
    assert line.levelno == logging.WARNING
    assert f"testapp.order.raises has raised {name} after it had written" in line.getMessage()
    assert f"`return {name}(...)`" in line.getMessage()


@pytest.mark.parametrize("mode", ["alone", "outside"])
def test_there_is_no_warning_if_nothing_is_undone(order: Order, declare: Declare, mode: str, caplog: Log) -> None:
    """It has only read, or it runs outside a transaction, where what it wrote is committed."""

    def handler(order: Order, timeout: Any) -> None:
        if mode == "outside":
            write(order, timeout)
        order.refresh_from_db()
        raise dq.Skip("nothing to do")

    fire(due(order, declare(Order, handler, name="raises", **MODES[mode])))
    assert logged(caplog, "outcome_undoes") == []


# `Limits(snoozes=n)`: one more ends in `dead`


def test_one_snooze_too_many_is_dead_and_says_so(order: Order, declare: Declare, caplog: Log) -> None:
    row = due(order, declare(Order, raising(SNOOZE), name="snoozes", limits=dq.Limits(snoozes=3)))
    for number in range(4):
        assert (state(row), number) == (PENDING, row.snoozes)
        make_due(row)
        fire(row)
    assert (tried(row), row.errors) == ((("dead", "limit"), 1), []), "only what ended it counts as an attempt"
    assert row.reason == "It snoozed 4 times, and its policy allows 3: the bank has not decided"
    [record] = logged(caplog, "timeout_dead")
    assert "is dead: It snoozed 4 times, and its policy allows 3" in record.getMessage()


def test_a_snooze_whose_handler_has_scheduled_the_next_round_gives_way_to_it(order: Order, declare: Declare) -> None:
    def handler(order: Order, timeout: Any) -> Any:
        dq.schedule_timeout(order, "returns", hours=1)
        return SNOOZE

    row = due(order, declare(Order, handler, name="returns"))
    fire(row)
    assert state(row) == ("skipped", "superseded")
    [newer] = dq.pending_timeouts(order, "returns")
    assert newer.pk > row.pk
