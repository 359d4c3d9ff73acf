"""By how much a hold moves each deadline when it ends."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq import clock, extend_timeouts, get_deadline, pending_timeouts
from django_delayq.models import Timeout
from django_delayq.operations import hold, postpone, resume
from tests.integration.operations.conftest import BY, held_for, pending, said, state_of
from tests.integration.operations.names import HOUR, MINUTE, REMIND, Declare
from tests.testapp.models import Order

BEGAN = timezone.now()
pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]


def test_a_hold_moves_what_is_pending_by_what_it_has_lived_through(order: Order) -> None:
    old, new, other = pending(order), pending(Order.objects.create()), pending(order, "linger")
    now = timezone.now()
    Timeout.objects.filter(pk=old.pk).update(created_at=now - 3 * HOUR, run_at=old.run_at + HOUR, attempts=1)
    hold(REMIND, by=BY, reason="outage")
    held_for(2 * HOUR)
    Timeout.objects.filter(pk=new.pk).update(created_at=now - HOUR / 2)
    before = {row.pk: (row.due_at, row.run_at) for row in Timeout.objects.all()}
    change = resume(REMIND, by=BY, reason="over")
    assert change is not None and change.finished_at is not None
    assert (change.moved, change.unmoved) == (2, 0)
    assert not state_of().is_stopped
    after = {row.pk: (row.due_at - before[row.pk][0], row.run_at - before[row.pk][1]) for row in Timeout.objects.all()}
    assert after[other.pk] == (timedelta(0), timedelta(0))
    for pk, length in ((old.pk, 2 * HOUR), (new.pk, HOUR / 2)):
        assert after[pk][0] == after[pk][1]
        assert length <= after[pk][0] < length + 2 * MINUTE
    assert said(old) == [("hold_ended", BY, "outage; over")]
    assert "moved by the hold of its policy, to" in str(dq.explain_timeout(old))


@pytest.mark.parametrize(
    ("delay", "to", "due"),
    [
        (0.5, {"at": 14 * HOUR}, 15 * HOUR),  # like one that is rescheduled: by the rest of the hold
        (0.5, {"hours": 2}, 15 * HOUR),  # it counts from now, because its deadline has passed
        (13, {"at": 14 * HOUR}, 15 * HOUR),  # also if its deadline has not passed
        (20, {"hours": 2}, 35 * HOUR),  # it counts from the deadline before, which the whole hold moves
    ],
    ids=["to a datetime", "from now", "future to a datetime", "future by hours"],
)
def test_what_is_postponed_is_moved_by_the_rest(order: Order, delay: float, to: dict[str, Any], due: timedelta) -> None:
    began = timezone.now()
    with clock.set_to(began):
        row = pending(order, hours=delay)
        hold(REMIND, by=BY)
    with clock.set_to(began + 12 * HOUR):
        given = {name: began + value if name == "at" else value for name, value in to.items()}
        assert postpone(row, by=BY, **given).changed == 1
    with clock.set_to(began + 13 * HOUR):
        resume(REMIND, by=BY)
    row.refresh_from_db()
    assert row.due_at - began == row.run_at - began == due


def at(hours: float, *acts: Callable[[], object]) -> None:
    with clock.set_to(BEGAN + hours * HOUR):
        for act in acts:
            act()


def save(order: Order, status: str) -> None:
    order.status = status
    order.save()


@pytest.mark.parametrize(
    ("after", "granted", "shift"),
    [(HOUR, 0, False), (lambda order: HOUR, 1, True)],
    ids=["not moved", "of a function, and extended"],
)
def test_what_is_armed_again_during_or_after_a_hold_loses_as_little_of_its_time_as_the_others(
    declare: Declare, after: Any, granted: int, shift: bool
) -> None:
    """The payment provider is down. A payment that is tried takes the order out of the condition and back."""
    policy = declare(Order, name="wait", after=after, since="created_at", when=Q(status="waiting"))
    with clock.set_to(BEGAN):
        quiet, *tried = (Order.objects.create(status="waiting", created_at=BEGAN) for _ in range(4))
    during, early, late = tried
    if granted:
        at(0.1, lambda: extend_timeouts(pending_timeouts([quiet, *tried], policy), hours=granted))
    at(0.2, lambda: save(early, "paying"))
    at(0.25, lambda: hold(policy, by=BY))
    at(2, lambda: save(late, "paying"), lambda: save(during, "paying"))
    at(2.5, lambda: save(during, "waiting"))
    with clock.set_to(BEGAN + 2.5 * HOUR):
        new = Order.objects.create(status="waiting", created_at=BEGAN + 2.5 * HOUR)
    at(3, lambda: resume(policy, by=BY, shift=shift))
    at(3, lambda: save(early, "waiting"), lambda: save(late, "waiting"))
    held = HOUR * 11 / 4 if shift else timedelta(0)
    deadlines = {get_deadline(order, policy) for order in (quiet, *tried)}
    assert deadlines == {BEGAN + HOUR + granted * HOUR + held}
    assert get_deadline(new, policy) == BEGAN + 3.5 * HOUR + (HOUR / 2 if shift else timedelta(0)), "it began later"
    at(3.125, lambda: hold(policy, by=BY))
    at(4.125, lambda: resume(policy, by=BY))
    # One that had passed is due when the hold ends.
    moved = {max(due + HOUR, BEGAN + 4.125 * HOUR) for due in deadlines if due}
    assert {get_deadline(order, policy) for order in (quiet, *tried)} == moved
