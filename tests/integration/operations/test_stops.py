"""Pause, hold, resume: what fires, what moves, and by how much."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from django.utils import timezone

from django_delayq import (
    InvalidDelay,
    UnknownPolicy,
    clock,
    explain_timeout,
    get_policy,
    reschedule_timeout,
)
from django_delayq.firing import plan, run
from django_delayq.ledger import controls
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from django_delayq.operations import (
    PolicyConflict,
    change_delay,
    continue_moves,
    hold,
    pause,
    resume,
)
from django_delayq.operations import changes as policy_changes
from django_delayq.operations.changes import ABANDONED_AFTER
from tests.integration.operations.conftest import BY, pending
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

REMIND = "testapp.order.remind"
HOUR = timedelta(hours=1)


def state() -> controls.PolicyState:
    return controls.policy_state(get_policy(REMIND), "default")


def stops() -> set[str]:
    return set(controls.stop_cache.read("default"))


def changes() -> list[tuple[str, str, str]]:
    return list(PolicyChange.objects.order_by("id").values_list("what", "by", "reason"))


def held_for(length: timedelta) -> None:
    """As if the hold had begun earlier."""
    PolicyControl.objects.update(stopped_at=timezone.now() - length)


def test_a_paused_policy_is_released_and_the_others_are_not(order: Order) -> None:
    paused, other = pending(order, seconds=0), pending(order, "linger", seconds=0)
    pause(REMIND, by=BY, reason="the provider is down")
    works, report = plan({paused.pk: 1, other.pk: 1}, "default")
    assert [work.ids for work in works] == [(other.pk,)]
    assert report.now is not None
    assert report.again == {paused.pk: report.now + timedelta(seconds=controls.CACHE_SECONDS)}
    assert resume(REMIND, by=BY) is not None
    works, _ = plan({paused.pk: 1}, "default")
    assert [work.ids for work in works] == [(paused.pk,)]


def test_what_waits_for_a_thread_when_its_policy_is_paused_does_not_fire(order: Order) -> None:
    row = pending(order, seconds=0)
    works, _ = plan({row.pk: 1}, "default")
    pause(REMIND, by=BY)
    report = run(works[0], "default")
    assert report.fired == ()
    assert set(report.again) == {row.pk}
    row.refresh_from_db()
    assert (row.state, row.attempts) == ("pending", 0)


def test_a_pause_ends_by_itself_at_its_moment(order: Order) -> None:
    row = pending(order, seconds=0)
    until = timezone.now() + timedelta(seconds=20)
    pause(REMIND, by=BY, until=until)
    _, report = plan({row.pk: 1}, "default")
    assert report.again[row.pk] <= until
    assert state().until == until
    with clock.set_to(until):
        controls.stop_cache.forget()
        assert stops() == set()
        assert not state().is_stopped
        works, _ = plan({row.pk: 1}, "default")
        assert len(works) == 1
        assert resume(REMIND, by=BY) is None
        hold(REMIND, by=BY)
        assert state().stop == "held"


@pytest.mark.parametrize("until", [timedelta(0), timedelta(days=-1)])
def test_a_pause_that_would_be_over_already_is_refused(until: timedelta) -> None:
    with pytest.raises(InvalidDelay, match="in the past"):
        pause(REMIND, by=BY, until=timezone.now() + until)
    with pytest.raises(UnknownPolicy, match="remind"):
        pause("testapp.order.remin", by=BY)
    with pytest.raises(ValueError, match="who does it"):
        pause(REMIND, by="")
    for until_wrong in ("tomorrow", HOUR):
        with pytest.raises(InvalidDelay, match="until must be a datetime, not (str|timedelta)"):
            pause(REMIND, by=BY, until=until_wrong)  # type: ignore[arg-type]
    assert changes() == []
    assert stops() == set()


def test_a_pause_ends_after_its_beginning_by_the_clock_of_the_database(monkeypatch: pytest.MonkeyPatch) -> None:
    now = timezone.now()
    monkeypatch.setattr("django_delayq.ledger.controls.database_now", lambda using: now + HOUR)
    with pytest.raises(InvalidDelay, match="in the past"):
        pause(REMIND, by=BY, until=now + HOUR / 2)
    assert changes() == []
    monkeypatch.setattr("django_delayq.ledger.controls.database_now", lambda using: now - HOUR)
    assert pause(REMIND, by=BY, until=now - HOUR / 2) is not None


def test_every_change_is_kept_with_who_and_why() -> None:
    pause(REMIND, by=BY, reason="first")
    pause(REMIND, by="rest:bob", reason="longer", until=timezone.now() + HOUR)
    assert (state().by, state().reason) == ("rest:bob", "longer")
    resume(REMIND, by="cli:root", reason="over")
    hold(REMIND, by=BY)
    resume(REMIND, by=BY)
    assert changes() == [
        ("paused", BY, "first"),
        ("paused", "rest:bob", "longer"),
        ("resumed", "cli:root", "over"),
        ("held", BY, ""),
        ("resumed", BY, ""),
    ]
    assert not PolicyChange.objects.filter(finished_at=None).exists()
    assert resume(REMIND, by=BY) is None
    assert len(changes()) == 5


def test_pausing_again_keeps_the_end_and_the_reason_unless_given() -> None:
    until = timezone.now() + HOUR
    pause(REMIND, by=BY, reason="outage", until=until)
    began = state().stopped_at
    assert pause(REMIND, by="rest:bob") is None, "nothing changed"
    assert pause(REMIND, by="rest:bob", reason="outage", until=until) is None
    assert changes() == [("paused", BY, "outage")]
    assert (state().until, state().reason, state().by) == (until, "outage", BY)
    change = pause(REMIND, by="rest:bob", reason="a longer outage")
    assert change is not None
    assert change.details == {
        "until": until.isoformat(), "was": "paused", "since": began and began.isoformat(),
        "was_until": until.isoformat(), "was_reason": "outage",
    }  # fmt: skip
    assert (state().until, state().reason, state().by) == (until, "a longer outage", "rest:bob")
    pause(REMIND, by=BY, until=until + HOUR)
    assert (state().until, state().reason, state().by) == (until + HOUR, "a longer outage", BY)
    pause(REMIND, by=BY, until=None)
    assert (state().until, state().reason) == (None, "a longer outage")
    assert state().stopped_at == began


def test_a_pause_after_one_that_is_over_begins_anew(order: Order) -> None:
    until = timezone.now() + HOUR
    pause(REMIND, by=BY, reason="outage", until=until)
    with clock.set_to(until + HOUR):
        assert pause(REMIND, by="rest:bob") is not None
        assert (state().until, state().reason, state().by) == (None, "", "rest:bob")


def test_a_pause_becomes_a_hold_that_begins_now(order: Order) -> None:
    row = pending(order)
    Timeout.objects.update(created_at=timezone.now() - 5 * HOUR)
    pause(REMIND, by=BY, reason="outage", until=timezone.now() + HOUR)
    held_for(3 * HOUR)
    change = hold(REMIND, by="rest:bob")
    assert change is not None
    assert (change.what, change.details["was"], change.details["was_reason"]) == ("held", "paused", "outage")
    assert (state().stop, state().until, state().reason, state().by) == ("held", None, "outage", "rest:bob")
    resume(REMIND, by=BY)
    before = row.due_at
    row.refresh_from_db()
    assert row.due_at - before < timedelta(minutes=2), "deadlines move by the hold, not by the pause before it"


def test_holding_again_keeps_the_beginning_and_changes_the_reason_if_given() -> None:
    hold(REMIND, by=BY, reason="outage")
    began = state().stopped_at
    assert hold(REMIND, by="rest:bob") is None
    assert hold(REMIND, by="rest:bob", reason="still down") is not None
    assert (state().stopped_at, state().reason, state().by) == (began, "still down", "rest:bob")


def test_a_hold_ends_by_resuming_and_not_by_a_pause() -> None:
    hold(REMIND, by=BY)
    with pytest.raises(PolicyConflict, match="on hold: resume it first"):
        pause(REMIND, by=BY)
    assert [what for what, *_ in changes()] == ["held"]


def test_another_delay_leaves_a_pause_its_name_and_its_reason() -> None:
    label = "testapp.order.cancel_unpaid"
    pause(label, by=BY, reason="outage")
    change_delay(label, HOUR, by="rest:bob", reason="holidays")
    found = controls.policy_state(get_policy(label), "default")
    assert (found.by, found.reason, found.after) == (BY, "outage", HOUR)


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


def test_a_hold_may_end_without_a_shift(order: Order) -> None:
    row = pending(order)
    hold(REMIND, by=BY)
    held_for(HOUR)
    change = resume(REMIND, by=BY, shift=False)
    assert change is not None and change.moved == 0
    before = row.due_at
    row.refresh_from_db()
    assert row.due_at == before


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


@pytest.mark.parametrize("pages", [0, 1, 2])
@pytest.mark.parametrize("who", ["the operator", "a worker", "a worker after the clock was set back"])
def test_a_release_that_dies_half_way_moves_no_row_twice(monkeypatch: pytest.MonkeyPatch, pages: int, who: str) -> None:
    monkeypatch.setattr("django_delayq.sql.statements.CHUNK", 2)
    rows = [pending(Order.objects.create()) for _ in range(6)]
    Timeout.objects.update(created_at=timezone.now() - 5 * HOUR)
    hold(REMIND, by=BY)
    held_for(2 * HOUR)
    before = {row.pk: row.due_at for row in rows}
    release_that_dies(monkeypatch, pages)
    assert state().stop == "releasing"
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


def test_a_row_that_is_settled_or_scheduled_during_a_release_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, order: Order
) -> None:
    monkeypatch.setattr("django_delayq.sql.statements.CHUNK", 1)
    for _ in range(2):
        pending(Order.objects.create())
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
    assert not state().is_stopped


def test_what_is_undone_was_never_in_force(order: Order) -> None:
    row = pending(order, seconds=0)
    with pytest.raises(RuntimeError), transaction.atomic():
        pause(REMIND, by=BY)
        assert stops() == {REMIND}
        raise RuntimeError
    controls.stop_cache.forget()
    works, _ = plan({row.pk: 1}, "default")
    assert len(works) == 1
    assert changes() == []


def test_the_story_says_that_it_is_paused_and_by_whom(order: Order) -> None:
    row = pending(order, seconds=0)
    pause(REMIND, by=BY, reason="the provider is down")
    assert "paused by admin:alice" in explain_timeout(row).outlook
    assert "(the provider is down)" in explain_timeout(row).outlook
    resume(REMIND, by=BY)
    hold(REMIND, by="rest:bob")
    assert "held by rest:bob" in explain_timeout(row).outlook
    resume(REMIND, by=BY)
    assert "due at" in explain_timeout(row).outlook


def test_a_pause_survives_the_renaming_of_its_policy(order: Order, declare: Any) -> None:
    PolicyControl.objects.create(policy="testapp.order.old_name", stop="paused", changed_at=timezone.now())
    renamed = declare(Order, name="new_name", aliases=["old_name"])
    assert stops() == {"testapp.order.new_name"}
    assert controls.policy_state(renamed, "default").is_stopped
    row = pending(order, renamed, seconds=0)
    assert plan({row.pk: 1}, "default")[0] == []
    assert resume(renamed, by=BY) is not None
    assert len(plan({row.pk: 1}, "default")[0]) == 1
    assert PolicyControl.objects.count() == 1


def test_policies_that_are_joined_into_one_are_stopped_until_it_is_resumed(order: Order, declare: Any) -> None:
    began = timezone.now() - HOUR
    stop = {"stop": "paused", "stopped_at": began, "changed_at": began, "by": "admin:bob", "reason": "outage"}
    PolicyControl.objects.create(policy="testapp.order.first", **stop)
    after = timedelta(minutes=7)
    PolicyControl.objects.create(policy="testapp.order.second", changed_at=timezone.now(), by=BY, after=after)
    joined = declare(Order, name="joined", after=HOUR, aliases=["first", "second"])
    state = controls.policy_state(joined, "default")
    assert (state.stop, state.stopped_at, state.by, state.reason) == ("paused", began, "admin:bob", "outage")
    assert state.after == after, "the newest one"
    row = pending(order, joined, seconds=0)
    assert plan({row.pk: 1}, "default")[0] == []
    assert pause(joined, by=BY) is None, "it is paused"
    assert resume(joined, by=BY) is not None
    assert len(plan({row.pk: 1}, "default")[0]) == 1
    state = controls.policy_state(joined, "default")
    assert (state.stop, state.after) == ("", after)
    assert not PolicyControl.objects.exclude(stop="").exists()


@pytest.mark.parametrize("until", [[None, HOUR], [HOUR, None], [HOUR, 2 * HOUR], [2 * HOUR, HOUR]])
def test_of_the_stops_of_joined_policies_the_one_that_ends_last_is_in_force(
    until: list[timedelta | None], declare: Any
) -> None:
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
