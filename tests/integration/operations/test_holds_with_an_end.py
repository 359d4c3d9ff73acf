"""A hold with an end: a worker resumes it, once, and moves deadlines by its length."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from django.db import transaction
from django.utils import timezone

from django_delayq import InvalidDelay, explain_timeout
from django_delayq.firing import plan
from django_delayq.ledger import controls
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from django_delayq.operations import PolicyConflict, hold, pause, resume
from django_delayq.operations import changes as policy_changes
from django_delayq.operations.changes import continue_moves
from django_delayq.operations.policies import end_holds, outlasts
from django_delayq.sql import statements
from django_delayq.worker import Worker
from tests.integration.operations.conftest import BY, pending, said
from tests.integration.operations.test_stops import HOUR, REMIND, changes, state, stops
from tests.support.waiting import wait_until
from tests.support.workers import RunningWorker, due_orders
from tests.testapp.models import Order

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = pytest.mark.django_db(transaction=True)


def over(after: timedelta = timedelta(0)) -> None:
    """As if the hold had begun two hours ago, and ended `after` an hour of it."""
    now = timezone.now()
    PolicyControl.objects.update(stopped_at=now - 2 * HOUR, until=now - HOUR + after)
    controls.stop_cache.forget()


def test_a_hold_that_is_over_stops_its_policy_until_its_deadlines_have_moved(order: Order) -> None:
    row = pending(order, seconds=0)
    Timeout.objects.update(created_at=timezone.now() - 3 * HOUR, due_at=timezone.now() - HOUR * 1.5)
    hold(REMIND, by=BY, reason="outage", until=timezone.now() + HOUR)
    assert "held until" in str(explain_timeout(row))
    over()
    assert stops() == {REMIND}
    works, report = plan({row.pk: 1}, "default")
    assert not works
    assert report.now is not None
    assert report.again[row.pk] > report.now, "a worker does not recheck it at once, and again and again"
    due_at = Timeout.objects.get().due_at
    assert end_holds("default") == 1
    assert Timeout.objects.get().due_at == due_at + HOUR, "not by the time until a worker noticed its end"
    assert said(row) == [("hold_ended", BY, "outage")]
    assert not state().is_stopped
    assert changes() == [("held", BY, "outage"), ("resumed", BY, "")]
    assert end_holds("default") == 0


def test_timeouts_of_the_time_after_the_end_of_a_hold_do_not_move(order: Order) -> None:
    hold(REMIND, by=BY, until=timezone.now() + HOUR)
    over()
    row = pending(order)
    end_holds("default")
    assert Timeout.objects.get().due_at == row.due_at


def test_a_hold_that_is_not_over_does_not_end(order: Order) -> None:
    hold(REMIND, by=BY, until=timezone.now() + HOUR)
    assert end_holds("default") == 0
    hold("testapp.order.linger", by=BY)
    assert end_holds("default") == 0
    assert len(controls.stop_cache.read("default")) == 2


def test_a_person_who_resumes_a_hold_after_its_end_moves_deadlines_by_its_length_too(order: Order) -> None:
    row = pending(order)
    Timeout.objects.update(created_at=timezone.now() - 3 * HOUR)
    hold(REMIND, by=BY, until=timezone.now() + HOUR)
    over()
    change = resume(REMIND, by="admin:bob")
    assert change is not None
    assert change.moved == 1
    assert Timeout.objects.get().due_at == row.due_at + HOUR


def test_the_end_of_a_hold_can_be_changed_and_removed_and_must_be_in_the_future(order: Order) -> None:
    end = timezone.now() + HOUR
    with pytest.raises(InvalidDelay, match="in the past"):
        hold(REMIND, by=BY, until=timezone.now())
    assert hold(REMIND, by=BY, reason="outage", until=end) is not None
    began = state().stopped_at
    assert hold(REMIND, by=BY) is None
    assert hold(REMIND, by=BY, until=end) is None
    assert hold(REMIND, by=BY, until=end + HOUR) is not None
    assert (state().until, state().reason, state().stopped_at) == (end + HOUR, "outage", began)
    with pytest.raises(PolicyConflict, match="resume it first"):
        pause(REMIND, by=BY, until=end)
    assert hold(REMIND, by=BY, until=None) is not None
    assert state().until is None


def test_a_pause_that_becomes_a_hold_does_not_pass_on_its_end(order: Order) -> None:
    pause(REMIND, by=BY, until=timezone.now() + HOUR)
    hold(REMIND, by=BY)
    assert (state().stop, state().until) == ("held", None)


def test_the_end_of_a_hold_is_continued_after_a_crash_and_moves_no_deadline_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [pending(Order.objects.create()) for _ in range(4)]
    Timeout.objects.update(created_at=timezone.now() - 3 * HOUR)
    hold(REMIND, by=BY, until=timezone.now() + HOUR)
    over()
    monkeypatch.setattr(statements, "CHUNK", 3)
    move_page, pages = policy_changes._move_page, list[int]()

    def crash(change_id: int, using: str) -> int:
        if pages:
            raise SystemExit
        pages.append(move_page(change_id, using))
        return pages[0]

    monkeypatch.setattr(policy_changes, "_move_page", crash)
    with pytest.raises(SystemExit):
        end_holds("default")
    monkeypatch.setattr(policy_changes, "_move_page", move_page)
    controls.stop_cache.forget()
    assert stops() == {REMIND}
    assert end_holds("default") == 0
    assert continue_moves("default") == 1
    assert stops() == set()
    before = {row.pk: row.due_at for row in rows}
    assert {row.due_at - before[row.pk] for row in Timeout.objects.all()} == {HOUR}


def test_a_hold_that_another_process_has_extended_meanwhile_does_not_end(
    order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controls, "CACHE_SECONDS", 600.0)
    hold(REMIND, by=BY, until=timezone.now() + HOUR)
    over()
    assert controls.stop_cache.recent("default").ended_holds()
    PolicyControl.objects.update(until=timezone.now() + HOUR)
    assert end_holds("default") == 0
    assert state().stop == "held"


def test_a_stop_outlasts_one_that_ends_earlier_or_at_the_same_time(order: Order) -> None:
    end = timezone.now() + HOUR
    assert not outlasts(state(), end)
    pause(REMIND, by=BY, until=end)
    assert [outlasts(state(), until) for until in (end - HOUR / 2, end, end + HOUR, None)] == [True, True, False, False]
    hold(REMIND, by=BY)
    assert outlasts(state(), None) and outlasts(state(), end)


def test_the_end_of_a_hold_waits_for_the_end_of_a_transaction(order: Order) -> None:
    hold(REMIND, by=BY, until=timezone.now() + HOUR)
    over()
    with transaction.atomic():
        assert end_holds("default") == 0


@pytest.fixture
def worker(source: str, settings: Settings) -> Iterator[RunningWorker]:
    settings.DELAYQ = {**settings.DELAYQ, "SWEEP_INTERVAL": timedelta(milliseconds=200)}
    running = RunningWorker(concurrency=2)
    yield running
    running.stop()


def test_two_workers_resume_a_hold_at_its_end_and_its_timeouts_fire(worker: RunningWorker) -> None:
    hold(REMIND, by=BY, until=timezone.now() + timedelta(days=1))
    due_orders("remind", 5)
    other = RunningWorker(concurrency=2)
    try:
        PolicyControl.objects.update(until=timezone.now())
        wait_until(lambda: Timeout.objects.filter(policy=REMIND, state="fired").count() == 5)
    finally:
        other.stop()
    assert PolicyChange.objects.filter(what="resumed").count() == 1


def test_a_burst_resumes_a_hold_at_its_end(source: str) -> None:
    hold(REMIND, by=BY, until=timezone.now() + timedelta(days=1))
    due_orders("remind", 2)
    PolicyControl.objects.update(stopped_at=timezone.now(), until=timezone.now())
    Worker(burst=True).run()
    assert Timeout.objects.filter(state="fired").count() == 2


def test_a_refused_resume_writes_nothing(order: Order) -> None:
    assert resume(REMIND, by=BY) is None
    assert not PolicyControl.objects.exists()
    with transaction.atomic():
        assert resume(REMIND, by=BY) is None
        Order.objects.create()
    assert not PolicyControl.objects.exists()
    assert Order.objects.count() == 2
