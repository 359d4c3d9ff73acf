"""`Brake`: a policy that fires too much within a period pauses itself, whatever operators do at the same time."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from django.db import transaction
from django.utils import timezone

import django_delayq as dq
from django_delayq import Brake, clock
from django_delayq.firing.handler import set_checkpoint_hook
from django_delayq.firing.rails import brake as brake_rail
from django_delayq.ledger.controls import policy_state, stop_cache
from django_delayq.models import PolicyChange, PolicyMeter, Timeout
from django_delayq.operations import hold, pause, resume
from tests.integration.firing.conftest import due, fire, in_another_thread
from tests.integration.firing.handlers import Declare, Log, Patch, both, raising
from tests.integration.firing.limits import LIMITS, sleep
from tests.integration.firing.rows import logged, receiving
from tests.support.workers import due_orders
from tests.testapp.models import Order

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.dialect,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("controls_are_read_again"),
]
BY = "test:operator"
PER = timedelta(minutes=10)


def braked(declare: Declare) -> dq.TimeoutPolicy[Any]:
    """Declare a policy whose brake allows three timeouts."""
    return declare(Order, name="braked", brake=Brake(3, per=PER))


def fired(policy: dq.TimeoutPolicy[Any]) -> int:
    return Timeout.objects.filter(policy=policy.label, state="fired").count()


def stop_of(policy: dq.TimeoutPolicy[Any]) -> tuple[str, str]:
    state = policy_state(policy, "default")
    return state.stop, state.by if state.stop else ""


def test_one_firing_too_many_pauses_the_policy(source: str, declare: Declare, caplog: Log) -> None:
    policy, heard = braked(declare), list[dict[str, Any]]()
    rows = due_orders(policy, 10)

    def hear(**given: Any) -> None:
        heard.append(given)

    with receiving(hear, dq.policy_paused):
        report = fire(*rows)
    assert (fired(policy), len(report.fired), len(report.again)) == (4, 4, 6)
    assert stop_of(policy) == ("paused", "brake")
    [change] = PolicyChange.objects.filter(policy=policy.label)
    assert (change.what, change.by, change.finished_at) == ("paused", "brake", change.at)
    words = "4 timeouts fired within 10 min; the brake allows 3."
    assert change.reason == policy_state(policy, "default").reason == words
    assert change.details == {"until": None, "fired": 4, "most": 3, "per": 600.0}
    [record] = logged(caplog, "policy_paused")
    assert (record.levelno, record.policy) == (logging.ERROR, policy.label)
    assert [(each["sender"], each["policy"], each["change"]) for each in heard] == [(Order, policy, change)]
    assert PolicyMeter.objects.exists() == (source == "ledger")
    for total, stop in ((8, ("paused", "brake")), (10, ("", ""))):
        resume(policy, by=BY)
        fire(*rows)
        assert (fired(policy), stop_of(policy)) == (total, stop)


def test_what_fired_before_the_period_does_not_count(without_redis: None, declare: Declare) -> None:
    policy, now = braked(declare), timezone.now()
    for minutes in (0, 4, 8, 12, 16, 20, 24):  # four within 12 minutes
        with clock.set_to(now + timedelta(minutes=minutes)):
            fire(due(Order.objects.create(), policy))
    assert stop_of(policy) == ("", "")
    [meter] = PolicyMeter.objects.all()
    assert len(meter.state["slices"]) <= 10


@pytest.mark.parametrize("options", [{}, {"batch": 100}, {"together": 100}, {"atomic": False}], ids=str)
def test_a_transaction_has_no_more_than_the_brake_leaves(
    source: str, declare: Declare, options: dict[str, Any]
) -> None:
    policy = declare(Order, lambda objects, timeouts: None, name="braked", brake=Brake(10, per=PER), **options)
    fire(*due_orders(policy, 60))
    assert (fired(policy), stop_of(policy)) == (11, ("paused", "brake"))


def test_what_is_skipped_or_fails_does_not_count_and_what_has_a_callback_that_hangs_does(declare: Declare) -> None:
    end = raising(*[dq.Skip("no"), ValueError("broken"), dq.GiveUp("never")] * 2, None)
    handler = both(end, lambda *_: transaction.on_commit(sleep))
    policy = declare(Order, handler, name="braked", brake=Brake(1, per=PER), retry=dq.Retry([3600]), limits=LIMITS)
    rows = due_orders(policy, 8)
    fire(*rows[:7])
    assert (fired(policy), stop_of(policy)) == (1, ("", ""))
    fire(rows[7])
    assert (fired(policy), stop_of(policy)) == (2, ("paused", "brake"))


def test_while_redis_is_away_the_ledger_counts(declare: Declare, settings: Settings) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": "redis://127.0.0.1:1/0"}
    policy = braked(declare)
    fire(*due_orders(policy, 6))
    assert (fired(policy), stop_of(policy)) == (4, ("paused", "brake"))


def test_a_count_that_fails_undoes_no_firing(
    without_redis: None, declare: Declare, monkeypatch: Patch, caplog: Log
) -> None:
    policy = braked(declare)
    rows = due_orders(policy, 10)
    paused, tries = brake_rail.pause_by_brake, []

    def fails_once(*given: Any) -> Any:
        tries.append(given)
        if len(tries) == 1:
            raise ValueError("broken")
        return paused(*given)

    monkeypatch.setattr(brake_rail, "pause_by_brake", fails_once)
    assert len(fire(*rows).fired) == 5
    assert stop_of(policy) == ("paused", "brake")
    assert len(logged(caplog, "brake_failed")) == 1


@pytest.mark.parametrize("act", [hold, pause])
def test_a_brake_does_not_replace_a_stop(declare: Declare, act: Any) -> None:
    policy = braked(declare)
    rows = due_orders(policy, 5)

    def hook(step: str) -> None:
        if step == "committed" and fired(policy) == 4:  # and not counted yet
            in_another_thread(lambda: act(policy, by=BY, reason="mine"))

    set_checkpoint_hook(hook)
    fire(*rows)
    state = policy_state(policy, "default")
    assert (state.stop, state.by, state.reason) == ("held" if act is hold else "paused", BY, "mine")
    assert PolicyChange.objects.count() == 1


def test_a_brake_does_not_pause_what_was_resumed_since_it_began_to_count(declare: Declare) -> None:
    policy = braked(declare)
    pause(policy, by=BY)
    stop_cache.forget()
    before = stop_cache.guards(policy, "default")
    resume(policy, by=BY)
    assert brake_rail.pause_by_brake(policy, before, 100, "default") is None
    assert stop_of(policy) == ("", "")
    assert brake_rail.pause_by_brake(policy, stop_cache.guards(policy, "default"), 100, "default") is not None
