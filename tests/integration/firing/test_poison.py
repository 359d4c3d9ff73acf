"""Poison: a timeout that kills its process ends `dead`; the others of its batch fire, with no attempt counted."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import F, Q
from django.utils import timezone

import django_delayq as dq
from django_delayq import operations
from django_delayq.firing import plan, run
from django_delayq.firing.handler import set_checkpoint_hook
from django_delayq.models import Timeout
from tests.integration.firing.conftest import due, fire, locking, make_due, needs_row_locks, state
from tests.testapp.models import Effect, Order

pytestmark = pytest.mark.django_db(transaction=True)
Declare = Callable[..., dq.TimeoutPolicy[Any]]


def die_in_handler(*rows: Timeout, deliveries: int) -> None:
    """The process of the firing of `rows` is gone before the first handler's work is committed."""

    def look(step: str) -> None:
        if step == "handled":
            raise KeyboardInterrupt

    works, _ = plan({row.pk: deliveries for row in rows}, "default")
    set_checkpoint_hook(look)
    for work in works:
        with pytest.raises(KeyboardInterrupt):
            run(work, "default")
    set_checkpoint_hook(None)
    died = Timeout.objects.filter(pk__in=[row.pk for row in rows])
    died.update(suspected_at=F("suspected_at") - timedelta(days=1))  # and its lease has ended


