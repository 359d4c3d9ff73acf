"""What verbs take: timeouts, lazy objects, names of policies, and querysets with an order, a union or a join."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db.models import Exists, OuterRef, prefetch_related_objects
from django.utils import timezone
from django.utils.functional import SimpleLazyObject

import django_delayq as dq
from django_delayq import operations
from django_delayq.ledger import subjects
from django_delayq.models import Timeout
from django_delayq.templatetags.delayq import deadline
from django_delayq.testing import fire_due
from tests.support.typed import Patch
from tests.testapp.models import Customer, Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
HOUR = timedelta(hours=1)


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
        assert list(pending(given, policy).order_by("pk")) == found
    with pytest.raises(dq.UnknownPolicy, match="remnd"):
        pending(row, "remnd")
    for status, synced in (("paid", row), ("unpaid", [row, other]), ("paid", Timeout.objects.all())):
        Order.objects.update(status=status)
        assert dq.sync_timeouts(synced) == 1
    assert dq.get_deadline(row) is None


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


def test_a_verb_takes_an_object_that_is_loaded_lazily_such_as_the_user_of_a_request(order: Order) -> None:
    def lazy() -> Any:
        return SimpleLazyObject(lambda: Order.objects.get(pk=order.pk))

    row = dq.schedule_timeout(lazy(), "remind", hours=1)
    assert dq.schedule_timeouts([lazy()], "remind", hours=2) == 1
    moved = dq.reschedule_timeout(lazy(), "remind", hours=1)
    assert moved is not None
    assert dq.get_deadline(lazy(), "remind") == deadline(lazy(), "remind").due_at == moved.due_at
    assert list(dq.pending_timeouts(lazy(), "remind")) == list(dq.pending_timeouts([lazy()])) == [row]
    with dq.before_deadline(user := lazy(), "remind") as timeout:
        Order.objects.update(status="unpaid", created_at=timezone.now())
    assert timeout == row
    assert dq.sync_timeouts(lazy()) == 1
    prefetch_related_objects([user], "timeouts")
    assert len(user.timeouts.all()) == 2
    assert dq.cancel_timeout(lazy(), "cancel_unpaid") is True


# Which objects and rows a queryset names, if its order, a union or a join decides about them.


@pytest.fixture
def orders() -> list[Order]:
    """Four orders of two customers; the older ones come last in the table."""
    now = timezone.now()
    customers = [Customer.objects.create() for _ in range(2)]
    return [
        Order.objects.create(status="new", customer=customers[number % 2], created_at=now - number * HOUR)
        for number in range(4)
    ]


def objects_of(rows: Any) -> set[str]:
    return set(rows.values_list("object_id", flat=True))


def ids(*orders: Order) -> set[str]:
    return {str(order.pk) for order in orders}


def test_a_slice_and_a_union_name_their_rows_and_their_objects(orders: list[Order]) -> None:
    ends = ids(orders[0], orders[-1])
    of_ends = Order.objects.filter(pk=orders[0].pk).union(Order.objects.filter(pk=orders[-1].pk))
    assert dq.schedule_timeouts(of_ends, "remind", hours=1) == 2
    dq.schedule_timeouts(Order.objects.all(), "remind", hours=1)
    assert objects_of(dq.pending_timeouts(of_ends, "remind")) == ends
    assert len(dq.pending_timeouts(Timeout.objects.order_by("id")[:3])) == 3
    one, other = (Timeout.objects.filter(object_id=pk) for pk in ends)
    both = one.union(other)
    assert dq.cancel_timeouts(both) == 2
    assert operations.refire(both, by="ada").changed == 2
    assert objects_of(dq.pending_timeouts(both)) == ends


@pytest.mark.parametrize("amount", ["few", "many"])
def test_a_queryset_of_rows_about_a_queryset_is_read_when_it_is_evaluated(
    orders: list[Order], amount: str, monkeypatch: Patch
) -> None:
    """On PostgreSQL the keys of few objects are written as a list, those of many as a subquery."""
    if amount == "many":
        monkeypatch.setattr(subjects, "MAX_IDS", 1)
    first, second, third, fourth = orders
    dq.schedule_timeouts(orders, "remind", hours=1)
    rows = dq.pending_timeouts(Order.objects.filter(note="late").order_by("-note").distinct(), "remind")
    assert objects_of(rows) == set()
    Order.objects.filter(pk__in=[first.pk, third.pk]).update(note="late")
    assert objects_of(rows) == objects_of(Timeout.objects.filter(pk__in=rows)) == ids(first, third)
    assert objects_of(Timeout.objects.exclude(pk__in=rows)) == ids(second, fourth)
    assert objects_of(rows | dq.pending_timeouts(second)) == ids(first, second, third)
    own = dq.pending_timeouts(Order.objects.filter(customer=OuterRef(OuterRef("pk"))), "remind")
    assert Customer.objects.filter(Exists(own)).count() == 2, "a subquery may depend on the query around it"
    assert dq.cancel_timeouts(rows) == 2
    assert objects_of(dq.pending_timeouts(Order.objects.all())) == ids(second, fourth)
