"""`batch_by` where processes die, and where two firings of one value, or other locks, meet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.db import connections

from django_delayq import clock
from django_delayq.conf import get_settings
from django_delayq.firing import Work, judge, plan, run
from django_delayq.firing.handler import set_checkpoint_hook
from django_delayq.ledger.claiming import claim_each, forget_free_shares
from django_delayq.ledger.marking import forget_suspicion
from django_delayq.ledger.shares import LOCK_KEPT, lock_share, provide_lock
from django_delayq.models import RateShare, Timeout
from tests.integration.firing.by_value import Calls, Policy, Shops, due_of, run_of
from tests.integration.firing.conftest import (
    FIRED,
    WAIT,
    Declare,
    another_session,
    fire,
    locking,
    needs_row_locks,
    state,
    work_of,
)
from tests.support.workers import needs_more_connections
from tests.testapp.market import Purchase

pytestmark = [pytest.mark.slow, pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
CHECKPOINTS = ("begun", "locked", "checked", "marked", "handled", "committed", "reported")


# Processes that die


def test_a_suspect_by_the_ledger_is_fired_alone_and_not_gathered(policy: Policy, shops: Shops, calls: Calls) -> None:
    rows = due_of(policy, shops[0], 5)
    Timeout.objects.filter(pk=rows[1].pk).update(deaths=1)
    run_of(rows[0])
    assert calls.sizes == [4]
    fire(rows[1])
    assert calls.sizes == [4, 1]


def test_after_the_death_of_a_process_they_still_are_one_call(policy: Policy, shops: Shops, calls: Calls) -> None:
    rows, others = due_of(policy, shops[0], 5), due_of(policy, shops[1], 2)
    works, _ = plan({row.pk: 2 for row in [*rows[:3], *others]}, "default")
    assert [(work.suspect, len(work.ids)) for work in works] == [(True, 3), (True, 2)]
    report = run(works[0], "default")
    assert calls.all == [[shops[0].pk] * 5]
    assert {state(row) for row in rows} == {FIRED}
    assert set(works[0].ids) < set(report.fired)


def test_after_a_second_death_each_is_fired_alone(policy: Policy, shops: Shops, calls: Calls) -> None:
    rows = due_of(policy, shops[0], 4)
    [work], _ = plan({row.pk: 2 for row in rows}, "default")
    kill_at("handled", work)
    assert calls.sizes == [4]
    assert {row.state for row in Timeout.objects.all()} == {"pending"}
    assert Timeout.objects.filter(suspected_at=None).count() == 0
    Timeout.objects.update(suspected_at=clock.now() - timedelta(days=1))
    fire(*rows, deliveries=3)
    assert calls.sizes == [4, 1, 1, 1, 1]
    assert {(row.state, row.deaths) for row in Timeout.objects.all()} == {("fired", 1)}


def kill_at(step: str, work: Work) -> None:
    """Run `work` in a process that ends at `step`."""

    def look(reached: str) -> None:
        if reached == step:
            raise KeyboardInterrupt

    set_checkpoint_hook(look)
    with pytest.raises(KeyboardInterrupt):
        run(work, "default")
    set_checkpoint_hook(None)


@needs_row_locks
def test_what_could_not_run_is_not_suspected_any_more(policy: Policy, shops: Shops, calls: Calls) -> None:
    rows = due_of(policy, shops[0], 3)
    [work], _ = plan({row.pk: 2 for row in rows}, "default")
    with locking(Purchase.objects.get(pk=rows[1].object_id)):
        report = run(work, "default")
    assert (calls.sizes, set(report.again)) == ([], {row.pk for row in rows})
    assert {(row.state, row.suspected_at) for row in Timeout.objects.all()} == {("pending", None)}


def test_other_workers_leave_suspects_alone_while_they_run_together(policy: Policy, shops: Shops, calls: Calls) -> None:
    rows = due_of(policy, shops[0], 3)
    noted_at = clock.now()
    Timeout.objects.update(suspected_at=noted_at)
    works, report = plan({row.pk: 1 for row in rows}, "default")
    assert works == []
    assert set(report.again.values()) == {noted_at + get_settings().lease}


@needs_row_locks
@needs_more_connections
def test_a_suspicion_is_not_forgotten_while_its_row_is_locked(declare: Declare, shops: Shops) -> None:
    policy = declare(Purchase, name="by", batch=50, batch_by="channel")
    rows = due_of(policy, shops[0], 3)
    Timeout.objects.update(suspected_at=clock.now())
    ids = [row.pk for row in rows]
    with another_session(lambda: list(Timeout.objects.select_for_update().filter(pk=ids[1]))):
        assert forget_suspicion(ids, "default") == [ids[1]]
    assert forget_suspicion(ids, "default") == []
    assert not Timeout.objects.exclude(suspected_at=None).exists()


@needs_row_locks
@needs_more_connections
def test_suspects_of_a_value_that_another_worker_fires_are_released(policy: Policy, shops: Shops, calls: Calls) -> None:
    rows = due_of(policy, shops[0], 3)
    [work], _ = plan({row.pk: 2 for row in rows}, "default")
    provide_lock(policy, str(shops[0].pk), "default")
    with another_session(lambda: lock_share(policy, str(shops[0].pk), "default")):
        report = run(work, "default")
    assert (calls.sizes, set(report.untried)) == ([], set(work.ids))
    assert Timeout.objects.filter(suspected_at=None).count() == 3


# Two firings of one value


@contextmanager
def stopped_at(step: str, act: Callable[[], object]) -> Iterator[None]:
    """Call `act` in another thread, until it reaches `step`; let it continue when the block ends."""
    reached, go_on, errors = threading.Event(), threading.Event(), list[BaseException]()
    me = threading.current_thread()

    def look(name: str) -> None:
        if name == step and threading.current_thread() is not me and not reached.is_set():
            reached.set()
            assert go_on.wait(WAIT)

    def session() -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)
        finally:
            reached.set()
            connections.close_all()

    set_checkpoint_hook(look)
    thread = threading.Thread(target=session)
    thread.start()
    try:
        assert reached.wait(WAIT)
        yield
    finally:
        go_on.set()
        thread.join(WAIT)
        set_checkpoint_hook(None)
    assert not errors


@needs_row_locks
@needs_more_connections
@pytest.mark.parametrize("step", CHECKPOINTS)
def test_a_second_firing_meets_the_first_at_each_step(step: str, policy: Policy, shops: Shops, calls: Calls) -> None:
    rows, others = due_of(policy, shops[0], 10), due_of(policy, shops[1], 2)
    first, second = work_of(*rows[:5]), work_of(*rows[5:])
    with stopped_at(step, lambda: run(first, "default")):
        report = run(second, "default")
        run_of(others[0])
    assert sorted(calls.sizes) == [2, 10]
    assert {state(row) for row in [*rows, *others]} == {FIRED}
    if step in {"committed", "reported"}:
        assert sorted(report.done) == sorted(second.ids)
    elif step != "begun":  # there the value is not locked yet: either may be the first
        assert (set(report.again), report.fired) == (set(second.ids), ())
        assert set(report.untried) == set(second.ids)


@needs_row_locks
@needs_more_connections
def test_a_ledger_row_that_a_worker_locks_for_a_claim_splits_no_call(
    policy: Policy, shops: Shops, calls: Calls
) -> None:
    rows = due_of(policy, shops[0], 5)

    def claim() -> None:
        claimed = claim_each("default", None, {policy.label: 2}, timedelta(seconds=30))
        assert len(claimed.claims) == 2

    with another_session(claim):
        report = run_of(rows[4])
    assert (calls.sizes, set(report.again)) == ([], {rows[4].pk})
    run_of(rows[4])
    assert calls.sizes == [5]


@needs_row_locks
def test_a_value_waits_for_an_object_that_is_locked_briefly(policy: Policy, shops: Shops, calls: Calls) -> None:
    rows = due_of(policy, shops[0], 5)
    with locking(Purchase.objects.get(pk=rows[2].object_id)):
        report = run_of(rows[0])
    assert (calls.sizes, report.untried) == ([], (rows[0].pk,))
    run_of(rows[2])
    assert calls.sizes == [5]


@needs_row_locks
def test_an_object_that_is_locked_for_long_is_left_out(
    policy: Policy, shops: Shops, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = due_of(policy, shops[0], 5)
    with locking(Purchase.objects.get(pk=rows[2].object_id)):
        run_of(rows[0])
        assert calls.sizes == []
        monkeypatch.setattr(judge, "LOCKED_MAX_SECONDS", 0.0)
        run_of(rows[0])
    assert calls.sizes == [4]
    run_of(rows[2])
    assert calls.sizes == [4, 1]


@needs_row_locks
@needs_more_connections
def test_the_row_that_firings_lock_is_kept_while_it_is_locked(declare: Declare) -> None:
    policy = declare(Purchase, name="by", batch=50, batch_by="channel")
    provide_lock(policy, "7", "default")
    provide_lock(policy, "7", "default")
    [row] = RateShare.objects.all()
    assert row.free_at > clock.now() + LOCK_KEPT / 2
    RateShare.objects.update(free_at=clock.now() - timedelta(seconds=1))
    with another_session(lambda: lock_share(policy, "7", "default")):
        forget_free_shares("default")
        assert RateShare.objects.exists()
    forget_free_shares("default")
    assert not RateShare.objects.exists()
