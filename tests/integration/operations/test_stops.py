"""Pause, hold, resume: what fires, what moves, and by how much. A worker resumes a hold that has an end, once."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from django.utils import timezone

from django_delayq import (
    InvalidDelay,
    clock,
    explain_timeout,
    reschedule_timeout,
)
from django_delayq.firing import plan, run
from django_delayq.ledger import controls
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from django_delayq.operations import (
    change_delay,
    continue_moves,
    hold,
    pause,
    resume,
)
from django_delayq.operations import changes as policy_changes
from django_delayq.operations.changes import ABANDONED_AFTER
from django_delayq.operations.policies import end_holds, outlasts
from django_delayq.worker import Worker
from tests.integration.operations.conftest import BY, changes, held_for, many, pending, running, said, state_of, stops
from tests.integration.operations.names import DAY, HOUR, LINGER, MINUTE, REMIND, UNPAID, Declare
from tests.support.waiting import wait_until
from tests.support.workers import due_orders
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)


def planned(*rows: Timeout) -> list[int]:
    """Return which of these a worker would fire."""
    return [row_id for work in plan({row.pk: 1 for row in rows}, "default")[0] for row_id in work.ids]


def test_a_paused_policy_is_released_and_the_others_are_not_and_the_story_says_by_whom(order: Order) -> None:
    paused, other = pending(order, seconds=0), pending(order, "linger", seconds=0)
    before, _ = plan({paused.pk: 1}, "default")
    pause(REMIND, by=BY, reason="the provider is down")
    works, report = plan({paused.pk: 1, other.pk: 1}, "default")
    assert [work.ids for work in works] == [(other.pk,)]
    assert report.now is not None
    assert report.again == {paused.pk: report.now + timedelta(seconds=controls.CACHE_SECONDS)}
    assert set(run(before[0], "default").again) == {paused.pk}, "also one that had been planned"
    paused.refresh_from_db()
    assert (paused.state, paused.attempts) == ("pending", 0)
    outlook = explain_timeout(paused).outlook
    assert "paused by admin:alice" in outlook and "(the provider is down)" in outlook
    assert resume(REMIND, by=BY) is not None
    assert planned(paused) == [paused.pk]
    assert "due at" in explain_timeout(paused).outlook
    hold(REMIND, by="rest:bob")
    assert "held by rest:bob" in explain_timeout(paused).outlook


def test_a_pause_ends_by_itself_at_its_moment(order: Order) -> None:
    row = pending(order, seconds=0)
    until = timezone.now() + timedelta(seconds=20)
    pause(REMIND, by=BY, until=until)
    _, report = plan({row.pk: 1}, "default")
    assert report.again[row.pk] <= until
    assert state_of().until == until
    with clock.set_to(until):
        controls.stop_cache.forget()
        assert stops() == set()
        assert not state_of().is_stopped
        assert planned(row) == [row.pk]
        assert resume(REMIND, by=BY) is None
        hold(REMIND, by=BY)
        assert state_of().stop == "held"


def test_a_pause_ends_after_its_beginning_by_the_clock_of_the_database(monkeypatch: pytest.MonkeyPatch) -> None:
    now = timezone.now()
    monkeypatch.setattr("django_delayq.ledger.controls.database_now", lambda using: now + HOUR)
    with pytest.raises(InvalidDelay, match="in the past"):
        pause(REMIND, by=BY, until=now + HOUR / 2)
    assert changes() == []
    monkeypatch.setattr("django_delayq.ledger.controls.database_now", lambda using: now - HOUR)
    assert pause(REMIND, by=BY, until=now - HOUR / 2) is not None


def test_pausing_again_keeps_the_end_and_the_reason_unless_given() -> None:
    until = timezone.now() + HOUR
    pause(REMIND, by=BY, reason="outage", until=until)
    began = state_of().stopped_at
    assert pause(REMIND, by="rest:bob") is None, "nothing changed"
    assert pause(REMIND, by="rest:bob", reason="outage", until=until) is None
    assert changes() == [("paused", BY, "outage")]
    assert (state_of().until, state_of().reason, state_of().by) == (until, "outage", BY)
    change = pause(REMIND, by="rest:bob", reason="a longer outage")
    assert change is not None
    assert change.details == {
        "until": until.isoformat(), "was": "paused", "since": began and began.isoformat(),
        "was_until": until.isoformat(), "was_reason": "outage",
    }  # fmt: skip
    assert (state_of().until, state_of().reason, state_of().by) == (until, "a longer outage", "rest:bob")
    pause(REMIND, by=BY, until=until + HOUR)
    assert (state_of().until, state_of().reason, state_of().by) == (until + HOUR, "a longer outage", BY)
    pause(REMIND, by=BY, until=None)
    assert (state_of().until, state_of().reason) == (None, "a longer outage")
    assert state_of().stopped_at == began
    with clock.set_to(timezone.now() + HOUR):
        pause(REMIND, by=BY, until=timezone.now() + 2 * HOUR)
    with clock.set_to(timezone.now() + 3 * HOUR):  # that one is over, and the next one does not continue it
        assert pause(REMIND, by="rest:bob") is not None
        assert (state_of().until, state_of().reason, state_of().by) == (None, "", "rest:bob")
    change_delay(UNPAID, HOUR, by="rest:bob", reason="holidays")
    pause(UNPAID, by=BY, reason="outage")
    change_delay(UNPAID, 2 * HOUR, by="rest:bob", reason="holidays")
    found = state_of(UNPAID)
    assert (found.by, found.reason, found.after) == (BY, "outage", 2 * HOUR), "another delay leaves it its name"


def test_a_pause_becomes_a_hold_that_begins_now(order: Order) -> None:
    row = pending(order)
    Timeout.objects.update(created_at=timezone.now() - 5 * HOUR)
    pause(REMIND, by=BY, reason="outage", until=timezone.now() + HOUR)
    held_for(3 * HOUR)
    change = hold(REMIND, by="rest:bob")
    assert change is not None
    assert (change.what, change.details["was"], change.details["was_reason"]) == ("held", "paused", "outage")
    assert (state_of().stop, state_of().until, state_of().reason, state_of().by) == ("held", None, "outage", "rest:bob")
    resume(REMIND, by=BY)
    before = row.due_at
    row.refresh_from_db()
    assert row.due_at - before < 2 * MINUTE, "deadlines move by the hold, not by the pause before it"


@pytest.mark.parametrize("offset", ["", "+00:00"], ids=["naive", "aware"])
def test_times_in_histories_are_read_whatever_use_tz_was_when_they_were_written(order: Order, offset: str) -> None:
    row = reschedule_timeout(pending(order), hours=2)
    assert row is not None
    hold(REMIND, by=BY)
    row.refresh_from_db()
    row.history[-1]["at"] = f"2020-01-01T12:00:00{offset}"
    row.save(update_fields=["history"])
    held_for(HOUR)
    assert resume(REMIND, by=BY) is not None
    row.refresh_from_db()
    assert [event["what"] for event in row.history] == ["rescheduled", "hold_ended"]
    assert str(explain_timeout(order, REMIND)).count("2020-01-01") == 1


def release_that_dies(monkeypatch: pytest.MonkeyPatch, pages: int) -> None:
    """`resume`, by a process that dies after so many pages; so the page on which it dies is undone."""
    real, moved = policy_changes._move_rows, []

    def move(*arguments: Any) -> int:
        count = real(*arguments)
        moved.append(count)
        if len(moved) > pages:
            raise KeyboardInterrupt
        return count

    with monkeypatch.context() as patched:
        patched.setattr(policy_changes, "_move_rows", move)
        with pytest.raises(KeyboardInterrupt):
            resume(REMIND, by=BY, reason="over")


@pytest.mark.parametrize(
    ("pages", "who"),
    [(0, "a worker"), (1, "the operator"), (1, "a worker"), (2, "a worker after the clock was set back")],
)
def test_a_release_that_dies_half_way_moves_no_row_twice(monkeypatch: pytest.MonkeyPatch, pages: int, who: str) -> None:
    monkeypatch.setattr("django_delayq.sql.statements.CHUNK", 2)
    rows = many(6)
    Timeout.objects.update(created_at=timezone.now() - 5 * HOUR)
    hold(REMIND, by=BY)
    held_for(2 * HOUR)
    before = {row.pk: row.due_at for row in rows}
    release_that_dies(monkeypatch, pages)
    assert state_of().stop == "releasing"
    assert stops() == {REMIND}
    assert [row.due_at == before[row.pk] for row in Timeout.objects.order_by("pk")].count(False) == 2 * pages
    if who != "the operator":
        assert continue_moves("default", left_alone=ABANDONED_AFTER) == 0
        touched_at = timezone.now() + (-2 * ABANDONED_AFTER if who == "a worker" else HOUR)
        PolicyChange.objects.update(touched_at=touched_at)
        assert continue_moves("default", left_alone=ABANDONED_AFTER) == 1
    else:
        assert resume(REMIND, by=BY) is not None
    assert stops() == set()
    shifts = {row.due_at - before[row.pk] for row in Timeout.objects.all()}
    assert len(shifts) == 1
    assert 2 * HOUR <= shifts.pop() < 3 * HOUR
    assert PolicyChange.objects.filter(what="resumed").get().moved == 6
    assert all(len(row.history) == 1 for row in Timeout.objects.all())


def test_what_changes_during_a_release_is_left_alone(monkeypatch: pytest.MonkeyPatch, order: Order) -> None:
    monkeypatch.setattr("django_delayq.sql.statements.CHUNK", 1)
    many(2)
    last = pending(order)
    hold(REMIND, by=BY)
    held_for(2 * HOUR)
    release_that_dies(monkeypatch, 1)
    Timeout.objects.filter(pk=last.pk).update(
        state="cancelled", cause="hand", settled_at=timezone.now(), slot_taken=None
    )
    new = pending(order)
    change = resume(REMIND, by=BY)
    assert change is not None and change.moved == 2
    due_at = new.due_at
    new.refresh_from_db()
    assert new.due_at == due_at


def test_inside_a_transaction_the_moving_begins_after_its_commit(order: Order) -> None:
    row = pending(order)
    hold(REMIND, by=BY)
    held_for(HOUR)
    before = row.due_at
    with transaction.atomic():
        change = resume(REMIND, by=BY)
        row.refresh_from_db()
        assert change is not None and change.finished_at is None
        assert row.due_at == before
    row.refresh_from_db()
    assert row.due_at > before
    assert not state_of().is_stopped


def test_what_is_undone_was_never_in_force(order: Order) -> None:
    row = pending(order, seconds=0)
    with pytest.raises(RuntimeError), transaction.atomic():
        pause(REMIND, by=BY)
        assert stops() == {REMIND}
        raise RuntimeError
    controls.stop_cache.forget()
    assert planned(row) == [row.pk]
    assert changes() == []


def test_policies_that_are_joined_into_one_are_stopped_until_it_is_resumed(order: Order, declare: Declare) -> None:
    began = timezone.now() - HOUR
    stop = {"stop": "paused", "stopped_at": began, "changed_at": began, "by": "admin:bob", "reason": "outage"}
    PolicyControl.objects.create(policy="testapp.order.first", **stop)
    after = 7 * MINUTE
    PolicyControl.objects.create(policy="testapp.order.second", changed_at=timezone.now(), by=BY, after=after)
    joined = declare(Order, name="joined", after=HOUR, aliases=["first", "second"])
    assert stops() == {joined.label}
    state = controls.policy_state(joined, "default")
    assert (state.stop, state.stopped_at, state.by, state.reason) == ("paused", began, "admin:bob", "outage")
    assert state.after == after, "the newest one"
    row = pending(order, joined, seconds=0)
    assert planned(row) == []
    assert pause(joined, by=BY) is None, "it is paused"
    assert resume(joined, by=BY) is not None
    assert planned(row) == [row.pk]
    state = controls.policy_state(joined, "default")
    assert (state.stop, state.after) == ("", after)
    assert not PolicyControl.objects.exclude(stop="").exists()


@pytest.mark.parametrize("until", [[None, HOUR], [HOUR, None], [HOUR, 2 * HOUR], [2 * HOUR, HOUR]])
def test_of_the_stops_of_joined_policies_the_last_is_in_force(until: list[timedelta | None], declare: Declare) -> None:
    now = timezone.now()
    ends = [None if each is None else now + each for each in until]
    for name, end in zip(("first", "second"), ends, strict=True):
        PolicyControl.objects.create(policy=f"testapp.order.{name}", changed_at=now, stop="paused", until=end)
    joined = declare(Order, name="joined", after=HOUR, aliases=["first", "second"])
    last = None if None in ends else now + 2 * HOUR
    assert controls.policy_state(joined, "default").until == last
    assert controls.stop_cache.read("default") == {joined.label: last}
    pause(joined, by=BY, reason="another reason")
    assert controls.policy_state(joined, "default").until == last


def test_a_process_asks_once_a_second_what_is_stopped(order: Order, django_assert_num_queries: Any) -> None:
    row = pending(order, seconds=0)
    with django_assert_num_queries(2):
        plan({row.pk: 1}, "default")
    with django_assert_num_queries(1):
        plan({row.pk: 1}, "default")


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
    assert not state_of().is_stopped
    assert changes() == [("held", BY, "outage"), ("resumed", BY, "")]
    assert end_holds("default") == 0


@pytest.mark.parametrize("end", [lambda: end_holds("default"), lambda: resume(REMIND, by="admin:bob")])
def test_whoever_ends_it_later_moves_deadlines_by_its_length(order: Order, end: Callable[[], object]) -> None:
    row = pending(order)
    Timeout.objects.update(created_at=timezone.now() - 3 * HOUR)
    hold(REMIND, by=BY, until=timezone.now() + HOUR)
    over()
    later = pending(Order.objects.create())
    end()
    moved = dict(Timeout.objects.values_list("pk", "due_at"))
    assert moved == {row.pk: row.due_at + HOUR, later.pk: later.due_at}
    assert PolicyChange.objects.latest("id").moved == 1


def test_a_hold_that_is_not_over_or_was_extended_elsewhere_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controls, "CACHE_SECONDS", 600.0)
    hold(REMIND, by=BY, until=timezone.now() + HOUR)
    hold(LINGER, by=BY)
    assert end_holds("default") == 0
    assert stops() == {REMIND, LINGER}
    over()
    assert controls.stop_cache.recent("default").ended_holds()
    with transaction.atomic():
        assert end_holds("default") == 0, "a transaction ends first"
    PolicyControl.objects.update(until=timezone.now() + HOUR)
    assert end_holds("default") == 0
    assert state_of().stop == "held"


def test_the_end_of_a_hold_can_be_changed_and_removed() -> None:
    end = timezone.now() + HOUR
    assert hold(REMIND, by=BY, reason="outage", until=end) is not None
    began = state_of().stopped_at
    assert hold(REMIND, by="rest:bob") is None
    assert hold(REMIND, by=BY, until=end) is None
    assert hold(REMIND, by=BY, until=end + HOUR) is not None
    assert (state_of().until, state_of().reason, state_of().stopped_at) == (end + HOUR, "outage", began)
    assert hold(REMIND, by="rest:bob", reason="still down", until=None) is not None
    found = state_of()
    assert (found.until, found.stopped_at, found.reason, found.by) == (None, began, "still down", "rest:bob")


def test_a_stop_outlasts_one_that_ends_earlier_or_at_the_same_time(order: Order) -> None:
    end = timezone.now() + HOUR
    assert not outlasts(state_of(), end)
    pause(REMIND, by=BY, until=end)
    assert [outlasts(state_of(), until) for until in (end - HOUR / 2, end, end + HOUR, None)] == [
        True,
        True,
        False,
        False,
    ]
    hold(REMIND, by=BY)
    assert outlasts(state_of(), None) and outlasts(state_of(), end)


@pytest.mark.usefixtures("source", "frequent_sweeps")
def test_two_workers_resume_a_hold_at_its_end_and_its_timeouts_fire() -> None:
    hold(REMIND, by=BY, until=timezone.now() + DAY)
    due_orders("remind", 5)
    with running(2, concurrency=2):
        PolicyControl.objects.update(until=timezone.now())
        wait_until(lambda: Timeout.objects.filter(policy=REMIND, state="fired").count() == 5)
    assert PolicyChange.objects.filter(what="resumed").count() == 1


def test_a_burst_resumes_a_hold_at_its_end(source: str) -> None:
    hold(REMIND, by=BY, until=timezone.now() + DAY)
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
