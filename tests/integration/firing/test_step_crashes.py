"""SIGKILL at each checkpoint of a step and of its handler: its effect is there once, and nothing runs out of order."""

from __future__ import annotations

import signal
from datetime import timedelta

import pytest

from django_delayq import Retry
from django_delayq.firing import settle_expired
from django_delayq.models import Timeout
from django_delayq.testing import fire_due
from tests.integration.firing.conftest import fire
from tests.integration.firing.handlers import ATOMIC_OR_NOT
from tests.integration.firing.test_crashes import exit_code_of, kill, killed_while
from tests.support.invoices import ARMED, DAY, Declare, at, dunning, note, planned, ran, row_of, sent
from tests.testapp.models import Effect, Order

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]
NAMES = {11: "friendly", 14: "handler"}
SECOND = timedelta(seconds=1) / timedelta(days=1)


@ATOMIC_OR_NOT
@pytest.mark.parametrize("checkpoint", ["marked", "handled", "committed"])
def test_killed_at_each_step_each_has_its_effect_under_one_key(declare: Declare, checkpoint: str, atomic: bool) -> None:
    policy = declare(Order, note, name="collect", after=14 * DAY, atomic=atomic, retry=Retry([0]), **ARMED)
    policy.step(-3 * DAY, atomic=atomic, name="friendly")(note)
    with at(0):
        order = sent()
    for day, name in NAMES.items():
        with at(day):
            killed_while(lambda: fire_due(policy), checkpoint)
            assert Effect.objects.filter(what=name).exists() == (checkpoint == ("committed" if atomic else "handled"))
        with at(day + 100 * SECOND):  # the lease of the process that was killed has ended
            fire_due(policy)
        found = Effect.objects.filter(what=name)
        assert found.count() == (2 if checkpoint == "handled" and not atomic else 1)
        assert len(set(found.values_list("idempotency_key", flat=True))) == 1
    assert list(dict.fromkeys(ran())) == list(NAMES.values())
    assert row_of(order).state == "fired"
    assert len(set(Effect.objects.values_list("idempotency_key", flat=True))) == 2


@ATOMIC_OR_NOT
def test_a_step_that_kills_its_process_is_dead_and_others_follow(declare: Declare, atomic: bool) -> None:
    policy = dunning(declare)
    policy.step(timedelta(days=-5), name="early", atomic=atomic)(lambda _obj, _timeout: kill())
    with at(0):
        order = sent()
    deaths, timeout_id = 0, row_of(order).pk

    def fire_as_worker() -> None:
        settle_expired("default")
        fire(Timeout.objects.get(pk=timeout_id), deliveries=2)

    while row_of(order).step == "early":
        with at(9 + deaths * 100 * SECOND):  # the lease of the process that was killed has ended
            deaths += exit_code_of(fire_as_worker) == -signal.SIGKILL
        assert deaths < 10
    assert (deaths >= 3, row_of(order).deaths, planned(order)) == (True, 0, ("friendly", 11, 14))
    assert row_of(order).history[-1]["what"] == "step_dead"
