"""Works that lose their slot, or that an executor or an error loses: the worker keeps none of them. A burst waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.utils import timezone
from pytest_django import Settings

from django_delayq import Limits, Rate
from django_delayq.firing import Report, Work, run, settle_expired
from django_delayq.ledger.claiming import Slot, Spacing
from django_delayq.models import Timeout
from django_delayq.worker import Worker, loop
from django_delayq.worker import dispatch as dispatch_module
from django_delayq.worker.background import leases_job
from django_delayq.worker.dispatch import Dispatch
from django_delayq.worker.sources.ledger import Batch
from tests.integration.worker.test_rates import RATE, Begins, claim, four_threads, made_sources, overdue
from tests.support.waiting import wait_until
from tests.support.workers import Declare, StartWorker, due_orders
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)


def miss_no_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no slot is missed, however busy the machine is."""
    monkeypatch.setattr(Spacing, "slot", lambda _, at, share: Slot(at, at + 1000.0, share))


@pytest.mark.usefixtures("without_redis")
def test_a_burst_waits_for_the_next_slot_unless_that_takes_long(
    declare: Declare, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "BURST_IDLE_SECONDS", 0.5)
    miss_no_slots(monkeypatch)
    for name, period in (("soon", timedelta(seconds=2)), ("later", timedelta(hours=1))):
        overdue(declare(Order, Begins(), name=name, limits=Limits(rate=Rate(1, per=period))), 2)
    start_worker(burst=True).join()
    left = Timeout.objects.filter(state="pending").values_list("policy", flat=True)
    assert [*left] == ["testapp.order.later"]


class Silent:
    """An executor that runs nothing, and whose `withdraw` fails, or returns all but the first `running`."""

    def __init__(self, running: int | None = None) -> None:
        self.works: list[tuple[Work, Callable[..., None]]] = []
        self.withdrawals = 0
        self._running = running

    def submit(self, work: Work, done: Callable[..., None]) -> None:
        self.works.append((work, done))

    def withdraw(self) -> list[Work]:
        self.withdrawals += 1
        if self._running is None:
            raise OSError("the broker is down")
        waiting, self.works = [work for work, _ in self.works[self._running :]], self.works[: self._running]
        return waiting


def dispatch_to(executor: Any) -> Dispatch:
    return Dispatch(Worker(concurrency=1), executor)


def give_up(dispatch: Dispatch) -> None:
    wait_until(lambda: dispatch.collect() >= 0 and not dispatch.in_flight, "its lease is over")


def test_a_work_that_was_given_up_is_left_alone_or_withdrawn_by_a_worker_that_stops(
    declare: Declare, settings: Settings
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "LEASE": timedelta(milliseconds=500)}
    [id] = overdue(declare(Order, name="rated", limits=Limits(rate=RATE)), 1)
    dispatch = dispatch_to(executor := Silent())
    dispatch.add(Batch({id: 1}, slots={id: Slot(time.monotonic(), time.monotonic() + 60)}))
    [(work, done)] = executor.works
    done(work, Report(missed=True))
    give_up(dispatch)
    dispatch.submit_due()
    assert dispatch.seconds_left == float("inf"), "while it waited for a slot"
    [row] = due_orders("remind", 1)
    dispatch = dispatch_to(executor := Silent(running=0))
    dispatch.add(Batch({row.pk: 1}))
    give_up(dispatch)
    assert executor.works
    assert dispatch.release() == 0
    assert not executor.works, "otherwise the executor would still run it, and the worker would wait for that"


def test_works_that_wait_for_a_slot_are_released_although_the_executor_fails(declare: Declare) -> None:
    """Otherwise a worker that stops would wait for them indefinitely."""
    [id] = overdue(declare(Order, name="rated", limits=Limits(rate=RATE)), 1)
    dispatch = dispatch_to(Silent())
    dispatch.add(Batch({id: 1}, slots={id: Slot(time.monotonic() + 60, time.monotonic() + 90)}))
    dispatch.release()
    assert dispatch.in_flight == 0


def test_while_a_handler_runs_for_long_what_waits_is_not_withdrawn_in_each_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = int(time.monotonic())  # whole seconds: sums of others are rounded
    rows = due_orders("remind", 4)
    dispatch = dispatch_to(executor := Silent(running=1))
    monkeypatch.setattr(dispatch_module, "time", SimpleNamespace(monotonic=lambda: now))
    dispatch.add(Batch({rows[0].pk: 1}))
    now += 8
    dispatch.add(Batch({row.pk: 1 for row in rows[1:]}))
    now += 2
    assert [dispatch.release(after_seconds=10) for _ in range(100)] == [0] * 100
    assert executor.withdrawals == 1
    assert len(executor.works) > 1, "those that wait, again"
    now += 8
    assert dispatch.release(after_seconds=10) == 3, "they have waited for ten seconds"
    assert dispatch.in_flight == 1


def test_what_an_executor_has_lost_is_a_suspect_however_much_was_lost_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_module, "MAX_LOST", 2)
    dispatch = dispatch_to(executor := Silent())
    for row in due_orders("remind", 3):
        dispatch.add(Batch({row.pk: 1}))
        work, done = executor.works[-1]
        done(work, Report(lost=work.ids))
        dispatch.collect()
    dispatch.add(Batch({row.pk: 1}))
    assert executor.works[-1][0].suspect


def test_what_was_claimed_is_released_when_the_claim_of_the_next_policy_fails(declare: Declare) -> None:
    """Otherwise the worker would extend claims that it does not know of, and no worker would fire their rows."""
    first, second = (declare(Order, name=name, limits=Limits(rate=RATE)) for name in ("first", "second"))
    ids = overdue(first, 2)
    overdue(second, 2)
    sources = made_sources()

    def fail(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        if second.label in (params or ()):
            raise OperationalError("deadlock")
        return execute(sql, params, many, context)

    with connection.execute_wrapper(fail), pytest.raises(OperationalError, match="deadlock"):
        sources.take(four_threads(), 100)
    assert set(Timeout.objects.filter(pk__in=ids).values_list("claims", flat=True)) == {1}
    sources.flush()
    assert set(Timeout.objects.values_list("claims", flat=True)) == {0}
    assert list(claim(first).claimed.claims) == ids


def test_an_attempt_that_died_expires_although_its_timeout_waits_for_a_thread(declare: Declare) -> None:
    """Extending the leases would otherwise keep it, and delay the next attempt by a lease each time."""
    extended: list[list[int]] = []
    dispatch = dispatch_to(executor := Silent())
    policy = declare(Order, lambda *_: extended.append(dispatch.firing_non_atomic()), name="outside", atomic=False)
    [row] = due_orders(policy, 1)
    ended = timezone.now() - timedelta(seconds=1)
    Timeout.objects.update(state="firing", slot_taken=None, attempts=1, run_at=ended)
    dispatch.add(Batch({row.pk: 2}))
    leases_job(dispatch._sources, dispatch.firing_non_atomic, "default").run()
    assert list(settle_expired("default").again) == [row.pk]
    [(work, _)] = executor.works
    assert run(work, "default").fired == (row.pk,)
    assert extended == [[row.pk]]
