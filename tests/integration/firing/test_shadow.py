"""Shadow mode: everything happens but the handler, and the round is closed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq.arming.sync import sync_timeouts
from django_delayq.firing.rails.withheld import is_in_shadow
from django_delayq.models import Timeout
from django_delayq.operations import shadow
from tests.integration.firing.conftest import MODES, due, fire, locking, needs_row_locks, state
from tests.testapp.models import Order, Parcel

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("controls_are_read_again")]
Declare = Callable[..., dq.TimeoutPolicy[Any]]


def refuse(*_: object) -> None:
    raise AssertionError("the handler ran")


@pytest.mark.parametrize("mode", MODES)
def test_everything_happens_but_the_handler(
    orders: list[Order], declare: Declare, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    policy = declare(Order, refuse, name="watched", when=Q(status="unpaid"), shadow=True, **MODES[mode])
    rows = [due(order, policy) for order in orders]
    skipped: list[int] = []
    receiver = lambda sender, timeout, **_: skipped.append(timeout.pk)  # noqa: E731 - kept until the test ends
    dq.timeout_skipped.connect(receiver)
    Order.objects.filter(pk=orders[0].pk).update(status="paid")
    with caplog.at_level(logging.INFO, "django_delayq.firing"):
        report = fire(*rows)
    assert (report.fired, sorted(report.done)) == ((), [row.pk for row in rows])
    assert [state(row) for row in rows] == [("skipped", "condition")] + [("skipped", "shadow")] * 4
    assert {row.attempts for row in rows} == {0}
    assert sorted(skipped) == [row.pk for row in rows]
    logged = [each for each in caplog.records if vars(each).get("event") == "timeout_shadow"]
    assert sorted(vars(each)["timeout_id"] for each in logged) == [row.pk for row in rows[1:]]
    found = {vars(each)["object_id"]: each.getMessage() for each in logged}
    assert found.keys() == {str(order.pk) for order in orders[1:]}
    assert all(f"object {pk}) would have fired: its policy is in shadow mode" in words for pk, words in found.items())


@pytest.mark.dialect
@needs_row_locks
def test_a_locked_object_is_waited_for_as_always(order: Order, declare: Declare) -> None:
    row = due(order, declare(Order, refuse, name="watched", shadow=True))
    with locking(order):
        assert list(fire(row).again) == [row.pk]
    assert state(row) == ("pending", "")


def test_a_share_is_the_same_for_each_policy_and_grows_with_its_percentage() -> None:
    keys = [str(number) for number in range(2000)]
    shares = {percent: {key for key in keys if is_in_shadow(key, percent)} for percent in (0, 10, 50, 100)}
    assert (len(shares[0]), len(shares[100])) == (0, 2000)
    assert shares[10] < shares[50]
    assert 140 < len(shares[10]) < 260
    assert sorted(shares[10])[:3] == ["1009", "1013", "1043"], "other releases and machines choose the same"


@pytest.mark.parametrize("mode", MODES)
def test_only_a_share_of_the_objects_is_in_shadow_mode(declare: Declare, mode: str) -> None:
    ran: list[int] = []

    def handle(_: Any, timeouts: Any) -> None:
        ran.extend(row.pk for row in (timeouts if isinstance(timeouts, list) else [timeouts]))

    policy = declare(Order, handler=handle, name="partly", **MODES[mode])
    shadow(policy, share=50, by="test:operator")
    rows = [due(Order.objects.create(status="unpaid"), policy) for _ in range(40)]
    fire(*rows)
    expected = {row.pk for row in rows if is_in_shadow(row.object_id, 50)}
    assert 5 < len(expected) < 35
    assert set(ran) == {row.pk for row in rows} - expected
    assert set(Timeout.objects.filter(cause="shadow").values_list("pk", flat=True)) == expected


def test_text_and_uuid_keys_have_their_share(declare: Declare) -> None:
    policy = declare(Parcel, refuse, name="watched", shadow=True)
    row = due(Parcel.objects.create(), policy)
    fire(row)
    assert state(row) == ("skipped", "shadow")


def test_leaving_shadow_mode_fires_nothing_retroactively(declare: Declare) -> None:
    hour = timedelta(hours=1)
    options: Any = {"since": "created_at", "after": hour, "when": Q(status="unpaid")}
    policy = declare(Order, name="closed", **options)
    shadow(policy, share=100, by="test:operator")
    order = Order.objects.create(status="unpaid", created_at=timezone.now() - 2 * hour)
    row = order.timeouts.get(policy=policy.label)
    fire(row)
    assert state(row) == ("skipped", "shadow")
    shadow(policy, share=0, by="test:operator")
    order.save()
    sync_timeouts(Order.objects.all())
    assert order.timeouts.filter(policy=policy.label).count() == 1
    order.created_at = timezone.now() - hour
    order.save()
    again = order.timeouts.filter(policy=policy.label).pending().get()
    assert fire(again).fired == (again.pk,)


def test_a_timeout_that_is_too_late_is_late_also_in_shadow_mode(order: Order, declare: Declare) -> None:
    policy = declare(Order, refuse, name="both", shadow=True, late=dq.Late(timedelta(hours=1)))
    row, past = due(order, policy), timezone.now() - timedelta(hours=2)
    Timeout.objects.update(due_at=past, run_at=past)
    fire(row)
    assert state(row) == ("skipped", "late")
