"""`Limits(snoozes=n)`: one more ends in `dead`, however much else happened to the row."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import Q
from django.utils import timezone

from django_delayq import Limits, Retry, Snooze, TimeoutPolicy, operations, signals
from django_delayq.models import Timeout
from tests.integration.firing.conftest import due, fire, make_due, state
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
Declare = Callable[..., TimeoutPolicy[Any]]
ALWAYS = Retry([0] * 60)


def fire_again(row: Timeout, times: int = 1) -> None:
    for _ in range(times):
        make_due(row)
        fire(row)


def snoozing(obj: Any, timeout: Any) -> None:
    raise Snooze(minutes=5, reason="the provider is closed")


def test_one_snooze_too_many_is_dead_and_says_so(
    order: Order, declare: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    died: list[Timeout] = []

    def note(timeout: Timeout, **_: Any) -> None:
        died.append(timeout)

    row = due(order, declare(Order, snoozing, name="snoozes", limits=Limits(snoozes=3)))
    signals.timeout_dead.connect(note)
    try:
        fire_again(row, 3)
        assert state(row) == ("pending", "")
        assert died == []
        fire_again(row)
    finally:
        signals.timeout_dead.disconnect(note)
    assert state(row) == ("dead", "limit")
    assert row.reason == "It snoozed 4 times, and its policy allows 3: the provider is closed"
    assert row.attempts == 1, "a snooze counts no attempt, and the last one is not one"
    assert row.errors == []
    assert [timeout.pk for timeout in died] == [row.pk]
    [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert vars(record)["event"] == "timeout_dead"
    assert "is dead: It snoozed 4 times, and its policy allows 3" in record.getMessage()


def test_the_reason_of_a_snooze_may_be_missing(order: Order, declare: Declare) -> None:
    def snooze(obj: Any, timeout: Any) -> None:
        raise Snooze(minutes=5)

    row = due(order, declare(Order, snooze, name="snoozes", limits=Limits(snoozes=0)))
    fire(row)
    assert state(row) == ("dead", "limit")
    assert row.reason == "It snoozed 1 time, and its policy allows 0."


def test_no_snooze_at_all_may_be_allowed(order: Order, declare: Declare) -> None:
    row = due(order, declare(Order, snoozing, name="never_snoozes", limits=Limits(snoozes=0)))
    fire(row)
    assert state(row) == ("dead", "limit")


def test_without_a_limit_a_handler_may_snooze_again_and_again(order: Order, declare: Declare) -> None:
    row = due(order, declare(Order, snoozing, name="snoozes_on"))
    fire_again(row, 45)
    assert (state(row), row.attempts) == (("pending", ""), 0)


@pytest.mark.parametrize("atomic", [True, False])
def test_snoozes_count_although_the_history_forgets_them(order: Order, declare: Declare, atomic: bool) -> None:
    """Two snoozes, then more failures than the history keeps events."""
    snooze = Snooze(seconds=0)
    raised: list[BaseException] = [snooze, snooze, *(ValueError() for _ in range(45)), snooze, snooze]

    def handler(obj: Any, timeout: Any) -> None:
        raise raised.pop(0)

    options: dict[str, Any] = {"atomic": atomic, "retry": ALWAYS, "limits": Limits(snoozes=3)}
    row = due(order, declare(Order, handler, name="forgets", **options))
    fire_again(row, 48)
    assert state(row) == ("pending", "")
    assert len(row.history) == 40
    assert [event["number"] for event in row.history if event["what"] == "snoozed"] == [1, 3]
    fire_again(row)
    assert state(row) == ("dead", "limit")


def test_a_retry_by_an_operator_begins_anew(order: Order, declare: Declare) -> None:
    row = due(order, declare(Order, snoozing, name="retried", limits=Limits(snoozes=2)))
    fire_again(row, 3)
    assert state(row) == ("dead", "limit")
    operations.retry(row, by="script:test")
    fire_again(row, 2)
    assert state(row) == ("pending", "")
    fire_again(row)
    assert state(row) == ("dead", "limit")
    assert [event["what"] for event in row.history].count("snoozed") == 4


def test_a_retry_that_the_history_forgets_still_counts(order: Order, declare: Declare) -> None:
    """Its snoozes were before it, and must not come back."""
    snooze = Snooze(seconds=0)
    raised: list[BaseException] = [snooze, snooze, *(ValueError() for _ in range(45)), snooze]

    def handler(obj: Any, timeout: Any) -> None:
        raise raised.pop(0)

    row = due(order, declare(Order, handler, name="both", retry=ALWAYS, limits=Limits(snoozes=1)))
    fire_again(row, 2)
    assert state(row) == ("dead", "limit")
    operations.retry(row, by="script:test")
    fire_again(row, 46)
    assert state(row) == ("pending", "")


@pytest.mark.parametrize("atomic", [True, False])
def test_a_new_value_of_since_begins_anew(order: Order, declare: Declare, atomic: bool) -> None:
    """Its round is another one: the snoozes of the former ones do not end it without a call."""
    options: dict[str, Any] = {"after": timedelta(0), "since": "created_at", "when": Q(status="unpaid")}
    policy = declare(Order, snoozing, name="moved", atomic=atomic, limits=Limits(snoozes=2), **options)
    order.created_at = timezone.now()
    order.save()
    row = order.timeouts.get(policy=policy.label)
    fire_again(row, 2)
    order.created_at = timezone.now()
    order.save()
    fire_again(row, 2)
    assert state(row) == ("pending", "")
    fire_again(row)
    assert state(row) == ("dead", "limit")


AFRESH: dict[str, Any] = {"attempts": 0, "snoozes": 0, "deaths": 0, "extensions": 0, "suspected_at": None}
AFRESH |= {"first_failed_at": None, "last_failed_at": None, "claims": 0, "claimed_until": None, "asked_due_at": None}
AFRESH |= {"is_requested": False, "is_due_by_request": False}


def test_a_new_value_of_since_inherits_nothing_that_the_former_round_has_been_through(
    order: Order, declare: Declare
) -> None:
    """Otherwise it would be dead after one death, and an error would have lasted for days after the first failure."""
    policy = declare(Order, name="anew", after=timedelta(hours=1), since="created_at", when=Q(status="unpaid"))
    order.created_at = timezone.now() - timedelta(days=1)
    order.save()
    row = order.timeouts.get(policy=policy.label)
    ago = timezone.now() - timedelta(days=5)
    been_through = {name: 2 if value == 0 and value is not False else ago for name, value in AFRESH.items()}
    been_through |= {"is_requested": True, "is_due_by_request": True}
    Timeout.objects.filter(pk=row.pk).update(**been_through)
    order.created_at = timezone.now()
    order.save()
    row.refresh_from_db()
    assert row.since_at == order.created_at
    assert {name: getattr(row, name) for name in AFRESH} == AFRESH


@pytest.mark.parametrize("atomic", [True, False])
def test_a_round_whose_condition_ended_and_holds_again_keeps_its_snoozes_and_deaths(
    order: Order, declare: Declare, atomic: bool
) -> None:
    """Otherwise a condition that flaps would snooze without end, under one idempotency key."""
    keys = list[str]()

    def handler(obj: Any, timeout: Any) -> None:
        keys.append(timeout.idempotency_key)
        snoozing(obj, timeout)

    options: dict[str, Any] = {"after": timedelta(0), "since": "created_at", "when": Q(status="unpaid")}
    policy = declare(Order, handler, name="flaps", atomic=atomic, limits=Limits(snoozes=2), **options)
    order.created_at = timezone.now()
    order.save()
    for number in range(4):
        for row in Timeout.objects.filter(policy=policy.label, state="pending"):
            Timeout.objects.filter(pk=row.pk).update(deaths=1)
            fire_again(row)
        for status in ("paid", "unpaid"):
            order.status = status
            order.save()
        if number == 1:
            assert Timeout.objects.get(policy=policy.label, state="pending").snoozes == 2
            assert Timeout.objects.get(policy=policy.label, state="pending").deaths == 1
    newest = Timeout.objects.filter(policy=policy.label).latest("id")
    assert state(newest) == ("dead", "limit")
    assert (len(keys), len(set(keys))) == (3, 1)
