"""Pause, hold, resume, and guard rails: what is in force, what fires, what moves, and by how much."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
from django.db import transaction
from django.utils import timezone

from django_delayq import (
    Brake,
    InvalidDelay,
    Late,
    Retry,
    UnknownPolicy,
    clock,
    explain_timeout,
    get_policy,
    operations,
)
from django_delayq.firing import plan, run
from django_delayq.firing.handler import set_checkpoint_hook
from django_delayq.ledger import controls
from django_delayq.ledger.controls import PolicyState, policy_state, policy_states
from django_delayq.ledger.marking import can_mark_at_once
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from django_delayq.operations import changes as policy_changes
from django_delayq.operations import continue_moves, hold, pause, resume
from django_delayq.operations.changes import ABANDONED_AFTER
from django_delayq.operations.policies import end_holds, outlasts
from django_delayq.worker.lines import Lines
from django_delayq.worker.servers import ClockSkew
from django_delayq.worker.sources.ledger import LedgerSource
from tests.integration.firing.conftest import another_session, fire, in_another_thread, needs_row_locks
from tests.integration.firing.conftest import as_in_a_new_process as no_pace  # noqa: F401 - a fixture
from tests.integration.operations.conftest import BY, changes, held_for, many, pending, running, said, state_of, stops
from tests.integration.operations.names import DAY, HOUR, LINGER, MINUTE, REMIND, Declare
from tests.support.waiting import wait_until
from tests.support.workers import due_orders
from tests.testapp.models import Effect, Order

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("no_pace")]


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


@pytest.mark.parametrize("stop", [pause, hold])
def test_stopping_again_keeps_the_beginning_and_what_is_not_given(stop: Callable[..., Any]) -> None:
    until = timezone.now() + HOUR
    stop(REMIND, by=BY, reason="outage", until=until)
    began = state_of().stopped_at
    assert stop(REMIND, by="rest:bob") is stop(REMIND, by="rest:bob", reason="outage", until=until) is None
    assert len(changes()) == 1
    assert (state_of().until, state_of().reason, state_of().by) == (until, "outage", BY)
    assert stop(REMIND, by="rest:bob", reason="a longer outage") is not None
    assert (state_of().until, state_of().reason, state_of().by) == (until, "a longer outage", "rest:bob")
    stop(REMIND, by=BY, until=None)
    assert (state_of().until, state_of().reason, state_of().stopped_at) == (None, "a longer outage", began)


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


@pytest.mark.parametrize(("pages", "who"), [(0, "a worker"), (1, "the operator"), (2, "a worker")])
def test_a_release_that_dies_half_way_moves_no_row_twice(monkeypatch: pytest.MonkeyPatch, pages: int, who: str) -> None:
    monkeypatch.setattr("django_delayq.sql.statements.CHUNK", 2)
    rows = many(6)
    Timeout.objects.update(created_at=timezone.now() - 5 * HOUR)
    hold(REMIND, by=BY)
    held_for(2 * HOUR)
    before = {row.pk: row.due_at for row in rows}
    real, moved = policy_changes._move_rows, []

    def move(*arguments: Any) -> int:
        moved.append(real(*arguments))
        if len(moved) > pages:
            raise KeyboardInterrupt  # the page on which it dies is undone
        return moved[-1]

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(policy_changes, "_move_rows", move)
        resume(REMIND, by=BY, reason="over")
    assert state_of().stop == "releasing"
    assert stops() == {REMIND}
    assert [row.due_at == before[row.pk] for row in Timeout.objects.order_by("pk")].count(False) == 2 * pages
    if who != "the operator":
        assert continue_moves("default", left_alone=ABANDONED_AFTER) == 0
        PolicyChange.objects.update(touched_at=timezone.now() - 2 * ABANDONED_AFTER)
        assert continue_moves("default", left_alone=ABANDONED_AFTER) == 1
    else:
        assert resume(REMIND, by=BY) is not None
    assert stops() == set()
    shifts = {row.due_at - before[row.pk] for row in Timeout.objects.all()}
    assert len(shifts) == 1
    assert 2 * HOUR <= shifts.pop() < 3 * HOUR
    assert PolicyChange.objects.filter(what="resumed").get().moved == 6
    assert all(len(row.history) == 1 for row in Timeout.objects.all())


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


def test_a_stop_outlasts_one_that_ends_earlier_or_at_the_same_time(order: Order) -> None:
    end = timezone.now() + HOUR
    assert not outlasts(state_of(), end)
    pause(REMIND, by=BY, until=end)
    ends = (end - HOUR / 2, end, end + HOUR, None)
    assert [outlasts(state_of(), until) for until in ends] == [True, True, False, False]
    hold(REMIND, by=BY)
    assert outlasts(state_of(), None) and outlasts(state_of(), end)


@pytest.mark.usefixtures("source")
def test_two_workers_resume_a_hold_at_its_end_and_its_timeouts_fire(settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "SWEEP_INTERVAL": timedelta(milliseconds=200)}
    hold(REMIND, by=BY, until=timezone.now() + DAY)
    due_orders("remind", 5)
    with running(2, concurrency=2):
        PolicyControl.objects.update(until=timezone.now())
        wait_until(lambda: Timeout.objects.filter(policy=REMIND, state="fired").count() == 5)
    assert PolicyChange.objects.filter(what="resumed").count() == 1


LABEL = "testapp.order.guarded"
LATE = {"after": 3600, "then": "skip"}
DECLARED: tuple[Late, Brake, int] = (Late(HOUR), Brake(500, HOUR), 100)


@pytest.fixture
def guarded(declare: Any) -> None:
    declare(Order, name="guarded", late=DECLARED[0], brake=DECLARED[1], shadow=True)


def in_force(state: PolicyState | None = None) -> tuple[Late | None, Brake | None, int]:
    state = state or policy_state(LABEL, "default")
    return state.late, state.brake, state.shadow


@pytest.mark.parametrize(
    ("guards", "expected"),
    [
        ({}, DECLARED),
        ({"late": None, "brake": None, "shadow": 0}, (None, None, 0)),
        ({"late": {"after": 0.5, "then": "dead"}}, (Late(HOUR / 7200, "dead"), *DECLARED[1:])),
        ({"brake": {"most": 7, "per": 60}, "shadow": 10}, (DECLARED[0], Brake(7, HOUR / 60), 10)),
        *((wrong, DECLARED) for wrong in ({"late": {"after": "soon"}}, {"brake": 5}, ["late"], {"shadow": None})),
    ],
)
def test_what_an_operator_has_set_replaces_what_is_declared(guarded: None, guards: Any, expected: Any) -> None:
    now = timezone.now()
    PolicyControl.objects.create(policy=LABEL, guards=guards, changed_at=now, stop="paused", until=now - HOUR)
    assert in_force() == expected
    (listed,) = [state for state in policy_states("default") if state.label == LABEL]
    assert in_force(listed) == expected, "also after a pause that has ended by itself"
    assert not listed.is_stopped


def test_the_actor_and_the_reason_of_a_stop_stay_while_guards_are_changed(guarded: None) -> None:
    operations.pause(LABEL, by="brake", reason="501 fired in 10 minutes")
    operations.brake(LABEL, most=1000, per=HOUR, by=BY, reason="it was a campaign")
    state = policy_state(LABEL, "default")
    assert (state.is_braked, state.by, state.reason) == (True, "brake", "501 fired in 10 minutes")
    operations.pause(LABEL, by=BY, reason="wait for Ann")
    assert not policy_state(LABEL, "default").is_braked, "an operator has paused it now"
    operations.resume(LABEL, by=BY)
    assert in_force()[1] == Brake(1000, HOUR)


@pytest.mark.parametrize(
    ("operation", "values", "stored", "before"),
    [
        ("late", {"after": 6 * HOUR, "then": "dead"}, {"after": 21600, "then": "dead"}, LATE),
        ("brake", {"off": True}, None, {"most": 500, "per": 3600}),
        ("shadow", {"share": 0}, 0, 100),
    ],
)
def test_a_guard_is_set_and_declared_again_and_each_change_is_stored(
    guarded: None, operation: str, values: dict[str, Any], stored: Any, before: Any
) -> None:
    call = getattr(operations, operation)
    change = call(LABEL, by=BY, reason="a wrong price", **values)
    assert (change.what, change.by, change.reason) == (operation, BY, "a wrong price")
    assert change.details == {"before": before, "after": stored, "declared": False}
    assert change.finished_at is not None
    assert PolicyControl.objects.get().guards == {operation: stored, "by": {operation: BY}}
    state = policy_state(LABEL, "default")
    assert [state.set_by(guard) for guard in sorted({"late", "brake", "shadow"} - {operation})] == ["", ""]
    assert state.set_by(operation) == BY and not state.is_stopped
    assert call(LABEL, by=BY, **values) is None, "it is in force already"
    declared = call(LABEL, by="cli:bob", **({"share": None} if operation == "shadow" else {}))
    assert declared.details == {"before": stored, "after": before, "declared": True}
    assert in_force() == DECLARED
    assert policy_state(LABEL, "default").set_by(operation) == ""
    assert PolicyControl.objects.get().guards == {}
    with pytest.raises(ValueError, match="either off=True or Late"):
        operations.late(LABEL, after=HOUR, off=True, by=BY)
    with pytest.raises(UnknownPolicy):
        operations.shadow("testapp.order.guardet", share=1, by=BY)
    assert list(PolicyChange.objects.order_by("id").values_list("by", flat=True)) == [BY, "cli:bob"]


# What was stopped when a firing locked its row does not fire: the stop is committed in another session, at a step of
# the firing after all reads of the cache. On SQLite a firing is the only writer: a stop is before or after it.


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
