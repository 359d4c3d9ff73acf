"""Each verb but the first takes a `Timeout`, and a policy wherever one is named."""

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


def test_the_reading_verbs_take_timeouts_and_the_name_of_a_policy(order: Order) -> None:
    order.created_at = timezone.now()
    order.save()
    row, pending = Timeout.objects.get(), dq.pending_timeouts
    other = dq.schedule_timeout(order, "remind", hours=1)
    assert dq.get_deadline(row) == row.due_at
    given: Any
    for given, policy, found in (
        (row, None, [row]), ([row, other], None, [row, other]), (Timeout, None, [row, other]),
        (Timeout.objects.filter(pk=other.pk), None, [other]), ([row, other], "testapp.order.remind", [other]),
        ([row, other], "remind", [other]), (Timeout.objects.all(), "cancel_unpaid", [row]), (row, "remind", []),
    ):  # fmt: skip
        assert list(pending(given, policy)) == found
    with pytest.raises(dq.UnknownPolicy, match="remnd"):
        pending(row, "remnd")
    for status, synced in (("paid", row), ("unpaid", [row, other]), ("paid", Timeout.objects.all())):
        Order.objects.update(status=status)
        assert dq.sync_timeouts(synced) == 1
    assert dq.get_deadline(row) is None


def test_a_name_finds_rows_under_the_former_name_of_their_policy(order: Order, declare: Any) -> None:
    former = declare(Order, name="former")
    row = dq.schedule_timeout(order, former, hours=1)
    registry.remove(former)
    declare(Order, name="renamed", aliases=["former"])
    assert list(dq.pending_timeouts(row, "former")) == list(dq.pending_timeouts(row, "renamed")) == [row]


def test_the_writing_verbs_take_one_timeout_and_leave_the_others_of_its_object_alone(order: Order) -> None:
    row, other = (dq.schedule_timeout(order, "remind", key=key, hours=1) for key in ("", "other"))
    assert dq.extend_timeouts(row, hours=1) == 1
    with dq.before_deadline(row) as yielded:
        assert yielded == row
        assert row.state == "cancelled"
    other.refresh_from_db()
    assert (Timeout.objects.get(pk=row.pk).cause, other.state) == ("hand", "pending")
    Timeout.objects.filter(pk=other.pk).update(state="firing", slot_taken=None)
    with pytest.raises(dq.DeadlinePassed), dq.before_deadline(other):
        pytest.fail("the block ran")
    due, later = (dq.schedule_timeout(order, "remind", key=key, seconds=0) for key in ("due", "later"))
    assert fire_due("remind", obj=due) == 1
    later.refresh_from_db()
    assert (Timeout.objects.get(pk=due.pk).state, later.state) == ("fired", "pending")


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


@pytest.mark.parametrize("wrong", [None, 5, Order, (Order,), (Order, "remind", 1), ("testapp.Order", "remind")])
def test_what_is_no_name_is_an_unknown_policy(wrong: Any) -> None:
    with pytest.raises(dq.UnknownPolicy, match="Name a policy by its name, its label or the policy itself"):
        dq.get_policy(wrong)


def test_an_unknown_name_is_explained(declare: Any) -> None:
    for name in ("chase", "testapp.parcel.chase"):
        with pytest.raises(dq.UnknownPolicy) as caught:
            dq.schedule_timeout(Order(pk=1), name, hours=1)
        assert str(caught.value) == f"{name!r} is declared for testapp.Parcel, not for testapp.Order."
    with pytest.raises(dq.UnknownPolicy) as caught:
        dq.get_policy("testapp.order.chsae")
    assert str(caught.value).endswith("Did you mean 'testapp.parcel.chase'?")
    with pytest.raises(dq.UnknownPolicy) as caught:
        dq.get_policy((Order, "xyz"))
    listed = str(caught.value).partition("Known: ")[2].rstrip(".").split(", ")
    assert listed == sorted(policy.name for policy in dq.get_policies(Order)), "each once"


def test_policies_of_what_is_no_model_and_a_policy_that_is_a_function_are_refused() -> None:
    def remind(order: Any, timeout: Any) -> None: ...

    wrong: Any
    for wrong in ("testapp.Order", 5, Order()):
        with pytest.raises(TypeError, match="takes a model class, not "):
            dq.get_policies(wrong)
    register: Any = dq.register_policy
    with pytest.raises(dq.PolicyError, match=r"takes a TimeoutPolicy, not .*remind.*@timeout_policy\(Order, after="):
        register(remind)
