"""`confirm` asks before the handler is called: an answer decides, and without one nothing happens."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection, connections
from django.db.models import Q

import django_delayq as dq
from django_delayq import operations, testing
from django_delayq.exceptions import TimeLimitExceeded
from django_delayq.firing import asking, handler
from django_delayq.firing import state as state_module
from django_delayq.firing.handler import set_checkpoint_hook
from django_delayq.firing.state import firing_state
from django_delayq.ledger.controls import stop_cache
from tests.integration.firing.conftest import MODES, die_at, due, fire, in_another_thread, locking, make_due, state
from tests.integration.firing.limits import compute, overrun, sleep
from tests.integration.firing.test_crashes import killed_at
from tests.support.waiting import wait_until
from tests.testapp.models import Order

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]
Declare = Callable[..., dq.TimeoutPolicy[Any]]
LIMIT = timedelta(milliseconds=300)
RETRY = dq.Retry([3600])


class Provider:
    """A provider with given answers: with a value, by raising, or by calling a function."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked = list(answers), list[int]()

    def __call__(self, order: Order, timeout: Any) -> Any:
        self.asked.append(order.pk)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer() if callable(answer) and not isinstance(answer, type) else answer


def cancel(target: Any, timeouts: Any) -> None:
    for order in target if hasattr(target, "update") else [target]:
        Order.objects.filter(pk=order.pk).update(status="cancelled")


@pytest.fixture
def asking_policy(declare: Declare) -> Callable[..., dq.TimeoutPolicy[Any]]:
    def make(ask: Any, *, limit: timedelta = timedelta(seconds=60), **options: Any) -> dq.TimeoutPolicy[Any]:
        policy = declare(Order, cancel, name="cancel", **{"retry": RETRY, "when": Q(status="unpaid"), **options})
        policy.confirm(timeout=limit)(ask)
        return policy

    return make


def status(order: Order) -> str:
    order.refresh_from_db()
    return order.status


@pytest.mark.parametrize("mode", MODES)
def test_the_handler_runs_if_the_answer_is_none(order: Order, asking_policy: Any, mode: str) -> None:
    ask = Provider(None)
    row = due(order, asking_policy(ask, **MODES[mode]))
    assert fire(row).fired == (row.pk,)
    assert (state(row), status(order), ask.asked) == (("fired", "due"), "cancelled", [order.pk])


