"""Guard rails: `Late`, shadow mode and lateness, and the brake: which timeouts do not fire though they are due."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq import Brake, Late, clock
from django_delayq.arming.sync import sync_timeouts
from django_delayq.firing.handler import set_checkpoint_hook
from django_delayq.firing.rails import brake as brake_rail
from django_delayq.firing.rails.withheld import is_in_shadow
from django_delayq.ledger.controls import policy_state, stop_cache
from django_delayq.models import PolicyChange, PolicyMeter, Timeout
from django_delayq.operations import hold, pause, resume, shadow
from tests.integration.firing.conftest import MODES, due, fire, in_another_thread, state
from tests.integration.firing.handlers import Declare, Log, Patch, both, raising, write
from tests.integration.firing.limits import LIMITS, sleep
from tests.integration.firing.rows import FIRED, UNMET, hearing, logged, receiving, tried, written
from tests.support.workers import due_orders
from tests.testapp.models import Order

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("controls_are_read_again")]
HOUR = timedelta(hours=1)
BY = "test:operator"
LATE = ("skipped", "late")


@pytest.fixture(autouse=True)
def at_info(caplog: Log) -> None:
    caplog.set_level(logging.INFO, "django_delayq.firing")


def overdue(row: Timeout, by: timedelta = 3 * HOUR, **values: Any) -> Timeout:
    """Let the deadline of `row` have passed, as if no worker had run since."""
    at = timezone.now() - by
    Timeout.objects.filter(pk=row.pk).update(**{"due_at": at, "run_at": at, "created_at": at - HOUR, **values})
    row.refresh_from_db()
    return row


THEN = {"skip": ("skipped", logging.WARNING), "dead": ("dead", logging.ERROR)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("then", THEN)
def test_what_is_too_late_is_settled(orders: list[Order], declare: Declare, caplog: Log, mode: str, then: Any) -> None:
    settled, level = THEN[then]
    policy = declare(Order, write, name="limited", late=Late(HOUR, then=then), **MODES[mode])
    rows = [due(order, policy) for order in orders]
    late, in_time = [overdue(row) for row in rows[:3]], rows[3:]
    with hearing(dq.timeout_fired, dq.timeout_skipped, dq.timeout_dead, dq.timeout_failed) as heard:
        report = fire(*rows)
    assert written() == [row.object_id for row in in_time]
    assert sorted(report.fired) == [row.pk for row in in_time]
    assert sorted(report.done) == [row.pk for row in rows]
    reason = "It would have begun more than 1 h after its deadline."
    assert {(tried(row), row.reason) for row in late} == {(((settled, "late"), 0), reason)}
    assert {state(row) for row in in_time} == {FIRED}
    of_late = getattr(dq, f"timeout_{settled}")
    assert set(heard) == {*((of_late, row.pk) for row in late), *((dq.timeout_fired, row.pk) for row in in_time)}
    found = [(each.levelno, each.policy, each.count) for each in logged(caplog, "timeouts_late")]
    assert found == ([(level, policy.label, 3)] if mode in {"batch", "together"} else [(level, policy.label, 1)] * 3)


def stopped(stop: Callable[..., object], **options: Any) -> Callable[..., None]:
    def act(policy: Any, row: Timeout) -> None:
        stop(policy, by=BY)
        with clock.set_to(timezone.now() + 3 * HOUR):
            resume(policy, by=BY, **options)

    return act


MEANWHILE: dict[str, tuple[Callable[..., object], tuple[str, str]]] = {
    "nothing": (lambda policy, row: None, LATE),
    "its condition ends": (lambda policy, row: Order.objects.update(status="paid"), UNMET),
    "a pause": (stopped(pause), LATE),
    "a hold": (stopped(hold), FIRED),
    "a hold that keeps the deadlines": (stopped(hold, shift=False), LATE),
}


@pytest.mark.parametrize("what", MEANWHILE)
def test_what_happened_meanwhile_decides_whether_it_is_too_late(order: Order, declare: Declare, what: str) -> None:
    act, expected = MEANWHILE[what]
    policy = declare(Order, name="limited", late=Late(HOUR), when=Q(status="unpaid"))
    row, now = due(order, policy), timezone.now()
    act(policy, row)
    with clock.set_to(now + 3 * HOUR + timedelta(minutes=1)):
        fire(row, deliveries=2)  # also a suspect
    assert state(row) == expected


def test_only_a_first_attempt_can_be_late_and_a_snooze_from_its_end(orders: list[Order], declare: Declare) -> None:
    handler = raising(ValueError(), dq.Snooze(hours=5), dq.Snooze(hours=5), None)
    policy = declare(Order, handler, name="retried", late=Late(HOUR), retry=dq.Retry([0]))
    failed, late = due(orders[0], policy), due(orders[1], policy)
    fire(failed)
    fire(overdue(failed), late)
    with clock.set_to(timezone.now() + 5.5 * HOUR):
        assert fire(failed).fired == (failed.pk,)
    with clock.set_to(timezone.now() + 7 * HOUR):
        fire(late)
    assert state(late) == LATE


def test_a_round_that_was_too_late_is_closed(declare: Declare) -> None:
    options: Any = {"since": "created_at", "after": HOUR, "when": Q(status="unpaid"), "late": Late(HOUR)}
    policy = declare(Order, name="closed", **options)
    order = Order.objects.create(status="unpaid", created_at=timezone.now() - 10 * HOUR)
    row = order.timeouts.get(policy=policy.label)
    fire(row)
    assert state(row) == LATE
    order.save()
    sync_timeouts(Order.objects.all())
    assert order.timeouts.filter(policy=policy.label).count() == 1
    order.created_at = timezone.now() - HOUR / 2
    order.save()
    assert order.timeouts.filter(policy=policy.label).pending().count() == 1, "another round is open"


# Shadow mode: everything happens but the handler, and the round is closed


@pytest.mark.parametrize("mode", MODES)
def test_everything_happens_but_the_handler(orders: list[Order], declare: Declare, caplog: Log, mode: str) -> None:
    options: Any = {"when": Q(status="unpaid"), "shadow": True, "late": Late(HOUR)}
    policy = declare(Order, lambda *_: pytest.fail("called"), name="watched", **options, **MODES[mode])
    rows = [due(order, policy) for order in orders]
    overdue(rows[1])
    Order.objects.filter(pk=orders[0].pk).update(status="paid")
    with hearing(dq.timeout_skipped) as heard:
        report = fire(*rows)
    assert (report.fired, sorted(report.done)) == ((), [row.pk for row in rows])
    assert [state(row) for row in rows] == [UNMET, LATE, *[("skipped", "shadow")] * 3]
    assert {row.attempts for row in rows} == {0}
    assert sorted(pk for _, pk in heard) == [row.pk for row in rows]
    found = {each.object_id: each.getMessage() for each in logged(caplog, "timeout_shadow")}
    assert found.keys() == {str(order.pk) for order in orders[2:]}
    assert all(f"object {pk}) would have fired: its policy is in shadow mode" in words for pk, words in found.items())


def test_a_share_is_the_same_for_each_policy_and_grows_with_its_percentage() -> None:
    keys = [str(number) for number in range(2000)]
    shares = {percent: {key for key in keys if is_in_shadow(key, percent)} for percent in (0, 10, 50, 100)}
    assert (len(shares[0]), len(shares[100])) == (0, 2000)
    assert shares[10] < shares[50]
    assert 140 < len(shares[10]) < 260
    assert sorted(shares[10])[:3] == ["1009", "1013", "1043"], "other releases and machines choose the same"


@pytest.mark.parametrize("mode", MODES)
def test_only_a_share_of_the_objects_is_in_shadow_mode(declare: Declare, mode: str) -> None:
    policy = declare(Order, write, name="partly", **MODES[mode])
    shadow(policy, share=50, by=BY)
    rows = [due(Order.objects.create(status="unpaid"), policy) for _ in range(20)]
    fire(*rows)
    expected = {row.object_id for row in rows if is_in_shadow(row.object_id, 50)}
    assert set(written()) == {row.object_id for row in rows} - expected
    assert set(Timeout.objects.filter(cause="shadow").values_list("object_id", flat=True)) == expected


# `Brake`: a policy that fires too much within a period pauses itself, whatever operators do at the same time


PER = timedelta(minutes=10)


def braked(declare: Declare) -> dq.TimeoutPolicy[Any]:
    """Declare a policy whose brake allows three timeouts."""
    return declare(Order, name="braked", brake=Brake(3, per=PER))


def fired(policy: dq.TimeoutPolicy[Any]) -> int:
    return Timeout.objects.filter(policy=policy.label, state="fired").count()


def stop_of(policy: dq.TimeoutPolicy[Any]) -> tuple[str, str]:
    state = policy_state(policy, "default")
    return state.stop, state.by if state.stop else ""


@pytest.mark.dialect
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


def test_while_redis_is_away_the_ledger_counts(declare: Declare, settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": "redis://127.0.0.1:1/0"}
    policy = braked(declare)
    fire(*due_orders(policy, 6))
    assert (fired(policy), stop_of(policy)) == (4, ("paused", "brake"))


@pytest.mark.dialect
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


@pytest.mark.dialect
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


@pytest.mark.dialect
def test_a_brake_does_not_pause_what_was_resumed_since_it_began_to_count(declare: Declare) -> None:
    policy = braked(declare)
    pause(policy, by=BY)
    stop_cache.forget()
    before = stop_cache.guards(policy, "default")
    resume(policy, by=BY)
    assert brake_rail.pause_by_brake(policy, before, 100, "default") is None
    assert stop_of(policy) == ("", "")
    assert brake_rail.pause_by_brake(policy, stop_cache.guards(policy, "default"), 100, "default") is not None
