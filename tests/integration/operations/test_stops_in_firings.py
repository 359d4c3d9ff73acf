"""A stop and a firing that meet: what was stopped when a firing locked its row does not fire.

The stop is committed in another session, at a step of the firing that comes after all reads of the cache.
On SQLite a firing is the only writer: a stop is committed before or after it, never between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
from django.utils import timezone

from django_delayq import Retry, get_policy
from django_delayq.firing import plan, run
from django_delayq.firing.handler import set_checkpoint_hook
from django_delayq.ledger import controls
from django_delayq.ledger.marking import can_mark_at_once
from django_delayq.models import PolicyControl, Timeout
from django_delayq.operations import hold, pause, resume
from django_delayq.worker.lines import Lines
from django_delayq.worker.servers import ClockSkew
from django_delayq.worker.sources.ledger import LedgerSource
from tests.integration.firing.conftest import another_session, fire, in_another_thread, needs_row_locks
from tests.integration.firing.conftest import as_in_a_new_process as no_pace  # noqa: F401 - a fixture
from tests.integration.operations.conftest import BY
from tests.integration.operations.names import LINGER, MINUTE, REMIND, Declare
from tests.support.workers import due_orders
from tests.testapp.models import Effect, Order

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("no_pace")]


@pytest.fixture(autouse=True)
def nobody_looks_on() -> Iterator[None]:
    yield
    set_checkpoint_hook(None)


def at(step: str, act: Callable[[], object], *, time: int = 1) -> None:
    """Another thread calls `act` when a firing reaches `step`, at most so many times."""
    coming = [0]

    def look(reached: str) -> None:
        coming[0] += reached == step
        if reached == step and coming[0] == time:
            in_another_thread(act)

    set_checkpoint_hook(look)


def waits(row: Timeout) -> bool:
    """Nothing has become of `row`, and nothing was counted."""
    row.refresh_from_db()
    return (row.state, row.attempts, row.slot_taken, row.settled_at, row.history) == ("pending", 0, 1, None, [])


@pytest.mark.dialect
@needs_row_locks
@pytest.mark.parametrize("name", ["remind", "remind_many", "send_outside"])
@pytest.mark.parametrize(("step", "stop"), [("begun", pause), ("locked", hold)])
def test_what_is_stopped_after_the_last_look_and_before_its_row_is_locked_does_not_fire(
    step: str, name: str, stop: Callable[..., object]
) -> None:
    rows, label = due_orders(name, 3), f"testapp.order.{name}"
    if can_mark_at_once(get_policy(label), "default"):
        step = "begun"  # nothing can happen between the locks of one statement
    at(step, lambda: stop(label, by=BY))
    report = fire(*rows)
    assert report.fired == ()
    assert set(report.again) == {row.pk for row in rows}
    assert not Effect.objects.exists()
    assert all(waits(row) for row in rows)
    assert resume(label, by=BY, shift=False) is not None
    assert set(fire(*rows).fired) == {row.pk for row in rows}


def test_a_suspect_that_was_stopped_so_late_waits_until_each_process_knows_and_its_line_is_not_asked_any_more() -> None:
    [row] = due_orders("remind")
    works, _ = plan({row.pk: 2}, "default")
    lines = Lines("default", 4, 0.5)
    assert REMIND in lines.may_run()
    at("noted", lambda: pause(REMIND, by=BY))
    report = run(works[0], "default")
    assert report.now is not None and report.fired == ()
    assert report.again[row.pk] == report.now + timedelta(seconds=controls.CACHE_SECONDS)
    assert waits(row), "it is charged for nothing"
    assert REMIND not in lines.may_run(by_last_answer=True)


@pytest.mark.dialect
@needs_row_locks
@pytest.mark.parametrize("option", ["batch", "together"])
def test_what_is_undone_with_others_is_not_fired_one_by_one_after_a_pause(declare: Declare, option: str) -> None:
    """However long it took until one of them raised."""

    def handler(orders: Any, timeouts: Any) -> None:
        Effect.objects.create(what="all")
        raise ValueError("all are undone")

    policy = declare(Order, handler, name="undone", retry=Retry([0]), **{option: 10})
    rows = due_orders(policy, 3)
    at("begun", lambda: pause(policy, by=BY), time=2)
    report = fire(*rows)
    assert (report.fired, set(report.again)) == ((), {row.pk for row in rows})
    assert not Effect.objects.exists()
    assert all(waits(row) for row in rows)


@pytest.mark.dialect
@needs_row_locks
def test_whoever_pauses_does_not_wait_for_a_firing_nor_a_firing_for_him() -> None:
    """A firing reads the control without locking it, so that the firings of a policy do not wait for each other."""
    [row] = due_orders("remind")
    at("checked", lambda: pause(REMIND, by=BY))
    assert fire(row).fired == (row.pk,), "it was resumed before"
    rows = due_orders("linger", 1)
    with another_session(lambda: pause(LINGER, by=BY)):
        assert fire(*rows).fired == (rows[0].pk,), "what is not committed is not in force"


def test_a_firing_means_the_same_by_stopped_as_others(declare: Declare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controls, "CACHE_SECONDS", 600.0)
    policy = declare(Order, name="new_name", aliases=["old_name"])
    [row] = due_orders(policy)
    outcomes, now = [], timezone.now()
    for label, stop, until in product((*policy.labels, REMIND), PolicyControl.Stop.values, (None, -MINUTE, MINUTE)):
        assert controls.stop_cache.read("default") == {}  # and so it is remembered
        end = None if until is None else now + until
        control = PolicyControl.objects.create(policy=label, stop=stop, until=end, changed_at=now, stopped_at=now)
        works, _ = plan({row.pk: 1}, "default")
        fires = bool(run(works[0], "default").fired)
        assert fires is (policy.label not in controls.stop_cache.read("default")), vars(control)
        outcomes.append(fires)
        control.delete()
        Timeout.objects.filter(pk=row.pk).update(state="pending", cause="", settled_at=None, slot_taken=1)
    # Under each of the two labels: a pause without an end or before it, a hold and a release whatever their ends.
    assert (outcomes.count(False), outcomes.count(True)) == (16, 20)


def test_without_redis_what_somebody_else_resumes_is_claimed_by_the_next_look() -> None:
    """Also while the cache is under a second old: a worker reads it once a second, and might miss the change twice."""
    [row] = due_orders("remind")
    pause(REMIND, by=BY)
    source, lines = LedgerSource("default", None, ClockSkew("default")), Lines("default", 4, 0.5)
    assert list(source.due(lines)) == []
    PolicyControl.objects.update(stop="")  # another process: this one still remembers
    assert set(controls.stop_cache.recent("default").stopped) == {REMIND}
    source.check_now()
    assert list(source.due(lines)) == [REMIND]
    assert REMIND in lines.may_run()
    assert source.take({REMIND: 10}) == {REMIND: {row.pk: 1}}