@pytest.mark.parametrize("by", ["return", "raise", "class", "async"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "given",
    [
        (dq.Skip("found paid"), ("skipped", "handler")),
        (dq.Snooze(minutes=5), ("pending", "")),
        (dq.GiveUp("no such payment"), ("dead", "handler")),
    ],
)
def test_an_outcome_as_answer_decides(order: Order, asking_policy: Any, mode: str, by: str, given: Any) -> None:
    answer, expected = given
    if by == "class" and isinstance(answer, dq.Snooze):
        pytest.skip("a snooze needs a delay")
    as_given: Any = (lambda: raising(answer)) if by == "raise" else type(answer) if by == "class" else answer

    async def asynchronous(order: Order, timeout: Any) -> Any:
        await asyncio.sleep(0)
        return answer

    row = due(order, asking_policy(asynchronous if by == "async" else Provider(as_given), **MODES[mode]))
    report = fire(row)
    assert (state(row), status(order), report.fired) == (expected, "unpaid", ())
    assert row.reason == ("" if by == "class" or expected[0] == "pending" else answer.reason)
    assert row.snoozes == (expected[0] == "pending")


def raising(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lie", [ConnectionError("no route"), True, False, "paid", dq.Fired, SystemExit(1)])
def test_without_an_answer_nothing_happens_and_it_is_asked_again_by_the_ladder(
    order: Order, asking_policy: Any, mode: str, lie: Any
) -> None:
    ask = Provider(lie)
    row = due(order, asking_policy(ask, retry=dq.Retry([60]), **MODES[mode]))
    assert not fire(row).fired
    assert (state(row), row.attempts, status(order)) == (("pending", ""), 1, "unpaid")
    make_due(row)
    assert not fire(row).fired
    assert (state(row), row.attempts, status(order)) == (("dead", "retries"), 2, "unpaid")
    assert ask.asked == [order.pk] * 2


@pytest.mark.parametrize("hang", [compute, sleep])
@pytest.mark.parametrize("mode", MODES)
def test_a_provider_that_hangs_is_abandoned(order: Order, asking_policy: Any, mode: str, hang: Any) -> None:
    row = due(order, asking_policy(Provider(hang), limit=LIMIT, **MODES[mode]))
    assert not fire(row).fired
    assert overrun(row) == ("pending", 1, "TimeLimitExceeded")
    assert status(order) == "unpaid"
    assert "0.3 s" in row.errors[0]["message"]
    wait_until(lambda: firing_state.stuck_threads == 0, "the thread that asked has ended")


def test_the_handler_keeps_its_own_limit(order: Order, declare: Declare) -> None:
    limits = dq.Limits(run=LIMIT)
    policy = declare(Order, lambda order, timeout: sleep(), name="slow", limits=limits, retry=RETRY)
    policy.confirm(timeout=timedelta(seconds=60))(Provider(lambda: time.sleep(2 * LIMIT.total_seconds())))
    row = due(order, policy)
    fire(row)
    assert overrun(row) == ("pending", 1, "TimeLimitExceeded")
    assert "cancel" not in row.errors[0]["message"]


def test_an_answer_that_comes_too_late_is_none_where_nothing_can_be_abandoned(
    order: Order, asking_policy: Any, declare: Declare
) -> None:
    """A handler that fires others is itself in a firing, whose connections must not be cut."""
    row = due(order, asking_policy(Provider(lambda: time.sleep(2 * LIMIT.total_seconds())), limit=LIMIT))
    outer = due(Order.objects.create(), declare(Order, lambda order, timeout: fire(row), name="outer", atomic=False))
    fire(outer)
    assert overrun(row) == ("pending", 1, "TimeLimitExceeded")
    assert status(order) == "unpaid"


def test_a_transient_error_while_asking_counts_no_attempt(order: Order, asking_policy: Any) -> None:
    class Deadlock(Exception):
        sqlstate, args = "40P01", (1213, "Deadlock found")

    error = OperationalError(1213, "database is locked")
    error.__cause__ = Deadlock()
    row = due(order, asking_policy(Provider(error, None)))
    report = fire(row)
    assert (state(row), row.attempts, [*report.again]) == (("pending", ""), 0, [row.pk])
    assert fire(row).fired == (row.pk,)


def test_nothing_is_locked_while_it_asks(order: Order, asking_policy: Any) -> None:
    """So a payment that arrives meanwhile does not wait, and wins."""

    def pay() -> None:
        assert not connection.in_atomic_block
        in_another_thread(lambda: paid(order.pk))

    row = due(order, asking_policy(Provider(pay)))
    assert not fire(row).fired
    assert (state(row), status(order)) == (("cancelled", "hand"), "paid")


def paid(pk: int) -> bool:
    """The webhook: return False if the money must be returned."""
    order = Order.objects.get(pk=pk)
    try:
        with dq.before_deadline(order, "cancel", waiting=True):
            order.status = "paid"
            order.save()
    except (dq.DeadlinePassed, dq.NotWaiting):
        return False
    return True


STEPS = [step for step in handler.CHECKPOINTS if step not in {"noted", "undone", "recorded", "settled"}]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("step", STEPS)
def test_a_webhook_at_each_step_wins_or_learns_that_it_has_lost(
    order: Order, asking_policy: Any, mode: str, step: str
) -> None:
    row, answers, threads = due(order, asking_policy(Provider(None), **MODES[mode])), list[bool](), list[Any]()

    def webhook() -> None:
        try:
            answers.append(paid(order.pk))
        finally:
            connections.close_all()

    def come(reached: str) -> None:
        if reached == step and not threads:
            threads.append(threading.Thread(target=webhook))
            threads[0].start()
            if step in {"planned", "asked"} or (step == "begun" and connection.features.has_select_for_update):
                threads[0].join(60)  # nothing is locked: it commits before the firing continues

    set_checkpoint_hook(come)
    fired = fire(row).fired
    set_checkpoint_hook(None)
    threads[0].join(60)
    before = step in {"planned", "asked"} or (step == "begun" and connection.features.has_select_for_update)
    assert answers == [before]
    assert (bool(fired), status(order)) == ((False, "paid") if before else (True, "cancelled"))
    assert state(row) == (("cancelled", "hand") if before else ("fired", "due"))


@pytest.mark.parametrize("step", ["asked", "marked", "handled"])
def test_a_process_that_is_killed_after_the_answer_asks_again(order: Order, asking_policy: Any, step: str) -> None:
    ask = Provider(None)
    row = due(order, asking_policy(ask))
    killed_at(step, row)
    assert (state(row), row.attempts) == (("pending", ""), 0)
    assert fire(row, deliveries=2).fired == (row.pk,)
    assert ask.asked == [order.pk], "the other process had its own"


@pytest.mark.dialect
def test_an_answer_serves_again_while_another_transaction_locks_the_object(order: Order, asking_policy: Any) -> None:
    if not connection.features.has_select_for_update:
        pytest.skip("SQLite has no row locks: a writer holds the whole database")
    ask = Provider(None, dq.Skip("asked twice"))
    row = due(order, asking_policy(ask))
    with locking(order):
        assert fire(row).again
    assert fire(row).fired == (row.pk,)
    assert ask.asked == [order.pk]


def test_an_old_answer_is_no_answer(order: Order, asking_policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Provider(None, None)
    row = due(order, asking_policy(ask))

    def wait(reached: str) -> None:
        if reached == "asked" and len(ask.asked) == 1:
            monkeypatch.setattr(state_module, "ANSWER_SECONDS", 0.0)

    set_checkpoint_hook(wait)
    assert not fire(row).fired
    assert (state(row), row.attempts, status(order)) == (("pending", ""), 0, "unpaid")
    monkeypatch.undo()
    assert fire(row).fired == (row.pk,)


def test_each_attempt_of_the_handler_asks_anew(order: Order, declare: Declare) -> None:
    failures = [ValueError("first")]

    def handler(order: Order, timeout: Any) -> None:
        if failures:
            raise failures.pop()

    policy, ask = declare(Order, handler, name="fails", retry=dq.Retry([0])), Provider(None)
    policy.confirm()(ask)
    row = due(order, policy)
    assert not fire(row).fired
    assert fire(row).fired == (row.pk,)
    assert ask.asked == [order.pk] * 2


def test_what_cannot_fire_is_not_asked_about(asking_policy: Any, declare: Declare) -> None:
    ask = Provider(None)
    policy = asking_policy(ask)
    paid_order, gone, moved = (Order.objects.create(status="unpaid") for _ in range(3))
    rows = [due(each, policy) for each in (paid_order, gone, moved)]
    Order.objects.filter(pk=paid_order.pk).update(status="paid")
    Order.objects.filter(pk=gone.pk)._raw_delete("default")

    def move(reached: str) -> None:
        if reached == "planned":
            dq.extend_timeout(moved, policy, hours=1)

    set_checkpoint_hook(move)
    fire(*rows)
    set_checkpoint_hook(None)
    assert [state(row) for row in rows] == [("skipped", "condition"), ("skipped", "gone"), ("pending", "")]
    assert ask.asked == []


def test_an_object_that_matches_only_when_it_is_locked_is_asked_about_first(order: Order, asking_policy: Any) -> None:
    """Between the question, which it did not need, and the lock its payment failed."""
    ask = Provider(None)
    row = due(order, asking_policy(ask))
    Order.objects.update(status="paying")

    def fail(reached: str) -> None:
        if reached == "begun":
            Order.objects.update(status="unpaid")

    set_checkpoint_hook(fail)
    assert not fire(row).fired
    set_checkpoint_hook(None)
    assert (state(row), ask.asked) == (("pending", ""), [])
    assert fire(row).fired == (row.pk,)
    assert ask.asked == [order.pk]


@pytest.mark.parametrize("mode", ["batch", "together"])
def test_each_member_is_asked_about(orders: list[Order], asking_policy: Any, mode: str) -> None:
    answers = {order.pk: answer for order, answer in zip(orders, [None, dq.Skip("paid"), None, 1, None], strict=True)}
    policy = asking_policy(lambda order, timeout: answers[order.pk], **MODES[mode])
    rows = [due(each, policy) for each in orders]
    assert set(fire(*rows).fired) == {rows[0].pk, rows[2].pk, rows[4].pk}
    assert [state(row)[0] for row in rows] == ["fired", "skipped", "fired", "pending", "fired"]
    assert [status(order) for order in orders] == ["cancelled", "unpaid", "cancelled", "unpaid", "cancelled"]


@pytest.mark.parametrize("mode", ["batch", "together"])
def test_a_work_that_asks_for_long_fires_what_is_answered(
    orders: list[Order], asking_policy: Any, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first answers would be too old when the last one comes."""
    monkeypatch.setattr(asking, "ASKING_SECONDS", 0.0)
    policy = asking_policy(Provider(None), **MODES[mode])
    rows = [due(each, policy) for each in orders]
    report = fire(*rows)
    assert report.fired == (rows[0].pk,)
    assert set(report.again) == {row.pk for row in rows[1:]}
    assert {row.attempts for row in rows if state(row)[0] == "pending"} == {0}


def test_shadow_mode_asks_and_does_not_act(order: Order, asking_policy: Any) -> None:
    ask = Provider(None)
    row = due(order, asking_policy(ask, shadow=True))
    fire(row)
    assert (state(row), status(order), ask.asked) == (("skipped", "shadow"), "unpaid", [order.pk])


def test_a_suspect_asks_alone_in_its_process(order: Order, asking_policy: Any) -> None:
    ask = Provider(None)
    row = due(order, asking_policy(ask))
    assert fire(row, deliveries=2).fired == (row.pk,)
    assert ask.asked == [order.pk]


def test_a_process_that_dies_while_asking_is_noted(order: Order, asking_policy: Any) -> None:
    row = due(order, asking_policy(Provider(None)))
    die_at(row, "asked")
    assert (state(row), row.attempts) == (("pending", ""), 0)
    assert fire(row, deliveries=2).fired == (row.pk,)


@pytest.mark.parametrize("kind", ["fire_due", "perform"])
def test_tests_ask_too(order: Order, asking_policy: Any, kind: str) -> None:
    ask = Provider(ConnectionError("no route"), dq.Skip("paid"), None)
    policy = asking_policy(ask, retry=dq.Retry([0, 0]))
    due(order, policy)
    act = testing.fire_due if kind == "fire_due" else lambda: testing.perform(policy, order)
    with pytest.raises(ConnectionError):
        act()
    act()
    assert status(order) == "unpaid"
    testing.perform(policy, order)
    assert (status(order), len(ask.asked)) == ("cancelled", 3)


def test_a_paused_policy_asks_nobody(order: Order, asking_policy: Any) -> None:
    ask = Provider(None)
    policy = asking_policy(ask)
    row = due(order, policy)
    operations.pause(policy, by="script:test")
    stop_cache.forget()
    fire(row)
    assert (state(row), ask.asked) == (("pending", ""), [])


@pytest.mark.parametrize(
    ("function", "limit", "words"),
    [
        (lambda order: None, timedelta(seconds=1), r"is called with \(obj, timeout\)"),
        (Provider, timedelta(seconds=1), "is a class"),
        (None, timedelta(seconds=1), "needs a function"),
        (lambda order, timeout: None, 10, "timeout must be a timedelta"),
        (lambda order, timeout: None, timedelta(0), "timeout must"),
    ],
)
def test_a_wrong_confirm_is_refused(declare: Declare, function: Any, limit: Any, words: str) -> None:
    with pytest.raises(dq.PolicyError, match=words):
        declare(Order, name="asks").confirm(timeout=limit)(function)


def test_a_policy_has_one_confirm_function(declare: Declare) -> None:
    policy = declare(Order, name="asks")
    policy.confirm()(lambda order, timeout: None)
    with pytest.raises(dq.PolicyError, match="has a confirm function already"):
        policy.confirm()(lambda order, timeout: None)


def test_the_error_says_whose_answer_was_wrong(order: Order, asking_policy: Any) -> None:
    row = due(order, asking_policy(Provider(False)))
    fire(row)
    state(row)
    assert "The confirm function of testapp.order.cancel returned bool" in row.errors[0]["message"]
    assert TimeLimitExceeded.__name__ not in row.errors[0]["error"]
