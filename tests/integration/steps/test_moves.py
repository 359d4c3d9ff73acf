"""When the next step of a round is planned: when it is armed, moved, held and resumed, and when its `since` changes."""

from __future__ import annotations

from typing import Any

import pytest
from django.db.models import Q

import django_delayq as dq
from django_delayq import Wall, Working, WorkingHours, operations
from django_delayq.arming.sync import sync_policy, sync_timeouts
from django_delayq.models import Timeout
from tests.integration.steps.days import ARMED, DAY, T0, Declare, at, days, dunning, note, planned, row_of, sent
from tests.testapp.market import Channel, Purchase
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def policy(declare: Declare) -> dq.TimeoutPolicy[Any]:
    return dunning(declare, max_extensions=3)


def over(order: Order) -> str:
    return row_of(order).steps_over


def pass_steps(order: Order, step: str, over: str) -> None:
    """Let the steps `over` of the pending timeout have run, so that `step` is next."""
    row = row_of(order)
    run_at = {"firm:1": 14, "firm:2": 15, "firm:3": 16, "": 17}[step] * DAY + T0
    Timeout.objects.filter(pk=row.pk).update(step=step, steps_over=over, run_at=run_at)


def test_saving_arms_the_first_step_and_people_are_told_the_deadline(policy: Any) -> None:
    with at(0):
        order = sent()
        assert planned(order) == ("friendly", 11, 14)
        assert over(order) == ""
        assert days(dq.get_deadline(order, policy)) == 14


@pytest.mark.parametrize("grace", [12 * DAY, Wall(days=12)], ids=["timedelta", "span"])
def test_an_invoice_in_its_grace_is_not_too_old_to_be_armed(declare: Declare, grace: Any) -> None:
    policy = declare(Order, name="collect", after=14 * DAY, grace=grace, **ARMED)
    with at(25):
        saved = sent()
        Order.objects.bulk_create([Order(status="unpaid", created_at=T0), Order(status="unpaid", created_at=T0 - DAY)])
        done = sync_policy(policy, "default")
        assert done.armed == 2
    assert planned(saved) == ("", 26, 14)
    with at(26.01):
        Order.objects.bulk_create([Order(status="unpaid", created_at=T0)])
        assert sync_policy(policy, "default").armed == 0
        assert sent().timeouts.filter(policy=policy.label).exists(), "by CATCH_UP, which counts from the grace"
    with at(34):
        assert not sent().timeouts.filter(policy=policy.label).exists()


def test_bulk_arming_and_bulk_scheduling_plan_the_same(policy: Any, declare: Declare) -> None:
    by_hand = dunning(declare, name="by_hand", since=None, when=None)
    with at(12):
        orders = Order.objects.bulk_create(Order(status="unpaid", created_at=T0 + n * DAY) for n in (0, 1, 5))
        sync_timeouts(Order.objects.all())
        assert [planned(order) for order in orders] == [("firm:1", 14, 14), ("friendly", 12, 15), ("friendly", 16, 19)]
        assert [over(order) for order in orders] == ["friendly", "", ""]
        assert dq.schedule_timeouts(orders, by_hand, days=2) == 3
        assert {planned(order) for order in orders} == {("firm:1", 14, 14)}
        assert {over(order) for order in orders} == {"friendly"}
        assert dq.schedule_timeouts(orders, by_hand, days=5) == 3  # which replaces them
    assert {planned(order) for order in orders} == {("friendly", 14, 17)}
    assert {over(order) for order in orders} == {""}


def test_scheduling_again_begins_the_steps_anew(declare: Declare) -> None:
    policy = dunning(declare, since=None, when=None)
    with at(0):
        order = Order.objects.create(status="unpaid")
        first = dq.schedule_timeout(order, policy, days=14)
        assert (first.step, days(first.run_at), days(first.due_at)) == ("friendly", 11, 14)
    pass_steps(order, "firm:2", "friendly firm")
    with at(14.5):
        again = dq.schedule_timeout(order, policy, days=14)
        kept = dq.schedule_timeout(order, policy, days=1, on_conflict="keep")
    assert kept.pk == again.pk == first.pk
    assert planned(order) == ("friendly", 25.5, 28.5)
    assert over(order) == ""


def test_an_extension_moves_what_has_not_run(policy: Any) -> None:
    with at(0):
        order = sent()
    pass_steps(order, "firm:1", "friendly")
    with at(12):
        dq.extend_timeout(order, policy, days=7)
    assert planned(order) == ("firm:1", 21, 21)
    with at(12):
        assert dq.extend_timeouts(dq.pending_timeouts(order, policy), days=1) == 1
    assert planned(order) == ("firm:1", 22, 22)
    assert over(order) == "friendly"


