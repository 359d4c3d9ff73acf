"""The last line of a worker counts timeouts, each once and by its last outcome, however often it was tried."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

import django_delayq as dq
from django_delayq.firing import planning
from django_delayq.models import Timeout
from django_delayq.worker import Worker
from django_delayq.worker import dispatch as dispatching
from tests.support.workers import due_orders, states
from tests.testapp.models import Order

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("source")]
NAMES = ("fired", "skipped_or_dead", "settled_before", "to_be_tried_again")


@pytest.fixture
def summary(caplog: pytest.LogCaptureFixture) -> Callable[[], dict[str, int]]:
    """`summary()` runs a burst and returns the numbers of its last line."""

    def run() -> dict[str, int]:
        with caplog.at_level(logging.INFO, "django_delayq.worker"):
            Worker(burst=True, concurrency=1).run()
        [*_, line] = [each for each in caplog.records if vars(each).get("event") == "worker_stopped"]
        numbers = {name: vars(line)[name] for name in NAMES}
        for name, number in numbers.items():
            assert (f"{number} {name.replace('_', ' ')}" in line.getMessage()) == bool(number)
        return numbers

    return run


def failing_until(number: int, delay: float) -> tuple[Callable[..., None], dq.Retry]:
    tried = Counter[int]()

    def handler(_: Order, timeout: Any) -> None:
        tried[timeout.pk] += 1
        if tried[timeout.pk] < number:
            raise LookupError("not yet")

    return handler, dq.Retry([delay] * 5)


@pytest.mark.parametrize("options", [{}, {"atomic": False}])
def test_two_timeouts_of_which_each_failed_three_times_are_two(
    declare: Any, summary: Callable[[], dict[str, int]], options: dict[str, Any]
) -> None:
    handler, retry = failing_until(4, 0)
    due_orders(declare(Order, handler, name="slow_to_succeed", retry=retry, **options), 2)
    assert summary() == {"fired": 2, "skipped_or_dead": 0, "settled_before": 0, "to_be_tried_again": 0}


def test_those_whose_next_attempt_is_later_are_counted_once(
    declare: Any, summary: Callable[[], dict[str, int]]
) -> None:
    handler, _ = failing_until(9, 0)
    due_orders(declare(Order, handler, name="fails", retry=dq.Retry([0, 0, timedelta(hours=1)])), 2)
    due_orders("remind", 3)
    assert summary() == {"fired": 3, "skipped_or_dead": 0, "settled_before": 0, "to_be_tried_again": 2}
    assert states() == {"fired": 3, "pending": 2}


def test_what_had_fired_before_is_neither_skipped_nor_dead(
    declare: Any, summary: Callable[[], dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a commit whose answer was lost: the timeout is delivered again."""
    rows = due_orders(declare(Order, name="redelivered"), 3)
    at = timezone.now()
    plan = planning.plan

    def then_settled(*args: Any, **options: Any) -> Any:
        found = plan(*args, **options)
        Timeout.objects.filter(pk=rows[0].pk).update(
            state="fired", cause="due", settled_at=at, slot_taken=None, attempts=1
        )
        return found

    monkeypatch.setattr(dispatching, "plan", then_settled)
    assert summary() == {"fired": 2, "skipped_or_dead": 0, "settled_before": 1, "to_be_tried_again": 0}
    assert states() == {"fired": 3}


def test_a_worker_that_runs_for_months_keeps_few_ids(
    declare: Any, summary: Callable[[], dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatching, "MAX_LOST", 2)
    handler, retry = failing_until(9, 3600)
    due_orders(declare(Order, handler, name="fails", retry=retry), 5)
    assert summary()["to_be_tried_again"] == 5
