"""`atomic=False`: a newer round that was scheduled while an older one is firing replaces it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import django_delayq as dq
from django_delayq.firing import settle_expired
from django_delayq.models import Timeout
from tests.integration.firing.conftest import die_at, due, expire, fire, make_due, state
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
Declare = Callable[..., dq.TimeoutPolicy[Any]]


@pytest.mark.parametrize("ends", ["raises", "dies", "snoozes"])
def test_a_newer_round_takes_the_place_of_a_firing_that_then_fails(order: Order, declare: Declare, ends: str) -> None:
    newer: list[Timeout] = []

    def handler(obj: Order, timeout: Timeout) -> None:
        if ends != "dies":
            newer.append(dq.schedule_timeout(obj, "outside", hours=1))
        raise dq.Snooze(minutes=5) if ends == "snoozes" else ValueError

    row = due(order, declare(Order, handler, name="outside", atomic=False))
    if ends == "dies":
        die_at(row, "committed")
        newer.append(dq.schedule_timeout(order, "outside", hours=1))
        expire(row)
        assert settle_expired("default").done == (row.pk,)
    else:
        assert fire(row).done == (row.pk,)
    assert state(row) == ("skipped", "superseded")
    assert state(newer[0]) == ("pending", "")


@pytest.mark.parametrize("ends", ["raises", "dies", "snoozes"])
def test_a_firing_that_fails_after_its_next_round_was_cancelled_does_not_run_again(
    order: Order, declare: Declare, ends: str
) -> None:
    """`cancel_timeout` has answered that nothing will happen."""

    def meanwhile() -> None:
        dq.schedule_timeout(order, "outside", hours=1)
        assert dq.cancel_timeout(order, "outside") is True

    def handler(obj: Order, timeout: Timeout) -> None:
        meanwhile()
        raise dq.Snooze(minutes=5) if ends == "snoozes" else ValueError

    row = due(order, declare(Order, handler, name="outside", atomic=False))
    if ends == "dies":
        die_at(row, "committed")
        meanwhile()
        expire(row)
        settle_expired("default")
    else:
        fire(row)
    assert state(row) == ("skipped", "superseded")
    assert not Timeout.objects.unsettled().exists()


def test_a_newer_round_that_comes_in_the_very_moment_of_the_failure_wins(
    order: Order, declare: Declare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The query found the slot free, but the unique constraint refuses it."""

    def handler(obj: Order, timeout: Timeout) -> None:
        dq.schedule_timeout(obj, "outside", hours=1)
        raise ValueError

    row = due(order, declare(Order, handler, name="outside", atomic=False))
    monkeypatch.setattr("django_delayq.ledger.marking.is_superseded", lambda *_: False)
    assert fire(row).done == (row.pk,)
    assert state(row) == ("skipped", "superseded")


def test_a_newer_round_that_fires_beside_an_older_one_succeeds(order: Order, declare: Declare) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        if not timeout.payload:
            dq.schedule_timeout(obj, "outside", hours=1, payload="newer")

    row = due(order, declare(Order, handler, name="outside", atomic=False))
    assert fire(row).fired
    newer = Timeout.objects.pending().get()
    make_due(newer)
    assert fire(newer).fired
    assert [state(one) for one in (row, newer)] == [("fired", "due")] * 2