def test_a_round_that_its_condition_ended_continues_with_the_steps_that_have_not_run(policy: Any) -> None:
    with at(0):
        order = sent()
    pass_steps(order, "firm:1", "friendly")
    with at(12):
        order.status = "paid"
        order.save()
        assert row_of(order).state == "cancelled"
    with at(14.5):
        order.status = "unpaid"
        order.save()
    assert row_of(order).state == "pending"
    assert planned(order) == ("firm:2", 15, 14)
    assert over(order) == "friendly firm"


def test_a_step_that_ran_does_not_run_again_after_an_extension_and_a_payment_that_failed(policy: Any) -> None:
    with at(0):
        order = sent()
    pass_steps(order, "firm:1", "friendly")
    with at(12):
        dq.extend_timeout(order, policy, days=7)
        order.status = "paid"
        order.save()
        order.status = "unpaid"
        order.save()
    assert planned(order) == ("firm:1", 21, 21)


def test_a_hold_within_the_grace_keeps_the_rest_of_the_grace(policy: Any) -> None:
    with at(0):
        order = sent()
    pass_steps(order, "firm:3", "friendly firm:2")
    with at(15.5):
        held = dq.hold_timeout(order, policy)
        assert held is not None
        assert held.remaining == -1.5 * DAY
        assert "0 s of its time is left" in dq.explain_timeout(order, policy).outlook
    with at(20):
        dq.resume_timeout(order, policy)
    assert planned(order) == ("firm:3", 20.5, 18.5)
    with at(20):
        row = row_of(order)
        assert dq.cancel_timeout(row)


@pytest.mark.parametrize(("until", "run_at"), [(6, 11), (12, 12)])
def test_a_pause_keeps_all_times(policy: Any, until: float, run_at: float) -> None:
    with at(0):
        order = sent()
    with at(5):
        operations.pause_timeout(dq.pending_timeouts(order, policy), by="anna")
    with at(until):
        operations.resume_timeout(dq.pending_timeouts(order, policy), by="anna")
    assert planned(order) == ("friendly", run_at, 14)


def test_operators_move_the_steps_with_the_deadline(policy: Any) -> None:
    with at(0):
        order = sent()
        pending = dq.pending_timeouts(order, policy)
        operations.postpone(pending, by="anna", days=1)
        assert planned(order) == ("friendly", 12, 15)
        operations.change_deadline(pending, by="anna", shift=-2 * DAY)
        assert planned(order) == ("friendly", 10, 13)
        operations.fire_now(pending, by="anna")
    assert planned(order) == ("", 0, 0)


def test_a_policy_on_hold_and_another_delay_move_the_steps(policy: Any) -> None:
    with at(0):
        order = sent()
    with at(2):
        operations.hold(policy, by="anna")
    with at(4):
        operations.resume(policy, by="anna")
    assert planned(order) == ("friendly", 13, 16)
    with at(5):
        operations.change_delay(policy, 20 * DAY, by="anna", mode="recompute")
    assert planned(order) == ("friendly", 19, 22)


def test_a_deadline_that_follows_its_data_takes_the_steps_along(declare: Declare) -> None:
    policy = declare(Purchase, name="pay", after="channel__pay_within", since="created_at", when=Q(status="unpaid"))
    policy.step(0.5, name="half")(note)
    channel = Channel.objects.create(pay_within=4 * DAY)
    with at(0):
        purchase = Purchase.objects.create(status="unpaid", created_at=T0, channel=channel)
        assert planned(purchase) == ("half", 2, 4)
        channel.pay_within = 8 * DAY
        channel.save()
    assert planned(purchase) == ("half", 4, 8)


def test_spans_of_the_object_decide_about_steps_and_grace(declare: Declare) -> None:
    office = WorkingHours("UTC", {"mon-sun": ("09:00-17:00",)})
    policy = declare(
        Order, note, name="collect", after=2 * DAY, grace=Working(days=1, calendar=lambda order: office), **ARMED
    )
    policy.step(Wall(days=-1, at="09:00", zone="UTC"), name="morning")(note)
    with at(0):
        order = sent()
        assert planned(order) == ("morning", 0.875, 2)
        assert days(policy.acts_at(T0 + 2 * DAY, order)) == 3
        operations.postpone(dq.pending_timeouts(order, policy), by="anna", days=1)
        assert planned(order) == ("morning", 1.875, 3)


@pytest.mark.parametrize(("day", "is_late"), [(13, False), (16.9, False), (17.1, True)])
def test_a_strict_guard_lets_people_pay_within_the_grace(policy: Any, day: float, is_late: bool) -> None:
    with at(0):
        order = sent()
    with at(day):
        if is_late:
            with pytest.raises(dq.DeadlinePassed), dq.before_deadline(order, policy, strict=True):
                pass
            return
        with dq.before_deadline(order, policy, strict=True):
            order.status = "paid"
            order.save()
    assert row_of(order).state == "cancelled"
