"""The doctor compares pending deadlines with the delay in force, because a new declaration moves none of them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.core.checks import ERROR, INFO, WARNING
from django.db.models import Q
from django.utils import timezone

import django_delayq
from django_delayq.models import PolicyChange
from django_delayq.monitoring.doctor import examine
from django_delayq.operations import change_delay, pause
from django_delayq.policy.policies import registry
from tests.integration.commands.conftest import Do
from tests.integration.operations.conftest import BY
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = timedelta(hours=1)


def worst(name: str) -> tuple[int, str]:
    finding = next(finding for finding in examine() if finding.id == name)
    return finding.level, f"{finding.msg} {finding.hint}"


@pytest.fixture
def pay_by(declare: Any) -> Callable[..., None]:
    """Declare the policy `pay_by` with this `after`, in place of the one before, as a deployment does."""
    declared: list[Any] = []

    def deploy(after: timedelta) -> None:
        for policy in declared:
            registry.remove(policy)
        declared.append(declare(Order, name="pay_by", after=after, since="created_at", when=Q(status="open")))

    return deploy


def opened() -> Order:
    return Order.objects.create(status="open", created_at=timezone.now())


@pytest.mark.usefixtures("without_redis")
def test_deadlines_of_a_delay_that_was_changed_in_the_code_are_found_until_they_are_replanned(
    pay_by: Any, do: Do
) -> None:
    pay_by(HOUR)
    for _ in range(3):
        opened()
    assert worst("delays")[0] == INFO
    pay_by(2 * HOUR)
    opened()
    level, words = worst("delays")
    assert level == WARNING
    assert "Of 4 checked timeouts of testapp.order.pay_by, 3 are due 1 h after" in words
    assert "its delay is 2 h now" in words
    assert "delayq_replan testapp.order.pay_by --mode recompute" in words
    assert "delays" not in {finding.id for finding in examine(quick=True)}
    do("delayq_replan", "testapp.order.pay_by", "--mode", "recompute", "--yes")
    assert worst("delays")[0] == INFO


@pytest.mark.usefixtures("without_redis")
def test_deadlines_that_differ_on_purpose_are_not_found(pay_by: Any) -> None:
    pay_by(HOUR)
    kept = [opened() for _ in range(2)]
    for _ in range(2):  # one alone would not be found in any case
        extended, moved, own = (opened() for _ in range(3))
        django_delayq.extend_timeout(extended, "pay_by", minutes=5)
        django_delayq.reschedule_timeout(moved, "pay_by", hours=3)
        django_delayq.cancel_timeout(own, "pay_by")
        django_delayq.schedule_timeout(own, "pay_by", minutes=5)
    assert worst("delays")[0] == INFO
    change_delay("testapp.order.pay_by", 2 * HOUR, by=BY)
    assert all(django_delayq.get_deadline(order, "pay_by") is not None for order in kept)
    assert worst("delays")[0] == INFO


@pytest.mark.usefixtures("without_redis")
@pytest.mark.parametrize(("by_hand", "armed", "level"), [(1, 0, INFO), (2, 19, INFO), (2, 18, WARNING)])
def test_a_few_deadlines_set_by_hand_at_round_times_are_not_found(
    pay_by: Any, by_hand: int, armed: int, level: int
) -> None:
    pay_by(HOUR)
    for number in range(by_hand + armed):
        created_at = timezone.now().replace(microsecond=0)
        order = Order.objects.create(status="open", created_at=created_at)
        if number < by_hand:
            django_delayq.cancel_timeout(order, "pay_by")
            django_delayq.schedule_timeout(order, "pay_by", at=created_at + 5 * HOUR)
    assert worst("delays")[0] == level


@pytest.mark.usefixtures("without_redis")
def test_the_hint_for_an_unfinished_change_of_the_delay_does_not_end_a_pause() -> None:
    pause("testapp.order.remind", by=BY)
    at = timezone.now() - HOUR
    PolicyChange.objects.create(policy="testapp.order.remind", what=PolicyChange.What.DELAY, at=at, touched_at=at)
    level, words = worst("changes")
    assert level == ERROR
    assert "delayq_worker" in words and "delayq_resume" not in words
