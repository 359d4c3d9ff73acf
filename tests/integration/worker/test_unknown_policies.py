"""Rows of policies that are not declared here are left to workers that know them, and cost this one nothing."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from django_delayq import TimeoutPolicy
from django_delayq.models import Timeout
from django_delayq.policy.policies import registry
from django_delayq.redis_clients import get_worker_engine
from django_delayq.worker import Worker
from django_delayq.worker.background import Background
from tests.integration.worker.test_rates import four_threads, made_sources
from tests.support.workers import Declare, due_orders
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def policy(declare: Declare) -> TimeoutPolicy[Any]:
    """Declared while its rows are made, and not any more when the test begins to work with them."""
    return declare(Order, name="new")


@pytest.fixture
def stranger(source: str, policy: TimeoutPolicy[Any]) -> Timeout:
    [row] = due_orders(policy)
    registry.remove(policy)
    return row


def test_its_line_is_not_asked_until_it_is_declared(stranger: Timeout, policy: TimeoutPolicy[Any]) -> None:
    [known] = due_orders("remind")
    sources, lines = made_sources(get_worker_engine("default")), four_threads()
    assert sources.take(lines, 100).deliveries == {known.pk: 1}
    registry.add(policy)
    sources.check_now()
    sources.ledger.check_now()
    assert sources.take(lines, 100).deliveries == {stranger.pk: 1}


@pytest.mark.parametrize("only", [None, ["default"], ["mail"]])
def test_that_its_timeouts_are_due_is_logged_once_a_minute(
    stranger: Timeout, only: list[str] | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    background = Background(Worker(queues=only))
    for _ in range(4):
        background._queues_at = 0.0
        background.follow()
    told = [vars(each)["policy"] for each in caplog.records if vars(each).get("event") == "policy_unknown"]
    assert told == ([] if only == ["mail"] else [stranger.policy]), "not by a worker of other queues"
