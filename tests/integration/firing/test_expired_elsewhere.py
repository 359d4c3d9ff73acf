"""Every worker settles attempts that died; only the first one logs it, and sends the signals."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction
from django.utils import timezone

from django_delayq import get_policy, timeout_dead
from django_delayq.firing import settle_expired
from django_delayq.firing.handler import set_checkpoint_hook
from django_delayq.firing.settling import settle
from django_delayq.firing.works import Call
from django_delayq.models import Timeout
from django_delayq.rounds.after_attempt import WorkerDied
from django_delayq.signals import timeouts_settling
from tests.integration.firing.conftest import die_at, due, expire, state
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)


def test_an_attempt_that_died_is_told_once_however_many_workers_find_it(
    order: Order, caplog: pytest.LogCaptureFixture
) -> None:
    row = due(order, "send_outside")
    past = timezone.now() - timedelta(seconds=1)
    alone = {"suspected_at": past, "deaths": 2}  # the third death
    Timeout.objects.filter(pk=row.pk).update(state="firing", slot_taken=None, attempts=1, run_at=past, **alone)
    row.refresh_from_db()
    seen = {"state": row.state, "attempts": row.attempts, "run_at": row.run_at}  # as a second worker sees it
    settle_expired("default")
    call = Call((row.pk,), seen)
    settle(get_policy((Order, "send_outside")), WorkerDied("died"), "default", call)
    assert [found.getMessage().partition(":")[0] for found in caplog.records] == [
        f"Timeout {row.pk} ({row.policy}, object {order.pk}) is dead"
    ]


def test_a_failure_of_a_handler_is_told_although_its_row_was_settled_meanwhile(
    order: Order, caplog: pytest.LogCaptureFixture
) -> None:
    row = due(order, "send_outside")
    seen = {"state": "firing", "attempts": 1}
    call = Call((row.pk,), seen)
    settle(get_policy((Order, "send_outside")), RuntimeError("no"), "default", call)
    assert [found.getMessage().rpartition(": ")[2] for found in caplog.records] == ["no"]


def test_callbacks_of_receivers_run_after_a_death_is_recorded(order: Order) -> None:
    row = due(order, "send_outside")
    die_at(row, "committed")
    expire(row)
    Timeout.objects.update(suspected_at=timezone.now(), deaths=2)  # the third death
    called: list[str] = []

    def note(**_: Any) -> None:
        transaction.on_commit(lambda: called.append(state(row)[0]))

    timeouts_settling.connect(note)
    try:
        settle_expired("default")
    finally:
        timeouts_settling.disconnect(note)
    assert called == ["dead"]


def test_rows_that_were_settled_before_the_database_failed_are_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [due(Order.objects.create(), "send_outside") for _ in range(3)]
    for row in rows:
        die_at(row, "committed")
        expire(row)
    Timeout.objects.update(suspected_at=timezone.now(), deaths=2)  # the third death
    undone: list[str] = []
    announced: list[int] = []

    def fail(step: str) -> None:
        if step == "undone":
            undone.append(step)
            if len(undone) == 3:
                monkeypatch.setattr(connection, "is_usable", lambda: False)  # it is lost
                raise OperationalError

    def note(timeout: Timeout, **_: Any) -> None:
        announced.append(timeout.pk)

    set_checkpoint_hook(fail)
    timeout_dead.connect(note, sender=Order)
    try:
        with pytest.raises(OperationalError):
            settle_expired("default")
    finally:
        timeout_dead.disconnect(note, sender=Order)
    assert [state(row)[0] for row in rows] == ["dead", "dead", "firing"]
    assert announced == [row.pk for row in rows[:2]]


def test_a_row_that_cannot_be_settled_does_not_keep_those_behind_it_from_being_settled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken, *others = [due(Order.objects.create(), "send_outside") for _ in range(3)]
    for row in (broken, *others):
        die_at(row, "committed")
        expire(row)
    Timeout.objects.filter(pk=broken.pk).update(history=0)
    report = settle_expired("default")
    assert [state(row)[0] for row in others] == ["pending", "pending"]
    assert report.untried == (broken.pk,)
    assert f"Timeouts [{broken.pk}] of testapp.order.send_outside are released" in caplog.text
