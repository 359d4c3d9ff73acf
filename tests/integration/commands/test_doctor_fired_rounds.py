"""Objects that match a policy although its round has fired: lost updates, revived orders, forgotten saves."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.core.checks import WARNING, CheckMessage
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_delayq import pending_timeouts
from django_delayq.models import Timeout
from django_delayq.monitoring.doctor import examine
from django_delayq.monitoring.misfits import matching_again
from tests.integration.commands.conftest import a_worker
from tests.integration.operations.conftest import as_if
from tests.testapp.models import Order

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("without_redis")]
UNPAID = "testapp.order.cancel_unpaid"


def fired(count: int, status: str = "cancelled", hours_ago: float = 1) -> list[Order]:
    """Return orders whose round has fired so long ago, and which have this status since."""
    orders, at = [], timezone.now() - timedelta(hours=hours_ago)
    for _ in range(count):
        order = Order.objects.create(status="unpaid", created_at=at)
        as_if(pending_timeouts(order).get(), "fired", "due", settled_at=at, run_at=at)
        Order.objects.filter(pk=order.pk).update(status=status)
        orders.append(order)
    return orders


def finding() -> CheckMessage | None:
    return next((each for each in examine() if each.id == "fired_again"), None)


def test_an_order_that_a_stale_save_has_revived_is_found() -> None:
    a_worker()
    fired(10)
    assert finding() is None
    old, new = *fired(1, hours_ago=100), *fired(1)
    for order in (old, new):
        order.save()  # as it was before the timeout fired
    found = finding()
    assert found is not None and found.level == WARNING
    assert found.msg.startswith(f"2 objects match {UNPAID} although their rounds have fired, such as object {new.pk}")
    assert "delayq_refire" in str(found.hint)
    assert not [each for each in examine(quick=True) if each.id == "fired_again"], "it reads the table of the objects"


def test_a_policy_whose_handler_does_not_end_its_condition_is_left_alone() -> None:
    """A reminder of an order, which remains unpaid until the customer pays."""
    fired(4)
    fired(4, status="unpaid")
    assert finding() is None


def test_a_few_firings_show_nothing_about_a_handler() -> None:
    fired(4)
    fired(50, hours_ago=48)  # since then, a person may have ended the condition
    fired(1, status="unpaid", hours_ago=30)
    assert finding() is None


def test_objects_that_have_another_round_are_not_meant() -> None:
    fired(20)
    again, moved, gone = fired(1)[0], fired(1)[0], fired(1, status="unpaid")[0]
    Order.objects.filter(pk=moved.pk).update(status="unpaid", created_at=timezone.now())
    row = Timeout.objects.get(object_id=str(again.pk))
    Order.objects.filter(pk=again.pk).update(status="unpaid")
    as_if(row, "pending")  # an operator has repeated it
    gone.delete()
    assert finding() is None


def test_it_reads_few_firings_and_few_objects() -> None:
    fired(12)
    list(matching_again("default"))
    with CaptureQueriesContext(connection) as few:
        list(matching_again("default"))
    fired(12)
    with CaptureQueriesContext(connection) as many:
        list(matching_again("default"))
    assert len(few) == len(many)
