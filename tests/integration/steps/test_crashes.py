"""SIGKILL at each checkpoint of each step: its effect is there once, and nothing runs out of order."""

from __future__ import annotations

import multiprocessing
import os
import signal
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections

from django_delayq import Retry
from django_delayq.firing import settle_expired
from django_delayq.firing.handler import CHECKPOINTS, set_checkpoint_hook
from django_delayq.models import Timeout
from django_delayq.redis_clients import forget_engine
from django_delayq.testing import fire_due
from tests.integration.firing.conftest import fire
from tests.integration.steps.days import Declare, at, dunning, planned, ran, row_of, sent
from tests.testapp.models import Effect

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]
INSIDE = [each for each in CHECKPOINTS if each not in {"planned", "asked", "noted", "settled", "undone", "recorded"}]
OUTSIDE = [each for each in CHECKPOINTS if each not in {"planned", "asked", "noted", "undone", "recorded"}]
NAMES = {11: "friendly", 14: "firm:1", 15: "firm:2", 16: "firm:3", 17: "handler"}
SECOND = timedelta(seconds=1) / timedelta(days=1)


def killed_at(checkpoint: str, policy: Any) -> None:
    """A process that fires due timeouts has been killed at `checkpoint`. It is a fork: nothing is imported again."""
    connections.close_all()  # parent and child must not share a connection
    forget_engine()
    child = multiprocessing.get_context("fork").Process(target=_fire_until, args=(checkpoint, policy))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL


def _fire_until(checkpoint: str, policy: Any) -> None:
    set_checkpoint_hook(lambda reached: os.kill(os.getpid(), signal.SIGKILL) if reached == checkpoint else None)
    fire_due(policy)


@pytest.mark.parametrize("checkpoint", INSIDE)
def test_killed_at_each_step_each_has_one_effect(declare: Declare, checkpoint: str) -> None:
    policy = dunning(declare)
    with at(0):
        order = sent()
    for place, (day, name) in enumerate(NAMES.items()):
        with at(day):
            killed_at(checkpoint, policy)
            is_committed = checkpoint in {"committed", "reported"}
            assert len(ran()) == place + is_committed
            fire_due(policy)
            assert ran() == list(NAMES.values())[: place + 1]
        assert name in ran()
    assert row_of(order).state == "fired"
    assert len(set(Effect.objects.values_list("idempotency_key", flat=True))) == 5


@pytest.mark.parametrize("checkpoint", OUTSIDE)
def test_killed_at_each_step_outside_each_has_an_effect_under_one_key(declare: Declare, checkpoint: str) -> None:
    policy = dunning(declare, atomic_steps=False, atomic=False, retry=Retry([0]))
    with at(0):
        order = sent()
    for day, name in NAMES.items():
        with at(day):
            killed_at(checkpoint, policy)
        with at(day + 100 * SECOND):  # the lease of the process that was killed has ended
            fire_due(policy)
        times = 2 if checkpoint == "handled" else 1
        found = Effect.objects.filter(what=name)
        assert found.count() == times
        assert len(set(found.values_list("idempotency_key", flat=True))) == 1
    in_order = list(dict.fromkeys(ran()))
    assert in_order == list(NAMES.values())
    assert row_of(order).state == "fired"


@pytest.mark.parametrize("checkpoint", ["begun", "checked", "committed", "reported"])
def test_killed_after_an_outage_what_was_missed_is_passed_once(declare: Declare, checkpoint: str) -> None:
    policy = dunning(declare)
    with at(0):
        order = sent()
    with at(15.5):
        killed_at(checkpoint, policy)
        fire_due(policy)
    assert ran() == ["firm:2"]
    assert planned(order) == ("firm:3", 16, 14)
    assert [event["what"] for event in row_of(order).history] == ["steps_passed", "step"]


@pytest.mark.parametrize("checkpoint", ["undone", "recorded"])
@pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "outside"])
def test_killed_around_the_recording_of_a_dead_step_what_follows_goes_on(
    declare: Declare, checkpoint: str, atomic: bool
) -> None:
    def broken(_obj: Any, _timeout: Any) -> None:
        raise ValueError("down")

    policy = dunning(declare, retry=Retry.never())
    policy.step(timedelta(days=-5), name="early", atomic=atomic)(broken)
    with at(0):
        order = sent()
    with at(9):
        killed_at(checkpoint, policy)
    with at(9 + 100 * SECOND):
        fire_due(policy, raises=False)
    assert planned(order) == ("friendly", 11, 14)
    assert row_of(order).history[-1]["what"] == "step_dead"
    with at(11):
        fire_due(policy)
    assert ran() == ["friendly"]


@pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "outside"])
def test_a_step_that_kills_its_process_again_and_again_is_dead_and_what_follows_goes_on(
    declare: Declare, atomic: bool
) -> None:
    def kill(_obj: Any, _timeout: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    policy = dunning(declare)
    policy.step(timedelta(days=-5), name="early", atomic=atomic)(kill)
    with at(0):
        order = sent()
    deaths, timeout_id = 0, row_of(order).pk
    while row_of(order).step == "early":
        with at(9 + deaths * 100 * SECOND):  # the lease of the process that was killed has ended
            connections.close_all()
            forget_engine()
            child = multiprocessing.get_context("fork").Process(target=_fire_as_worker, args=(timeout_id,))
            child.start()
            child.join(60)
            deaths += child.exitcode == -signal.SIGKILL
        assert deaths < 10
    assert deaths >= 3
    assert planned(order) == ("friendly", 11, 14)
    assert row_of(order).deaths == 0
    assert row_of(order).history[-1]["what"] == "step_dead"


def _fire_as_worker(timeout_id: int) -> None:
    settle_expired("default")
    fire(Timeout.objects.get(pk=timeout_id), deliveries=2)
