"""An outcome that a handler returns is committed together with its work; one that it raises undoes it."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq import Limits, Snooze, signals
from django_delayq.models import Timeout
from tests.integration.firing.conftest import (
    ATOMIC_OR_NOT,
    FIRED,
    MODES,
    PENDING,
    Declare,
    Handler,
    due,
    fire,
    logged,
    make_due,
    raising,
    receiving,
    state,
    tried,
    write,
    write_and_raise,
    written,
)
from tests.integration.firing.test_crashes import killed_at
from tests.testapp.models import Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
OUTCOMES: dict[str, tuple[Any, tuple[str, str], str]] = {
    "skip": (dq.Skip("found paid"), ("skipped", "handler"), "timeout_skipped"),
    "give up": (dq.GiveUp("no such payment"), ("dead", "handler"), "timeout_dead"),
    "snooze": (dq.Snooze(minutes=5, reason="the bank has not decided"), PENDING, "timeout_snoozed"),
    "fired": (dq.Fired("found paid"), FIRED, "timeout_fired"),
}
"""With the state and cause of the timeout, and the event in the log."""


def returning(outcome: Any) -> Handler:
    def handler(target: Any, timeouts: Any) -> Any:
        write(target, timeouts)
        return outcome

    return handler


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", OUTCOMES)
def test_a_returned_outcome_keeps_the_work(order: Order, declare: Declare, mode: str, kind: str) -> None:
    outcome, expected, _ = OUTCOMES[kind]
    row = due(order, declare(Order, returning(outcome), name="returns", **MODES[mode]))
    report = fire(row)
    assert (state(row), written()) == (expected, [row.object_id])
    assert report.fired == ((row.pk,) if kind == "fired" else ())
    if kind != "snooze":
        assert (row.reason, row.attempts, row.slot_taken, row.is_settled) == (outcome.reason, 1, None, True)
        return
    assert (row.reason, row.attempts, row.snoozes, row.slot_taken, row.settled_at) == ("", 0, 1, 1, None)
    assert timedelta(minutes=4) < row.run_at - timezone.now() <= timedelta(minutes=5)
    assert (row.history[-1]["what"], row.history[-1]["reason"]) == ("snoozed", "the bank has not decided")
    assert report.again == {row.pk: row.run_at}


@pytest.mark.parametrize("mode", ["batch", "together"])
def test_each_member_has_the_outcome_that_was_returned_for_it(orders: list[Order], declare: Declare, mode: str) -> None:
    calls: list[Any] = []

    def handler(target: Any, timeouts: Any) -> Any:
        calls.append(target)
        return dq.Skip("the batch, or the first") if len(calls) == 1 else None

    policy = declare(Order, handler, name="returns", **MODES[mode])
    rows = [due(each, policy) for each in orders]
    fire(*rows)
    assert [state(row)[0] for row in rows] == ["skipped", *["skipped" if mode == "batch" else "fired"] * 4]
    assert len(calls) == (1 if mode == "batch" else 5), "nothing was undone, and nothing repeated"


@pytest.mark.parametrize("mode", MODES)
def test_a_class_that_is_returned_means_an_instance(order: Order, declare: Declare, mode: str) -> None:
    row = due(order, declare(Order, returning(dq.Skip), name="returns", **MODES[mode]))
    fire(row)
    assert state(row) == ("skipped", "handler")


@pytest.mark.parametrize("mode", MODES)
def test_the_class_snooze_has_no_delay_and_is_a_failure(order: Order, declare: Declare, mode: str) -> None:
    row = due(order, declare(Order, returning(dq.Snooze), name="returns", retry=dq.Retry([60]), **MODES[mode]))
    fire(row)
    assert (tried(row), len(written())) == ((PENDING, 1), 1 if mode == "outside" else 0)


@pytest.mark.parametrize("value", [True, "skip", 0, Order, {"a": 1}, ValueError("returned")])
def test_other_values_are_ignored(order: Order, declare: Declare, value: Any) -> None:
    row = due(order, declare(Order, returning(value), name="returns"))
    assert fire(row).fired == (row.pk,)
    assert (state(row), row.reason) == (FIRED, "")


@pytest.mark.parametrize("mode", MODES)
def test_more_snoozes_than_the_limit_end_in_dead(order: Order, declare: Declare, mode: str) -> None:
    limits = dq.Limits(snoozes=0)
    row = due(order, declare(Order, returning(dq.Snooze(minutes=1)), name="returns", limits=limits, **MODES[mode]))
    fire(row)
    assert (state(row), len(written())) == (("dead", "limit"), 1)


def test_a_snooze_whose_handler_has_scheduled_the_next_round_gives_way_to_it(order: Order, declare: Declare) -> None:
    def handler(order: Order, timeout: Any) -> Any:
        dq.schedule_timeout(order, "returns", hours=1)
        return dq.Snooze(minutes=5)

    row = due(order, declare(Order, handler, name="returns"))
    fire(row)
    assert state(row) == ("skipped", "superseded")
    [newer] = dq.pending_timeouts(order, "returns")
    assert newer.pk > row.pk


def test_a_snooze_that_cannot_be_computed_undoes_the_work(order: Order, declare: Declare) -> None:
    class Endless:
        def end(self, since: Any, obj: Any) -> Any:
            raise ValueError("never")

    row = due(order, declare(Order, returning(dq.Snooze(after=Endless())), name="returns", retry=dq.Retry([60])))
    fire(row)
    assert (tried(row), written()) == ((PENDING, 1), [])


@pytest.mark.parametrize("kind", ["skip", "snooze", "give up"])
def test_a_raised_outcome_undoes_the_work_and_one_warning_says_so(
    order: Order, declare: Declare, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    outcome, expected, _ = OUTCOMES[kind]
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
def test_there_is_no_warning_if_nothing_is_undone(
    order: Order, declare: Declare, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It has only read, or it runs outside a transaction, where what it wrote is committed."""

    def handler(order: Order, timeout: Any) -> None:
        if mode == "outside":
            write(order, timeout)
        order.refresh_from_db()
        raise dq.Skip("nothing to do")

    fire(due(order, declare(Order, handler, name="raises", **MODES[mode])))
    assert logged(caplog, "outcome_undoes") == []


