"""An outcome that a handler returns is committed together with its work; one that it raises undoes it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq.models import Timeout
from tests.integration.firing.conftest import MODES, due, fire, state
from tests.integration.firing.test_crashes import killed_at
from tests.testapp.models import Effect, Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
Declare = Callable[..., dq.TimeoutPolicy[Any]]
OUTCOMES: dict[str, tuple[Any, tuple[str, str]]] = {
    "skip": (dq.Skip("found paid"), ("skipped", "handler")),
    "give up": (dq.GiveUp("no such payment"), ("dead", "handler")),
    "snooze": (dq.Snooze(minutes=5, reason="the bank has not decided"), ("pending", "")),
    "fired": (dq.Fired("found paid"), ("fired", "due")),
}


def returning(outcome: Any) -> Callable[[Any, Any], Any]:
    def handler(target: Any, timeouts: Any) -> Any:
        Effect.objects.create(what="kept")
        for order in target if hasattr(target, "update") else [target]:
            order.note = "kept"
            order.save()
        return outcome

    return handler


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", OUTCOMES)
def test_a_returned_outcome_keeps_the_work(order: Order, declare: Declare, mode: str, kind: str) -> None:
    outcome, expected = OUTCOMES[kind]
    row = due(order, declare(Order, returning(outcome), name="returns", **MODES[mode]))
    report = fire(row)
    order.refresh_from_db()
    assert (state(row), order.note, Effect.objects.count()) == (expected, "kept", 1)
    assert report.fired == ((row.pk,) if kind == "fired" else ())
    assert row.reason == ("" if kind == "snooze" else outcome.reason)
    if kind != "snooze":
        assert (row.attempts, row.slot_taken, row.is_settled) == (1, None, True)
        return
    assert (row.attempts, row.snoozes, row.slot_taken, row.settled_at) == (0, 1, 1, None)
    assert timedelta(minutes=4) < row.run_at - timezone.now() <= timedelta(minutes=5)
    assert (row.history[-1]["what"], row.history[-1]["reason"]) == ("snoozed", "the bank has not decided")
    assert report.again == {row.pk: row.run_at}


@pytest.mark.parametrize("mode", ["batch", "together"])
def test_each_member_has_the_outcome_that_was_returned_for_it(orders: list[Order], declare: Declare, mode: str) -> None:
    first = orders[0].pk

    def one(order: Order, timeout: Timeout) -> Any:
        Effect.objects.create(what="kept")
        return dq.Skip("the first") if order.pk == first else None

    def many(queryset: Any, timeouts: Any) -> Any:
        Effect.objects.create(what="kept")
        return dq.Skip("all")

    policy = declare(Order, many if mode == "batch" else one, name="returns", **MODES[mode])
    rows = [due(each, policy) for each in orders]
    fire(*rows)
    states = [state(row)[0] for row in rows]
    assert states == (["skipped"] * 5 if mode == "batch" else ["skipped", *["fired"] * 4])
    assert Effect.objects.count() == (1 if mode == "batch" else 5), "nothing was undone, and nothing repeated"


@pytest.mark.parametrize("mode", MODES)
def test_a_class_that_is_returned_means_an_instance(order: Order, declare: Declare, mode: str) -> None:
    row = due(order, declare(Order, returning(dq.Skip), name="returns", **MODES[mode]))
    fire(row)
    assert state(row) == ("skipped", "handler")


@pytest.mark.parametrize("mode", MODES)
def test_the_class_snooze_has_no_delay_and_is_a_failure(order: Order, declare: Declare, mode: str) -> None:
    row = due(order, declare(Order, returning(dq.Snooze), name="returns", retry=dq.Retry([60]), **MODES[mode]))
    fire(row)
    assert (state(row), row.attempts) == (("pending", ""), 1)
    assert Effect.objects.count() == (1 if mode == "outside" else 0)


def test_an_async_handler_may_return_one(order: Order, declare: Declare) -> None:
    async def handler(order: Order, timeout: Timeout) -> Any:
        await Effect.objects.acreate(what="kept")
        return dq.Skip("found paid")

    row = due(order, declare(Order, handler, name="returns"))
    fire(row)
    assert (state(row), Effect.objects.count()) == (("skipped", "handler"), 1)


@pytest.mark.parametrize("value", [True, "skip", 0, Order, {"a": 1}, ValueError("returned")])
def test_other_values_are_ignored(order: Order, declare: Declare, value: Any) -> None:
    row = due(order, declare(Order, returning(value), name="returns"))
    assert fire(row).fired == (row.pk,)
    assert (state(row), row.reason) == (("fired", "due"), "")


@pytest.mark.parametrize("mode", MODES)
def test_more_snoozes_than_the_limit_end_in_dead(order: Order, declare: Declare, mode: str) -> None:
    limits = dq.Limits(snoozes=0)
    row = due(order, declare(Order, returning(dq.Snooze(minutes=1)), name="returns", limits=limits, **MODES[mode]))
    fire(row)
    assert (state(row), Effect.objects.count()) == (("dead", "limit"), 1)


def test_a_snooze_whose_handler_has_scheduled_the_next_round_gives_way_to_it(order: Order, declare: Declare) -> None:
    def handler(order: Order, timeout: Timeout) -> Any:
        dq.schedule_timeout(order, "returns", hours=1)
        return dq.Snooze(minutes=5)

    row = due(order, declare(Order, handler, name="returns"))
    fire(row)
    assert state(row) == ("skipped", "superseded")
    [newer] = dq.pending_timeouts(order, "returns")
    assert newer.pk > row.pk


@pytest.mark.parametrize("kind", ["skip", "snooze", "give up"])
def test_a_raised_outcome_undoes_the_work_and_one_warning_says_so(
    order: Order, declare: Declare, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    outcome, expected = OUTCOMES[kind]

    def handler(order: Order, timeout: Timeout) -> None:
        Effect.objects.create(what="undone")
        raise outcome

    policy = declare(Order, handler, name="raises")
    for each in (order, Order.objects.create()):
        row = due(each, policy)
        fire(row)
        assert (state(row), Effect.objects.count()) == (expected, 0)
    [line] = [each for each in caplog.records if vars(each).get("event") == "outcome_undoes"]
    name = type(outcome).__name__
    assert line.levelno == logging.WARNING
    assert f"testapp.order.raises has raised {name} after it had written" in line.getMessage()
    assert f"`return {name}(...)`" in line.getMessage()


@pytest.mark.parametrize("mode", ["alone", "outside"])
def test_there_is_no_warning_if_nothing_is_undone(
    order: Order, declare: Declare, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It has only read, or it runs outside a transaction, where what it wrote is committed."""

    def handler(order: Order, timeout: Timeout) -> None:
        if mode == "outside":
            Effect.objects.create(what="kept")
        order.refresh_from_db()
        raise dq.Skip("nothing to do")

    fire(due(order, declare(Order, handler, name="raises", **MODES[mode])))
    assert "outcome_undoes" not in [vars(each).get("event") for each in caplog.records]


