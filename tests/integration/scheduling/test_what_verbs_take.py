"""Each verb but the first takes a `Timeout`; what a verb cannot take is an error that names what it takes."""

from __future__ import annotations

from typing import Any

import pytest
from django.db.models import prefetch_related_objects
from django.utils import timezone
from django.utils.functional import SimpleLazyObject

import django_delayq as dq
from django_delayq.models import Timeout
from django_delayq.policy.policies import registry
from django_delayq.templatetags.delayq import deadline
from django_delayq.testing import fire_due
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db


def test_the_reading_verbs_take_a_timeout(order: Order) -> None:
    order.created_at = timezone.now()
    order.save()
    row = Timeout.objects.get()
    other = dq.schedule_timeout(order, "remind", hours=1)
    assert dq.get_deadline(row) == row.due_at
    assert list(dq.pending_timeouts(row)) == [row]
    assert list(dq.pending_timeouts([row, other])) == [row, other]
    assert list(dq.pending_timeouts(Timeout.objects.filter(pk=other.pk))) == [other]
    assert list(dq.pending_timeouts(Timeout)) == [row, other]
    assert list(dq.pending_timeouts([row, other], "testapp.order.remind")) == [other]
    Order.objects.update(status="paid")
    assert dq.sync_timeouts(row) == 1
    Order.objects.update(status="unpaid")
    assert dq.sync_timeouts([row, other]) == 1
    Order.objects.update(status="paid")
    assert dq.sync_timeouts(Timeout.objects.all()) == 1
    assert dq.get_deadline(row) is None


def test_pending_timeouts_of_timeouts_take_the_name_of_a_policy(order: Order) -> None:
    remind, linger = (dq.schedule_timeout(order, name, hours=1) for name in ("remind", "linger"))
    assert list(dq.pending_timeouts(remind, "remind")) == [remind]
    assert list(dq.pending_timeouts([remind, linger], "remind")) == [remind]
    assert list(dq.pending_timeouts(Timeout.objects.all(), "linger")) == [linger]
    assert list(dq.pending_timeouts(remind, "linger")) == []
    with pytest.raises(dq.UnknownPolicy, match="remnd"):
        dq.pending_timeouts(remind, "remnd")


def test_a_name_finds_rows_under_the_former_name_of_their_policy(order: Order, declare: Any) -> None:
    former = declare(Order, name="former")
    row = dq.schedule_timeout(order, former, hours=1)
    registry.remove(former)
    declare(Order, name="renamed", aliases=["former"])
    assert list(dq.pending_timeouts(row, "former")) == list(dq.pending_timeouts(row, "renamed")) == [row]


def test_one_timeout_fires_by_the_name_of_its_policy(order: Order) -> None:
    row, other = (dq.schedule_timeout(order, "remind", key=key, seconds=0) for key in ("", "other"))
    assert fire_due("remind", obj=row) == 1
    other.refresh_from_db()
    assert (Timeout.objects.get(pk=row.pk).state, other.state) == ("fired", "pending")


def test_the_guard_takes_a_timeout_and_locks_and_cancels_its_round_alone(order: Order) -> None:
    row, other = (dq.schedule_timeout(order, "remind", key=key, hours=1) for key in ("", "other"))
    with dq.before_deadline(row) as yielded:
        assert yielded == row
        assert row.state == "cancelled"
    other.refresh_from_db()
    assert (Timeout.objects.get(pk=row.pk).cause, other.state) == ("hand", "pending")
    Timeout.objects.filter(pk=other.pk).update(state="firing", slot_taken=None)
    with pytest.raises(dq.DeadlinePassed), dq.before_deadline(other):
        pytest.fail("the block ran")


def test_a_guarded_timeout_whose_condition_the_block_ends_counts_as_cancelled_by_it(order: Order) -> None:
    order.created_at = timezone.now()
    order.save()
    with dq.before_deadline(Timeout.objects.get()):
        order.status = "paid"
        order.save()
    assert Timeout.objects.get().cause == "condition"


@pytest.mark.parametrize("verb", [dq.cancel_timeout, dq.get_deadline, dq.extend_timeout, dq.explain_timeout])
def test_a_timeout_is_refused_beside_a_policy_or_a_key_that_is_not_its_own(order: Order, verb: Any) -> None:
    row = dq.schedule_timeout(order, "remind", key="first", hours=1)
    delay = {"minutes": 1} if verb is dq.extend_timeout else {}
    for wrong in ({"policy": "linger"}, {"policy": dq.get_policy("testapp.order.linger")}, {"key": "second"}):
        with pytest.raises(ValueError, match="is not a timeout of"):
            verb(row, **wrong, **delay)
    row.refresh_from_db()
    assert (row.state, row.extensions) == ("pending", 0)
    policy = dq.get_policy("testapp.order.remind")
    for named in ({}, {"policy": "remind", "key": "first"}, {"policy": policy}, {"policy": policy.label}):
        verb(row, **named, **delay)


def test_a_single_timeout_is_enough_for_a_bulk_verb(order: Order) -> None:
    row = dq.schedule_timeout(order, "remind", hours=1)
    assert dq.extend_timeouts(row, hours=1) == dq.cancel_timeouts(row) == 1


def test_a_verb_takes_an_object_that_is_loaded_lazily_such_as_the_user_of_a_request(order: Order) -> None:
    def lazy() -> Any:
        return SimpleLazyObject(lambda: Order.objects.get(pk=order.pk))

    row = dq.schedule_timeout(lazy(), "remind", hours=1)
    assert dq.schedule_timeouts([lazy()], "remind", hours=2) == 1
    moved = dq.reschedule_timeout(lazy(), "remind", hours=1)
    assert moved is not None
    assert dq.get_deadline(lazy(), "remind") == deadline(lazy(), "remind").due_at == moved.due_at
    assert list(dq.pending_timeouts(lazy(), "remind")) == list(dq.pending_timeouts([lazy()])) == [row]
    assert [event.what for event in dq.explain_timeout(lazy(), "remind")] == ["scheduled", "rescheduled"]
    with dq.before_deadline(user := lazy(), "remind") as timeout:
        user.status, user.created_at = "unpaid", timezone.now()
        Order.objects.update(created_at=user.created_at)
    assert timeout == row
    assert dq.sync_timeouts(lazy()) == 1
    prefetch_related_objects([user], "timeouts")
    assert len(user.timeouts.all()) == 2
    assert dq.cancel_timeout(lazy(), "cancel_unpaid") is True
