"""The deadline of a timeout whose clock stops and runs is that of an accountant who counts its time step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import transaction
from django.db.models import Q
from hypothesis import given
from hypothesis import strategies as st

import django_delayq as dq
from django_delayq import clock, operations
from django_delayq.arming.holding import end_holds_by_hand
from django_delayq.ledger.controls import stop_cache
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from django_delayq.policy.policies import registry
from tests.support.examples import examples
from tests.testapp.models import Order

pytestmark = [pytest.mark.slow, pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
STEP = timedelta(minutes=15)
T0 = datetime(2030, 1, 7, 9, tzinfo=UTC)  # a Monday, at the opening
OFFICE = dq.WorkingHours("UTC", {"mon-fri": ("09:00-12:00", "13:00-17:00")})
SPANS: dict[str, tuple[Any, Callable[[datetime], bool]]] = {
    "real time": (timedelta(hours=6), lambda moment: True),
    "open hours": (dq.Working(hours=6, calendar=OFFICE), lambda moment: OFFICE.next_open(moment) == moment),
}
BUDGET = timedelta(hours=6)


@dataclass
class Accountant:
    """Counts the rest of the time of one round, in steps of a quarter of an hour."""

    counts: Callable[[datetime], bool]
    left: timedelta = BUDGET
    used: timedelta = timedelta(0)
    reasons: set[str] = field(default_factory=set)
    """Why its clock is stopped: "talks", "hand", "until", or "policy"."""
    is_there: bool = True
    kept: bool = False
    """It was cancelled while it was held, so that its time does not run while it is away."""

    def pass_step(self, now: datetime) -> None:
        is_running = not self.reasons if self.is_there else not self.kept and "policy" not in self.reasons
        if is_running and self.counts(now):
            self.left, self.used = self.left - STEP, self.used + STEP

    def deadline(self, now: datetime) -> datetime:
        """Return when nothing is left if its clock runs from now on: the end of the last open step."""
        left, at = self.left, now
        while left > timedelta(0):
            if self.counts(at):
                left -= STEP
            at += STEP
        return at


def check_progress(order: Order, policy: Any, book: Accountant, history: list[str]) -> None:
    """Compare what has been used with the account, and whether the clock runs."""
    seen = dq.get_progress(order, policy)
    if not book.is_there:
        assert seen is None
        return
    assert seen is not None
    found = (seen.used, seen.left, seen.total, seen.share, seen.running)
    total = book.used + book.left
    assert found == (book.used, book.left, total, book.used / total, not book.reasons), history


def play(order: Order, policy: Any, book: Accountant, what: str, now: datetime) -> None:
    """Do one thing to the timeout and to the account."""
    if what in {"talk", "end talk"}:
        order.note = "talks" if what == "talk" else ""
        order.save()
        if book.is_there:
            book.reasons = book.reasons - {"talks"} | ({"talks"} if what == "talk" else set())
    elif what == "stop policy":
        operations.hold(policy, by="admin:a")
        book.reasons.add("policy")
    elif what == "resume policy":
        operations.resume(policy, by="admin:a")
        book.reasons.discard("policy")
    elif what == "return" and not book.is_there:
        order.status = "unpaid"
        order.save()
        book.is_there = True
        book.reasons |= {"talks"} if order.note else set()
    elif book.is_there:
        play_by_hand(order, policy, book, what, now)


def play_by_hand(order: Order, policy: Any, book: Accountant, what: str, now: datetime) -> None:
    """Do one thing to the timeout that is there."""
    if what == "hold":
        dq.hold_timeout(order, policy)
        book.reasons = book.reasons - {"until"} | {"hand"}
    elif what == "hold until":
        dq.hold_timeout(order, policy, until=now + 2 * STEP)
        book.reasons = book.reasons - {"hand"} | {"until"}
    elif what == "resume":
        dq.resume_timeout(order, policy)
        book.reasons -= {"hand", "until"}
    elif what == "extend":
        dq.extend_timeout(order, policy, after=policy.after)
        book.left = max(book.left, timedelta(0)) + BUDGET if book.reasons else book.left + BUDGET
    elif what == "leave":
        order.status = "paid"
        order.save()
        book.is_there, book.kept = False, bool(book.reasons - {"policy"})
        book.reasons &= {"policy"}


@contextmanager
def declared(after: Any) -> Iterator[Any]:
    policy = dq.timeout_policy(
        Order, name="counted", after=after, since="created_at", when=Q(status="unpaid"), hold_when=Q(note="talks")
    )(lambda order, timeout: None)
    try:
        yield policy
    finally:
        registry.remove(policy)


THINGS = [
    *("talk", "end talk", "hold", "hold until", "resume", "extend", "stop policy", "resume policy", "leave"),
    *("return", "", "", ""),
]


@pytest.mark.parametrize("span", SPANS)
@examples(10)
@given(history=st.lists(st.sampled_from(THINGS), max_size=22))
def test_the_deadline_is_that_of_an_accountant(span: str, history: list[str]) -> None:
    after, counts = SPANS[span]
    book, now = Accountant(counts), T0
    with declared(after) as policy:
        for model in (Timeout, PolicyControl, PolicyChange, Order):
            model.objects.all().delete()
        stop_cache.forget()
        with clock.set_to(now):
            order = Order.objects.create(created_at=now)
        ends: datetime | None = None
        for what in history:
            with clock.set_to(now):
                play(order, policy, book, what, now)
                if what == "hold until" and book.is_there:
                    ends = now + 2 * STEP
                elif what in {"hold", "resume", "leave"}:
                    ends = None
                check_progress(order, policy, book, history)
                if book.left <= timedelta(0) and not book.reasons:
                    break  # it would fire
            book.pass_step(now)
            now += STEP
            if ends is not None and now >= ends:
                with clock.set_to(now):
                    end_holds_by_hand("default")
                book.reasons.discard("until")
                ends = None
        with clock.set_to(now):
            if not book.is_there:
                play(order, policy, book, "return", now)
            for reason in sorted(book.reasons):
                done = {"talks": "end talk", "hand": "resume", "until": "resume", "policy": "resume policy"}[reason]
                play(order, policy, book, done, now)
            row = Timeout.objects.filter(policy=policy.label).latest("pk")
        assert row.state == "pending", history
        if book.left > timedelta(0):
            assert row.due_at == book.deadline(now), (history, book.left)
        else:
            assert row.due_at <= now, history
    assert not transaction.get_connection().in_atomic_block