def test_a_suspect_is_fired_alone_and_that_is_noted_before_it_runs(
    orders: list[Order], declare: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[int] = []
    begun: list[tuple[str, int]] = []
    policy = declare(Order, lambda obj, timeout: seen.append(timeout.attempts), name="watched")
    rows = [due(order, policy) for order in orders]
    noted = Timeout.objects.filter(suspected_at__isnull=False)
    set_checkpoint_hook(lambda step: begun.append((step, noted.count())) if step in {"noted", "begun"} else None)
    fire(*rows, deliveries=2)
    assert seen == [1] * 5
    assert begun == [("noted", 1), ("begun", 1)] * 5 and not noted.exists(), "what has fired is under no suspicion"
    logged = [each for each in caplog.records if vars(each).get("event") == "timeout_suspected"]
    assert [vars(each)["timeout_id"] for each in logged] == [rows[0].pk], "the others are not a warning each"
    words = f"Timeout {rows[0].pk} ({policy.label}, object {orders[0].pk}) was held by a worker that died"
    assert logged[0].levelname == "WARNING" and logged[0].getMessage().startswith(words)
    assert {(state(row), row.attempts, row.deaths, len(row.history)) for row in rows} == {(("fired", "due"), 1, 0, 0)}


def test_a_first_delivery_charges_nobody(orders: list[Order]) -> None:
    rows = [due(order) for order in orders]
    die_in_handler(*rows, deliveries=1)
    assert {(state(row), row.attempts, len(row.history)) for row in rows} == {(("pending", ""), 0, 0)}


def test_a_killer_ends_dead_and_its_history_says_why(order: Order, declare: Declare) -> None:
    dead: list[int] = []
    row = due(order, declare(Order, name="killer", retry=dq.Retry([0, 0])))
    die_in_handler(row, deliveries=1)
    for delivery in (2, 3, 4):
        die_in_handler(row, deliveries=delivery)
        state(row)
        assert (row.attempts, row.deaths) == (0, delivery - 2)
    receiver = lambda timeout, **_: dead.append(timeout.pk)  # noqa: E731 - a weak reference needs a name
    dq.timeout_dead.connect(receiver)
    try:
        assert fire(row, deliveries=5).done == (row.pk,)
    finally:
        dq.timeout_dead.disconnect(receiver)
    assert (state(row), row.attempts, row.deaths, dead) == (("dead", "retries"), 0, 3, [row.pk])
    assert [(event["what"], event["number"]) for event in row.history] == [
        ("suspected", number) for number in (1, 2, 3)
    ]
    assert row.reason == "The process died 3 times while this timeout ran alone in it."
    assert "suspected of killing a worker, death 2" in str(dq.explain_timeout(order, "killer"))


def test_an_operator_who_retries_a_killer_gives_it_three_more_deaths(order: Order, declare: Declare) -> None:
    row = due(order, declare(Order, name="killer", retry=dq.Retry.never()))
    for _ in range(3):
        die_in_handler(row, deliveries=2)
    fire(row, deliveries=2)
    assert state(row) == ("dead", "retries")
    operations.retry(row, by="test")
    for deaths in (0, 1, 2):
        die_in_handler(row, deliveries=2)
        assert (state(row), row.deaths) == (("pending", ""), deaths)
    fire(row, deliveries=2)
    assert state(row) == ("dead", "retries")


def test_what_its_process_died_of_alone_stays_alone_although_redis_has_forgotten_its_deliveries(
    order: Order, declare: Declare
) -> None:
    row = due(order, declare(Order, name="killer"))
    die_in_handler(row, deliveries=2)
    assert [work.suspect for work in plan({row.pk: 1}, "default")[0]] == [True]
    die_in_handler(row, deliveries=1)
    Timeout.objects.update(suspected_at=None)  # it could not run, for example because its object was locked
    assert [work.suspect for work in plan({row.pk: 1}, "default")[0]] == [True]


def test_a_killer_without_any_retry_ends_dead(order: Order, declare: Declare) -> None:
    row = due(order, declare(Order, name="killer", retry=dq.Retry.never()))
    die_in_handler(row, deliveries=1)
    for _ in range(3):
        die_in_handler(row, deliveries=2)
    fire(row, deliveries=3)
    assert (state(row), row.attempts) == (("dead", "retries"), 0)


def test_innocents_that_a_killer_took_along_fire_with_one_attempt(orders: list[Order], declare: Declare) -> None:
    policy = declare(Order, lambda obj, timeout: Effect.objects.create(what="x", object_id=obj.pk), name="near")
    rows = [due(order, policy) for order in orders]
    die_in_handler(*rows, deliveries=1)
    fire(*rows, deliveries=2)
    assert {(state(row), row.attempts) for row in rows} == {(("fired", "due"), 1)}
    assert Effect.objects.count() == 5


def test_a_failure_of_a_suspect_counts_as_one_attempt(order: Order, declare: Declare) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        raise ValueError

    row = due(order, declare(Order, handler, name="fails", retry=dq.Retry([0, 0])))
    for attempts in (1, 2):
        fire(row, deliveries=2)
        assert (state(row), row.attempts, row.errors[-1]["attempt"]) == (("pending", ""), attempts, attempts)
    fire(row, deliveries=2)
    assert (state(row), row.attempts, len(row.errors)) == (("dead", "retries"), 3, 3)


@pytest.mark.parametrize("error", [dq.Snooze(minutes=5), dq.Skip(), dq.GiveUp()])
def test_outcomes_of_a_suspect_count_as_those_of_anybody(order: Order, declare: Declare, error: Exception) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        raise error

    row = due(order, declare(Order, handler, name="outcomes"))
    fire(row, deliveries=2)
    state(row)
    assert row.attempts == (0 if isinstance(error, dq.Snooze) else 1)


@pytest.mark.dialect
@needs_row_locks
def test_a_suspect_whose_object_is_held_dies_of_nothing(order: Order) -> None:
    row = due(order)
    with locking(order):
        for _ in range(15):  # more often than the ladder has steps
            assert list(fire(row, deliveries=2).again) == [row.pk]
            state(row)
            assert (row.attempts, row.deaths, row.suspected_at) == (0, 0, None)
    assert fire(row, deliveries=2).fired


@pytest.mark.dialect
@needs_row_locks
def test_a_suspect_whose_row_is_held_is_put_back(order: Order) -> None:
    row = due(order)
    with locking(row):
        assert list(fire(row, deliveries=2).again) == [row.pk]
    assert (state(row), row.attempts) == (("pending", ""), 0)


def test_suspects_that_need_not_run_are_not_noted(declare: Declare) -> None:
    policy = declare(Order, name="unmet", when=Q(status="unpaid"))
    later = dq.schedule_timeout(Order.objects.create(), policy, minutes=5)
    fired = due(Order.objects.create(), policy)
    fire(fired)
    cancelled = due(Order.objects.create(), policy)
    dq.cancel_timeout(cancelled)
    report = fire(later, fired, cancelled, deliveries=7)
    assert (sorted(report.done), list(report.again)) == ([fired.pk, cancelled.pk], [later.pk])
    assert [one.attempts for one in Timeout.objects.order_by("id")] == [0, 1, 0]


def test_a_suspect_that_is_moved_between_plan_and_note_is_not_noted(order: Order) -> None:
    row = due(order)
    [work], _ = plan({row.pk: 2}, "default")
    dq.reschedule_timeout(order, "remind", minutes=5)
    assert run(work, "default").again[row.pk] - timezone.now() > timedelta(minutes=4)
    assert (state(row), row.attempts) == (("pending", ""), 0)
    make_due(row)
    assert fire(row).fired