@pytest.mark.parametrize("kind", OUTCOMES)
def test_what_was_returned_is_logged_and_signalled_after_the_commit(
    order: Order, declare: Declare, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    outcome, _ = OUTCOMES[kind]
    seen: list[tuple[bool, bool]] = []
    signals = {"skip": dq.timeout_skipped, "give up": dq.timeout_dead, "fired": dq.timeout_fired}
    all_signals = (dq.timeout_skipped, dq.timeout_dead, dq.timeout_fired, dq.timeout_failed)

    def note(signal: Any, **_: Any) -> None:
        seen.append((signals.get(kind) is signal, connection.in_atomic_block))

    for signal in all_signals:
        signal.connect(note)
    try:
        with caplog.at_level(logging.INFO):
            row = due(order, declare(Order, returning(outcome), name="returns"))
            fire(row)
    finally:
        for signal in all_signals:
            signal.disconnect(note)
    assert seen == ([] if kind == "snooze" else [(True, False)])
    events = [vars(each).get("event") for each in caplog.records if vars(each).get("timeout_id") == row.pk]
    names = {
        "skip": "timeout_skipped",
        "snooze": "timeout_snoozed",
        "give up": "timeout_dead",
        "fired": "timeout_fired",
    }
    assert events == [names[kind]]


@pytest.mark.parametrize("step", ["handled", "committed"])
def test_a_process_that_is_killed_keeps_work_and_outcome_or_neither(order: Order, declare: Declare, step: str) -> None:
    row = due(order, declare(Order, returning(dq.Skip("found paid")), name="returns"))
    killed_at(step, row)
    committed = step == "committed"
    assert (state(row), Effect.objects.count()) == ((("skipped", "handler"), 1) if committed else (("pending", ""), 0))


def test_a_snooze_that_cannot_be_computed_undoes_the_work(order: Order, declare: Declare) -> None:
    class Endless:
        def end(self, since: Any, obj: Any) -> Any:
            raise ValueError("never")

    row = due(order, declare(Order, returning(dq.Snooze(after=Endless())), name="returns", retry=dq.Retry([60])))
    fire(row)
    assert (state(row), row.attempts, Effect.objects.count()) == (("pending", ""), 1, 0)


def test_an_automatic_policy_whose_handler_found_the_payment_stays_settled(declare: Declare) -> None:
    """What rollbacks could not express: the payment is noted, and the round is closed with its reason."""

    def handler(order: Order, timeout: Timeout) -> Any:
        order.status = "paid"
        order.save()
        return dq.Skip("found paid at the provider")

    options: dict[str, Any] = {"when": Q(status="unpaid"), "since": "created_at", "after": timedelta(0)}
    policy = declare(Order, handler, name="automatic", **options)
    order = Order.objects.create(status="unpaid", created_at=timezone.now())
    [row] = dq.pending_timeouts(order, policy)
    fire(row)
    order.refresh_from_db()
    assert (order.status, state(row), row.reason) == ("paid", ("skipped", "handler"), "found paid at the provider")
