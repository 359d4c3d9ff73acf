"""Rows of policies that are not declared here come back ever more slowly, and are left to workers that know them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from django_delayq import TimeoutPolicy
from django_delayq.firing import plan, run
from django_delayq.firing import state as module
from django_delayq.firing.state import firing_state
from django_delayq.firing.work import Work
from django_delayq.models import Timeout
from django_delayq.policies import registry
from django_delayq.redis_clients import get_worker_engine
from django_delayq.worker.servers import ClockSkew
from django_delayq.worker.sources.ledger import LedgerSource
from django_delayq.worker.sources.redis import HANDICAP_SECONDS, RedisSource
from django_delayq.worker.sweep import Sweep
from tests.support.lines import remove_ids
from tests.support.workers import due_orders
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
Declare = Callable[..., TimeoutPolicy[Any]]


@pytest.fixture
def policy(declare: Declare) -> TimeoutPolicy[Any]:
    """Declared while its rows are made, and not any more when the test begins to work with them."""
    return declare(Order, name="new")


@pytest.fixture
def stranger(policy: TimeoutPolicy[Any]) -> Timeout:
    [row] = due_orders(policy)
    registry.remove(policy)
    return row


def pause_of(row: Timeout) -> float:
    works, report = plan({row.pk: 1}, "default")
    assert works == []
    assert report.now is not None
    return (report.again[row.pk] - report.now).total_seconds()


def test_a_row_comes_back_after_1_2_4_up_to_60_seconds(stranger: Timeout) -> None:
    assert [pause_of(stranger) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_a_row_that_is_met_for_the_first_time_comes_back_after_a_second(policy: TimeoutPolicy[Any]) -> None:
    first, second = due_orders(policy, 2)
    registry.remove(policy)
    for _ in range(5):
        pause_of(first)
    assert pause_of(second) == 1


def test_a_work_whose_policy_is_not_declared_where_it_runs_comes_back_after_a_second(stranger: Timeout) -> None:
    report = run(Work(stranger.policy, (stranger.pk,), (stranger.object_id,)), "default")
    assert report.again[stranger.pk] - timezone.now() < timedelta(seconds=1.5)


def test_what_was_met_is_forgotten_when_the_policy_is_declared(stranger: Timeout, policy: TimeoutPolicy[Any]) -> None:
    pause_of(stranger)
    pause_of(stranger)
    registry.add(policy)
    assert firing_state.unknown.labels() == []
    assert plan({stranger.pk: 1}, "default")[0] != []
    registry.remove(policy)
    assert pause_of(stranger) == 1


def test_with_very_many_rows_the_others_come_back_after_a_minute(
    stranger: Timeout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_UNKNOWN_ROWS", 1)
    firing_state.unknown.again_at("testapp.order.other", stranger.pk + 1, timezone.now())
    assert pause_of(stranger) == 60


def test_without_redis_a_worker_claims_no_more_rows_of_a_label_that_it_has_met(stranger: Timeout) -> None:
    poll = LedgerSource("default", None, ClockSkew("default"))
    assert poll.take_now(10).deliveries == {stranger.pk: 1}
    again = plan({stranger.pk: 1}, "default")[1].again
    poll.resolve((), again)
    poll.flush()
    Timeout.objects.update(claimed_until=None)
    [known] = due_orders("remind")
    assert poll.take_now(10).deliveries == {known.pk: 1}


@pytest.mark.usefixtures("with_redis")
def test_a_worker_that_has_met_one_looks_later_than_others(stranger: Timeout) -> None:
    engine = get_worker_engine("default")
    assert engine is not None
    transfer = RedisSource(engine, ["default"], ClockSkew("default"))
    assert transfer.take(10).deliveries == {stranger.pk: 1}
    pause_of(stranger)
    transfer.check_now()
    taken = transfer.take(10)
    assert taken.deliveries == {}
    assert 0 < taken.wait_seconds <= HANDICAP_SECONDS


@pytest.mark.usefixtures("with_redis")
def test_after_a_minute_without_a_new_one_it_is_as_quick_as_others(
    stranger: Timeout, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause_of(stranger)
    assert firing_state.unknown.are_about
    monkeypatch.setattr(module, "UNKNOWN_EXPECTED_SECONDS", 0.0)
    pause_of(stranger)
    assert not firing_state.unknown.are_about


@pytest.mark.usefixtures("with_redis")
def test_the_sweep_brings_rows_on_time_that_this_worker_has_not_met(stranger: Timeout) -> None:
    """They may be another worker's, which waits for them."""
    engine = get_worker_engine("default")
    assert engine is not None
    queue = engine.queue("default", 0)
    remove_ids(queue, [stranger.pk])
    sweep = Sweep(engine, "default", ClockSkew("default"))
    sweep.run_once(everything=True)
    assert queue.stats().due == 1


@pytest.mark.usefixtures("with_redis")
def test_the_sweep_leaves_rows_parked_that_this_worker_has_met(stranger: Timeout) -> None:
    engine = get_worker_engine("default")
    assert engine is not None
    queue = engine.queue("default", 0)
    remove_ids(queue, [stranger.pk])
    for _ in range(4):
        pause_of(stranger)
    Sweep(engine, "default", ClockSkew("default")).run_once(everything=True)
    assert (queue.stats().total, queue.stats().due) == (1, 0)
