"""A worker with a backlog searches the ledger for underserved policies; an idle one does not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_delayq import TimeoutPolicy, clock
from django_delayq.models import Timeout
from django_delayq.worker.servers import ClockSkew, RedisHealth
from django_delayq.worker.sources import redis as module
from django_delayq.worker.sources.ledger import LedgerSource
from django_delayq.worker.sources.redis import MIN_SHARE, Fairness, Sources
from tests.support.workers import due_orders
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
REMIND, LINGER, UNPAID = (f"testapp.order.{name}" for name in ("remind", "linger", "cancel_unpaid"))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause between two searches, so that no test has to wait for one."""
    monkeypatch.setattr(module, "FIRST_CHECK_SECONDS", 0.0)
    monkeypatch.setattr(module, "LONGEST_CHECK_SECONDS", 0.0)
    monkeypatch.setattr(module, "MAX_COST_SECONDS", 0.0)


def poll(only: list[str] | None = None) -> LedgerSource:
    return LedgerSource("default", only, ClockSkew("default"))


def behind(only: list[str] | None = None) -> Fairness:
    fairness = Fairness(poll(only))
    fairness.note_backlog(True)
    return fairness


def crowd(count: int = 60) -> list[Timeout]:
    rows = due_orders("remind", count)
    Timeout.objects.filter(pk__in=[row.pk for row in rows]).update(run_at=clock.now() - timedelta(hours=1))
    return rows


def test_who_keeps_up_asks_nothing() -> None:
    due_orders("linger")
    fairness = Fairness(poll())
    fairness.note_backlog(False)
    with CaptureQueriesContext(connection) as queries:
        assert fairness.take(100, {}) == {}
    assert len(queries) == 0


def test_what_is_due_of_others_is_claimed_past_a_crowd() -> None:
    crowd()
    others = [*due_orders("linger", 2), *due_orders("cancel_unpaid", 3)]
    taken = behind().take(10, {REMIND: 90})
    assert taken == {row.pk: 1 for row in others}
    assert poll().labels_with_due([REMIND, LINGER, UNPAID]) == [REMIND], "claimed, so that other workers skip it"


def test_nobody_gets_more_than_there_is_room_for() -> None:
    due_orders("linger", 80)
    due_orders("cancel_unpaid", 80)
    fairness = behind()
    first = fairness.take(40, {REMIND: 60})
    assert len(first) == 40
    labels = [*Timeout.objects.filter(pk__in=first).values_list("policy", flat=True)]
    assert (labels.count(LINGER), labels.count(UNPAID)) == (20, 20)


def test_without_room_every_policy_still_gets_a_little() -> None:
    due_orders("linger", 2 * MIN_SHARE)
    assert len(behind().take(0, {REMIND: 100})) == MIN_SHARE


def test_a_worker_that_may_take_three_more_takes_three() -> None:
    due_orders("linger", 10)
    due_orders("cancel_unpaid", 10)
    assert len(behind().take(0, {REMIND: 100}, left=3)) <= 3
    assert behind().take(0, {REMIND: 100}, left=0) == {}


def test_who_has_its_share_already_is_not_asked_for() -> None:
    due_orders("linger", 100)
    assert behind().take(0, {REMIND: 100, LINGER: 100}) == {}
    assert len(behind().take(0, {REMIND: 1000, LINGER: 10})) == MIN_SHARE


def test_the_policy_that_is_the_backlog_is_left_to_redis() -> None:
    """Of slow handlers a worker has few in flight. It claimed 25 more of them ten times a second, and released most."""
    crowd()
    (other,) = due_orders("linger")
    assert behind().take(8, {REMIND: 4}) == {other.pk: 1}
    assert behind().take(8, {REMIND: 4, UNPAID: 4}) == {}, "both have their half"
    assert len(behind().take(8, {REMIND: 1, UNPAID: 4})) == MIN_SHARE


def test_what_waits_under_a_former_name_is_found(declare: Callable[..., TimeoutPolicy[Any]]) -> None:
    (row,) = due_orders(declare(Order, name="then"))
    declare(Order, name="now", aliases=("testapp.order.before",))
    Timeout.objects.update(policy="testapp.order.before")
    assert behind().take(0, {REMIND: 100}) == {row.pk: 1}


def test_queues_that_this_worker_does_not_serve_are_left_alone(declare: Callable[..., TimeoutPolicy[Any]]) -> None:
    due_orders("linger", 3)
    (mail,) = due_orders(declare(Order, name="mail", queue="mail"))
    assert behind(["mail"]).take(10, {REMIND: 90}) == {mail.pk: 1}


def test_many_policies_take_turns(declare: Callable[..., TimeoutPolicy[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LABELS", 3)
    rows = [due_orders(declare(Order, name=f"policy_{number}"))[0] for number in range(7)]
    fairness = behind()
    found: dict[int, int] = {}
    for _ in range(10):
        found |= fairness.take(0, {REMIND: 100})
    assert found == {row.pk: 1 for row in rows}


def test_a_claim_that_lapsed_makes_a_suspect_here_too() -> None:
    (row,) = due_orders("linger")
    assert behind().take(10, {REMIND: 90}) == {row.pk: 1}
    Timeout.objects.update(claimed_until=clock.now() - timedelta(seconds=1))
    assert behind().take(10, {REMIND: 90}) == {row.pk: 2}


def test_looks_in_vain_become_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_CHECK_SECONDS", 3600.0)
    fairness = behind()
    fairness._pause = 900.0
    assert fairness.take(0, {REMIND: 100}) == {}
    assert 900 < fairness.seconds_left <= 1800
    fairness.note_backlog(False)
    assert fairness.seconds_left == float("inf")


def test_the_slower_the_database_answers_the_less_often_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without free CPU time the searches of a worker cost more time than its handlers."""
    clock_of_process = itertools.count(step=0.03)
    monkeypatch.setattr(module, "MAX_COST_SECONDS", 1.0)
    fairness = behind()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock_of_process)))
    fairness.take(0, {REMIND: 100})
    assert fairness.seconds_left > 0.2, "nine times as long as the search took"


@pytest.fixture
def sources(settings: Any) -> Sources:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": None}
    return Sources(RedisHealth(None), [], None, "default", ClockSkew("default"))


def test_the_crowd_gets_the_rest_of_the_room(sources: Sources) -> None:
    first = sources.take(20, {}) if crowd() else None
    assert first is not None
    assert (len(first.deliveries), first.is_part) == (20, True)
    others = due_orders("linger", 2)
    second = sources.take(20, {REMIND: 20})
    assert len(second.deliveries) == 20
    assert {row.pk for row in others} <= second.deliveries.keys()


def test_a_worker_without_room_looks_again_soon(sources: Sources) -> None:
    taken = sources.take(0, {REMIND: 4})
    assert (taken.deliveries, taken.wait_seconds) == ({}, 0.0), "after the pause, which is none here"
    (other,) = due_orders("linger")
    assert sources.take(0, {REMIND: 4}).deliveries == {other.pk: 1}


def test_what_was_claimed_is_given_back_when_the_rest_fails(sources: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    sources.take(0, {REMIND: 100})
    (other,) = due_orders("linger")

    def fail(_room: int) -> None:
        raise RuntimeError("the connection broke")

    with monkeypatch.context() as broken, pytest.raises(RuntimeError):
        broken.setattr(sources.ledger, "take", fail)
        sources.take(10, {REMIND: 100})
    sources.flush()
    assert poll().take_now(10).deliveries == {other.pk: 1}