@pytest.mark.parametrize("kind", OUTCOMES)
def test_what_was_returned_is_logged_and_signalled_after_the_commit(
    order: Order, declare: Declare, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    outcome, _, event = OUTCOMES[kind]
    seen: list[tuple[bool, bool]] = []

    def note(signal: Any, **_: Any) -> None:
        seen.append((getattr(dq, event, None) is signal, connection.in_atomic_block))

    row = due(order, declare(Order, returning(outcome), name="returns"))
    signals = (dq.timeout_skipped, dq.timeout_dead, dq.timeout_fired, dq.timeout_failed)
    with caplog.at_level(logging.INFO), receiving(note, *signals):
        fire(row)
    assert seen == ([] if kind == "snooze" else [(True, False)])
    assert [vars(each)["event"] for each in caplog.records if vars(each).get("timeout_id") == row.pk] == [event]


@pytest.mark.parametrize("step", ["handled", "committed"])
def test_a_process_that_is_killed_keeps_work_and_outcome_or_neither(order: Order, declare: Declare, step: str) -> None:
    row = due(order, declare(Order, returning(dq.Skip("found paid")), name="returns"))
    killed_at(step, row)
    assert (state(row), len(written())) == ((("skipped", "handler"), 1) if step == "committed" else (PENDING, 0))


# `Limits(snoozes=n)`: one more ends in `dead`


DEAD = ("dead", "limit")


def fire_again(row: Timeout, times: int = 1) -> None:
    for _ in range(times):
        make_due(row)
        fire(row)


def test_one_snooze_too_many_is_dead_and_says_so(
    order: Order, declare: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    died: list[int] = []

    def note(timeout: Timeout, **_: Any) -> None:
        died.append(timeout.pk)

    snoozing = raising(Snooze(minutes=5, reason="the provider is closed"))
    row = due(order, declare(Order, snoozing, name="snoozes", limits=Limits(snoozes=3)))
    with receiving(note, signals.timeout_dead):
        fire_again(row, 3)
        assert (state(row), died) == (PENDING, [])
        fire_again(row)
    assert (tried(row), row.errors, died) == ((DEAD, 1), [], [row.pk]), "only what ended it counts as an attempt"
    assert row.reason == "It snoozed 4 times, and its policy allows 3: the provider is closed"
    [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert vars(record)["event"] == "timeout_dead"
    assert "is dead: It snoozed 4 times, and its policy allows 3" in record.getMessage()


def test_no_snooze_at_all_may_be_allowed_and_its_reason_may_be_missing(order: Order, declare: Declare) -> None:
    row = due(order, declare(Order, raising(Snooze(minutes=5)), name="snoozes", limits=Limits(snoozes=0)))
    fire(row)
    assert (state(row), row.reason) == (DEAD, "It snoozed 1 time, and its policy allows 0.")


@ATOMIC_OR_NOT
def test_a_new_value_of_since_begins_anew(order: Order, declare: Declare, atomic: bool) -> None:
    """Its round is another one: the snoozes of the former ones do not end it without a call."""
    options: dict[str, Any] = {"after": timedelta(0), "since": "created_at", "when": Q(status="unpaid")}
    limits = Limits(snoozes=2)
    policy = declare(Order, raising(Snooze(minutes=5)), name="moved", atomic=atomic, limits=limits, **options)
    order.created_at = timezone.now()
    order.save()
    row = order.timeouts.get(policy=policy.label)
    fire_again(row, 2)
    order.created_at = timezone.now()
    order.save()
    fire_again(row, 2)
    assert state(row) == PENDING
    fire_again(row)
    assert state(row) == DEAD
