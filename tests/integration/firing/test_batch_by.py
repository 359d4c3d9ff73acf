"""`batch_by`: one call for all due timeouts of one value, whatever a worker has leased, and whatever dies or meets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import QuerySet

import django_delayq as dq
from django_delayq import clock, schedule_timeouts
from django_delayq.conf import get_settings
from django_delayq.firing import Report, Work, judge, plan, run
from django_delayq.firing.handler import set_checkpoint_hook
from django_delayq.models import Timeout
from django_delayq.testing import fire_due
from tests.e2e.races.sessions import needs_row_locks
from tests.integration.firing.conftest import fire, in_another_thread, locking, state, work_of
from tests.integration.firing.handlers import WAIT, Declare, Patch, once_at
from tests.integration.firing.rows import FIRED, PENDING
from tests.integration.firing.test_crashes import INSIDE
from tests.support.workers import needs_more_connections
from tests.testapp.market import Channel, Merchant, Purchase

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
Policy = dq.TimeoutPolicy[Any]
Shops = list[Channel]


class Calls:
    """A handler that notes each call: the shop of each object."""

    def __init__(self) -> None:
        self.all: list[list[int | None]] = []

    def __call__(self, purchases: QuerySet[Purchase], timeouts: list[Timeout]) -> None:
        assert [str(purchase.pk) for purchase in purchases] == [timeout.object_id for timeout in timeouts]
        self.all.append([purchase.channel_id for purchase in purchases])

    @property
    def sizes(self) -> list[int]:
        return [len(call) for call in self.all]


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def shops() -> Shops:
    return Channel.objects.bulk_create(Channel(merchant=Merchant.objects.create(name=name)) for name in "ABC")


@pytest.fixture
def by(declare: Declare, calls: Calls) -> Callable[..., Policy]:
    """Declare a policy whose handler is called once for all purchases of a shop."""

    def make(handler: Any = calls, **options: Any) -> Policy:
        return declare(Purchase, handler, **{"name": "by", "batch": 50, "batch_by": "channel", **options})

    return make


@pytest.fixture
def policy(by: Any) -> Policy:
    return by()  # type: ignore[no-any-return]


def due_of(policy: Policy, shop: Channel | None, count: int = 1, **delay: Any) -> list[Timeout]:
    """So many due timeouts of a shop, in due order."""
    purchases = [Purchase.objects.create(channel=shop) for _ in range(count)]
    schedule_timeouts(purchases, policy, **(delay or {"seconds": 0}))
    rows = Timeout.objects.filter(object_id__in=[str(purchase.pk) for purchase in purchases])
    return list(rows.order_by("run_at", "id"))


def run_of(*rows: Timeout) -> Report:
    return run(work_of(*rows), "default")


def test_a_leased_timeout_fires_with_all_due_ones_of_its_value(by: Any, shops: Shops, calls: Calls) -> None:
    policy, other = by(aliases=("then",)), by(name="other")
    rows, later = due_of(policy, shops[0], 20), due_of(policy, shops[0], 3, minutes=1)
    not_due = [*due_of(policy, shops[1], 20), *due_of(other, shops[0], 2)]
    Timeout.objects.filter(pk__in=[row.pk for row in rows[:2]]).update(policy="testapp.purchase.then")
    first, second = work_of(*rows[4:7]), work_of(*rows[7:9])
    report = run(first, "default")
    assert calls.all == [[shops[0].pk] * 20]
    assert {state(row) for row in rows} == {FIRED}
    assert set(report.fired) == {row.pk for row in rows}
    assert {state(row) for row in not_due} == {PENDING}
    report = run(second, "default")  # which is acknowledged
    assert (sorted(report.done), report.fired, report.again) == (sorted(second.ids), (), {})
    assert sorted(report.before) == sorted(second.ids)
    with clock.set_to(clock.now() + timedelta(minutes=2)):
        run_of(later[0])
    assert calls.sizes == [20, 3]


def test_a_call_has_no_two_values(policy: Policy, declare: Declare, shops: Shops, calls: Calls) -> None:
    rows = [row for _ in range(2) for shop in shops for row in due_of(policy, shop)]
    works, _ = plan({row.pk: 1 for row in rows}, "default")
    assert [(work.share, len(work.ids)) for work in works] == [(str(shop.pk), 2) for shop in shops]
    assert not {"share", "only", "alone"} & works[0].as_dict().keys()
    [foreign] = due_of(declare(Purchase, name="other", batch=5), shops[0])
    named = [*rows, *due_of(policy, None, 2), foreign]
    work = Work(policy.label, tuple(row.pk for row in named), tuple(row.object_id for row in named))
    report = run(work, "default")
    assert calls.all == [[None], [None], *([shop.pk] * 2 for shop in shops)]
    assert (foreign.pk in report.again, state(foreign)) == (True, PENDING)


def test_the_value_of_an_object_with_another_owner_is_corrected(policy: Policy, shops: Shops, calls: Calls) -> None:
    rows, others = due_of(policy, shops[0], 3), due_of(policy, shops[1], 2)
    Purchase.objects.filter(pk=rows[1].object_id).update(channel=shops[1])
    report = run_of(rows[1])
    assert calls.all == [[shops[0].pk] * 2]
    assert set(report.again) == {rows[1].pk}
    assert report.untried == (rows[1].pk,)
    assert (state(rows[1]), rows[1].share) == (PENDING, str(shops[1].pk))
    run_of(rows[1])
    assert calls.all[1:] == [[shops[1].pk] * 3]
    assert {state(row) for row in [*rows, *others]} == {FIRED}


@pytest.mark.parametrize("hangs", [False, True])
def test_a_call_that_raises_or_takes_too_long_is_repeated_with_each_alone(by: Any, shops: Shops, hangs: bool) -> None:
    sizes, bad, end = list[int](), list[str](), threading.Event()

    def handler(purchases: QuerySet[Purchase], timeouts: list[Timeout]) -> None:
        sizes.append(len(timeouts))
        if hangs and len(timeouts) > 1:
            end.wait(WAIT)
        elif any(timeout.object_id in bad for timeout in timeouts):
            raise ValueError("bad")

    policy = by(handler, retry=dq.Retry([60]), limits=dq.Limits(run=timedelta(seconds=0.3)) if hangs else None)
    rows = due_of(policy, shops[0], 4)
    bad.append(rows[2].object_id)
    try:
        report = run_of(rows[0])
    finally:
        end.set()
    assert sizes == [4, 1, 1, 1, 1]
    assert [(state(row)[0], row.attempts) for row in rows] == [("pending" if n == 2 else "fired", 1) for n in range(4)]
    assert (report.again, rows[0].pk in report.done) == ({}, True), "only those of the work are reported"
    assert set(report.errors) == {rows[2].pk}


def test_fire_due_makes_one_call_for_each_value(policy: Policy, shops: Shops, calls: Calls) -> None:
    rows = [row for shop in shops for row in due_of(policy, shop, 5)]
    assert fire_due(policy, Purchase.objects.get(pk=rows[1].object_id)) == 1
    assert (fire_due(policy, limit=2), calls.sizes) == (2, [1, 2])
    assert (fire_due(), sorted(calls.sizes)) == (12, [1, 2, 2, 5, 5])


def test_a_suspect_is_not_gathered_with_others_of_its_value(policy: Policy, shops: Shops, calls: Calls) -> None:
    rows, noted_at = due_of(policy, shops[0], 5), clock.now()
    Timeout.objects.filter(pk=rows[1].pk).update(deaths=1)
    run_of(rows[0])
    fire(rows[1])
    assert calls.sizes == [4, 1]
    [other] = due_of(policy, shops[0])
    Timeout.objects.filter(pk=other.pk).update(suspected_at=noted_at)
    assert plan({other.pk: 1}, "default")[1].again == {other.pk: noted_at + get_settings().lease}


def test_after_a_death_they_are_one_call_still_and_after_two_alone(policy: Policy, shops: Shops, calls: Calls) -> None:
    rows, others = due_of(policy, shops[0], 4), due_of(policy, shops[1], 2)
    works, _ = plan({row.pk: 2 for row in [*rows[:3], *others]}, "default")
    assert [(work.suspect, len(work.ids)) for work in works] == [(True, 3), (True, 2)]

    def die(reached: str) -> None:
        if reached == "handled":
            raise KeyboardInterrupt

    set_checkpoint_hook(die)
    with pytest.raises(KeyboardInterrupt):
        run(works[0], "default")
    set_checkpoint_hook(None)
    assert calls.all == [[shops[0].pk] * 4]
    assert {(state(row), row.suspected_at is None) for row in rows} == {(PENDING, False)}
    Timeout.objects.update(suspected_at=clock.now() - timedelta(days=1))
    fire(*rows, deliveries=3)
    assert calls.sizes == [4, 1, 1, 1, 1]
    assert {(state(row), row.deaths) for row in rows} == {(FIRED, 1)}


@needs_row_locks
@needs_more_connections
@pytest.mark.parametrize("step", [step for step in INSIDE if step != "planned"])
def test_a_second_firing_meets_the_first_at_each_step(step: str, policy: Policy, shops: Shops, calls: Calls) -> None:
    rows, others = due_of(policy, shops[0], 10), due_of(policy, shops[1], 2)
    first, second, of_others = work_of(*rows[:5]), work_of(*rows[5:]), work_of(others[0])
    reports: list[Report] = []
    once_at(step, lambda: reports.extend(in_another_thread(lambda: [run(w, "default") for w in (second, of_others)])))
    run(first, "default")
    assert sorted(calls.sizes) == [2, 10]
    assert {state(row) for row in [*rows, *others]} == {FIRED}
    if step in {"committed", "reported"}:
        assert sorted(reports[0].done) == sorted(second.ids)
    elif step != "begun":  # there the value is not locked yet, and the second is the first
        assert (set(reports[0].again), reports[0].fired) == (set(second.ids), ())
        assert set(reports[0].untried) == set(second.ids)


@needs_row_locks
@pytest.mark.parametrize("is_long", [False, True])
def test_a_locked_object_is_waited_for_and_then_left_out(
    policy: Policy, shops: Shops, calls: Calls, monkeypatch: Patch, is_long: bool
) -> None:
    rows = due_of(policy, shops[0], 5)
    with locking(Purchase.objects.get(pk=rows[2].object_id)):
        assert run_of(rows[0]).untried == (rows[0].pk,)
        assert calls.sizes == []
        if is_long:
            monkeypatch.setattr(judge, "LOCKED_MAX_SECONDS", 0.0)
            run_of(rows[0])
    run_of(rows[2])
    assert calls.sizes == ([4, 1] if is_long else [5])
