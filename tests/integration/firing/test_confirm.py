"""`confirm` asks before the handler is called: an answer decides, and without one nothing happens."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import Q

import django_delayq as dq
from django_delayq.firing import asking, handler
from django_delayq.firing import state as state_module
from tests.e2e.races.sessions import needs_row_locks
from tests.integration.firing.conftest import MODES, due, fire, in_another_thread, locking, make_due, state
from tests.integration.firing.handlers import WAIT, Declare, Patch, once_at, raising
from tests.integration.firing.limits import FAILED, LIMIT, RETRY, compute, overrun, sleep, threads_end
from tests.integration.firing.rows import FIRED, PENDING, UNTRIED, tried
from tests.integration.firing.test_outside import raise_busy
from tests.testapp.models import Order

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]


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
    ask = Provider(lambda: None if connection.in_atomic_block is False else "nothing is locked while it asks")
    row = due(order, asking_policy(ask, **MODES[mode]))
    assert fire(row).fired == (row.pk,)
    assert (state(row), status(order), ask.asked) == (FIRED, "cancelled", [order.pk])


def asynchronous(answer: Any) -> Any:
    async def ask(order: Order, timeout: Any) -> Any:
        await asyncio.sleep(0)
        return answer

    return ask


@pytest.mark.parametrize(
    ("way", "answer", "expected"),
    [
        (Provider, dq.Skip("found paid"), ("skipped", "handler")),
        (raising, dq.GiveUp("no such payment"), ("dead", "handler")),
        (asynchronous, dq.Snooze(minutes=5), PENDING),
    ],
    ids=["returned", "raised", "async"],
)
def test_an_outcome_as_answer_decides(order: Order, asking_policy: Any, way: Any, answer: Any, expected: Any) -> None:
    row = due(order, asking_policy(way(answer)))
    report = fire(row)
    assert (state(row), status(order), report.fired) == (expected, "unpaid", ())
    assert (row.reason, row.snoozes) == (("", 1) if expected == PENDING else (answer.reason, 0))


@pytest.mark.parametrize("lie", [ConnectionError("no route"), False, "paid", dq.Fired, SystemExit(1)])
def test_without_an_answer_it_is_asked_again_by_the_ladder(order: Order, asking_policy: Any, lie: Any) -> None:
    ask = Provider(lie)
    row = due(order, asking_policy(ask, retry=dq.Retry([60])))
    assert not fire(row).fired
    assert (tried(row), status(order)) == ((PENDING, 1), "unpaid")
    if not isinstance(lie, BaseException):
        assert "The confirm function of testapp.order.cancel returned" in row.errors[0]["message"]
    make_due(row)
    assert not fire(row).fired
    assert (tried(row), status(order), ask.asked) == ((("dead", "retries"), 2), "unpaid", [order.pk] * 2)


@pytest.mark.parametrize(("mode", "hang"), [("alone", compute), ("batch", sleep)])
def test_a_provider_that_hangs_is_abandoned(order: Order, asking_policy: Any, mode: str, hang: Any) -> None:
    row = due(order, asking_policy(Provider(hang), limit=LIMIT, **MODES[mode]))
    assert not fire(row).fired
    assert (overrun(row), status(order)) == (FAILED, "unpaid")
    assert "0.3 s" in row.errors[0]["message"]
    threads_end()


def test_a_late_answer_is_no_answer(order: Order, asking_policy: Any, declare: Declare) -> None:
    """A handler that fires others is itself in a firing, whose connections must not be cut."""
    row = due(order, asking_policy(Provider(lambda: time.sleep(2 * LIMIT.total_seconds())), limit=LIMIT))
    outer = due(Order.objects.create(), declare(Order, lambda order, timeout: fire(row), name="outer", atomic=False))
    fire(outer)
    assert (overrun(row), status(order)) == (FAILED, "unpaid")


def test_a_transient_error_while_asking_counts_no_attempt(order: Order, asking_policy: Any) -> None:
    row = due(order, asking_policy(Provider(raise_busy, None)))
    report = fire(row)
    assert (tried(row), [*report.again]) == (UNTRIED, [row.pk])
    assert fire(row).fired == (row.pk,)


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


@pytest.mark.parametrize("mode", ["alone", "outside"])
@pytest.mark.parametrize("step", STEPS)
def test_a_webhook_wins_or_learns_that_it_lost(order: Order, asking_policy: Any, mode: str, step: str) -> None:
    row, answers = due(order, asking_policy(Provider(None), **MODES[mode])), list[bool]()
    webhook = threading.Thread(target=lambda: answers.append(in_another_thread(lambda: paid(order.pk))))
    before = step in {"planned", "asked"} or (step == "begun" and connection.features.has_select_for_update)

    def come() -> None:
        webhook.start()
        if before:
            webhook.join(WAIT)  # nothing is locked: it commits before the firing continues

    once_at(step, come)
    fired = fire(row).fired
    webhook.join(WAIT)
    assert answers == [before]
    assert (bool(fired), status(order)) == ((False, "paid") if before else (True, "cancelled"))
    assert state(row) == (("cancelled", "hand") if before else FIRED)


@needs_row_locks
@pytest.mark.dialect
def test_an_answer_serves_again_while_another_transaction_locks_the_object(order: Order, asking_policy: Any) -> None:
    ask = Provider(None, dq.Skip("asked twice"))
    row = due(order, asking_policy(ask))
    with locking(order):
        assert fire(row).again
    assert (fire(row).fired, ask.asked) == ((row.pk,), [order.pk])


def test_an_old_answer_is_no_answer(order: Order, asking_policy: Any, monkeypatch: Patch) -> None:
    row = due(order, asking_policy(Provider(None)))
    once_at("asked", lambda: monkeypatch.setattr(state_module, "ANSWER_SECONDS", 0.0))
    assert not fire(row).fired
    assert (tried(row), status(order)) == (UNTRIED, "unpaid")
    monkeypatch.undo()
    assert fire(row).fired == (row.pk,)


def test_each_attempt_of_the_handler_asks_anew(order: Order, declare: Declare) -> None:
    policy, ask = declare(Order, raising(ValueError(), None), name="fails", retry=dq.Retry([0])), Provider(None)
    policy.confirm()(ask)
    row = due(order, policy)
    assert not fire(row).fired
    assert (fire(row).fired, ask.asked) == ((row.pk,), [order.pk] * 2)


def test_what_cannot_fire_is_not_asked_about(asking_policy: Any, declare: Declare) -> None:
    ask = Provider(None)
    policy = asking_policy(ask)
    paid_order, gone, moved = (Order.objects.create(status="unpaid") for _ in range(3))
    rows = [due(each, policy) for each in (paid_order, gone, moved)]
    Order.objects.filter(pk=paid_order.pk).update(status="paid")
    Order.objects.filter(pk=gone.pk)._raw_delete("default")

    once_at("planned", lambda: dq.extend_timeout(moved, policy, hours=1))
    fire(*rows)
    assert [state(row) for row in rows] == [("skipped", "condition"), ("skipped", "gone"), ("pending", "")]
    assert ask.asked == []


def test_an_object_that_matches_only_when_it_is_locked_is_asked_about_first(order: Order, asking_policy: Any) -> None:
    """Between the question, which it did not need, and the lock its payment failed."""
    ask = Provider(None)
    row = due(order, asking_policy(ask))
    Order.objects.update(status="paying")
    once_at("begun", lambda: Order.objects.update(status="unpaid"))
    assert not fire(row).fired
    assert (state(row), ask.asked) == (("pending", ""), [])
    assert fire(row).fired == (row.pk,)
    assert ask.asked == [order.pk]


@pytest.mark.parametrize("mode", ["batch", "together"])
@pytest.mark.parametrize("is_long", [False, True])
def test_members_are_asked_about_for_a_limited_time(
    orders: list[Order], asking_policy: Any, mode: str, monkeypatch: Patch, is_long: bool
) -> None:
    """The first answers would be too old when the last one comes."""
    if is_long:
        monkeypatch.setattr(asking, "ASKING_SECONDS", 0.0)
    answers = {order.pk: answer for order, answer in zip(orders, [None, dq.Skip("paid"), None, 1, None], strict=True)}
    policy = asking_policy(lambda order, timeout: answers[order.pk], **MODES[mode])
    rows = [due(each, policy) for each in orders]
    report = fire(*rows)
    states = ["fired", *["pending"] * 4] if is_long else ["fired", "skipped", "fired", "pending", "fired"]
    assert [state(row)[0] for row in rows] == states
    assert set(report.fired) == {row.pk for row in rows if row.state == "fired"}
    assert [status(order) == "cancelled" for order in orders] == [each == "fired" for each in states]
    assert [row.attempts for row in rows] == ([1, 0, 0, 0, 0] if is_long else [1] * 5)


def test_shadow_mode_asks_and_does_not_act(order: Order, asking_policy: Any) -> None:
    ask = Provider(None)
    row = due(order, asking_policy(ask, shadow=True))
    fire(row)
    assert (state(row), status(order), ask.asked) == (("skipped", "shadow"), "unpaid", [order.pk])


@pytest.mark.parametrize(
    ("function", "limit", "words"),
    [
        (lambda order: None, timedelta(seconds=1), r"is called with \(obj, timeout\)"),
        (Provider, timedelta(seconds=1), "is a class"),
        (None, timedelta(seconds=1), "needs a function"),
        (lambda order, timeout: None, 10, "timeout must be a timedelta"),
        (lambda order, timeout: None, timedelta(0), "timeout must"),
        (lambda order, timeout: None, timedelta(seconds=1), "has a confirm function already"),
    ],
)
def test_a_wrong_confirm_is_refused(declare: Declare, function: Any, limit: Any, words: str) -> None:
    policy = declare(Order, name="asks")
    if "already" in words:
        policy.confirm()(function)
    with pytest.raises(dq.PolicyError, match=words):
        policy.confirm(timeout=limit)(function)
