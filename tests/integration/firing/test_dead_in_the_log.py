"""Each way in which a timeout becomes dead is one error in the log, with the event that the docs ask to alert on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

import django_delayq as dq
from django_delayq.firing import settle_expired
from django_delayq.models import Timeout
from tests.integration.firing.conftest import due, fire
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
Declare = Callable[..., dq.TimeoutPolicy[Any]]


def raises(error: BaseException) -> Callable[..., None]:
    def handler(*_: Any) -> None:
        raise error

    return handler


def logged(caplog: pytest.LogCaptureFixture, event: str) -> list[Any]:
    return [record for record in caplog.records if getattr(record, "event", "") == event]


ENDS = {
    "give up": (dq.GiveUp("no such address"), {}, "no such address"),
    "retries used up": (RuntimeError("no answer"), {"retry": dq.Retry.never()}, "no answer"),
    "a snooze beyond all time": (
        dq.Snooze(after=timedelta(days=360_000)),
        {"retry": dq.Retry.never()},
        "InvalidDelay",
    ),
}


@pytest.mark.parametrize("options", [{}, {"atomic": False}, {"batch": 5}], ids=["atomic", "not atomic", "batch"])
@pytest.mark.parametrize("end", ENDS)
def test_a_dead_timeout_is_an_error_in_the_log(
    order: Order, declare: Declare, caplog: pytest.LogCaptureFixture, end: str, options: dict[str, Any]
) -> None:
    error, more, words = ENDS[end]
    row = due(order, declare(Order, raises(error), name="ends", **options, **more))
    fire(row)
    assert Timeout.objects.get().state == "dead"
    [record] = logged(caplog, "timeout_dead")
    assert (record.levelno, record.timeout_id, record.policy) == (logging.ERROR, row.pk, row.policy)
    assert words in record.getMessage()
    assert logged(caplog, "timeout_failed") == []


def test_a_third_death_outside_a_transaction_is_an_error_in_the_log(
    order: Order, declare: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    row = due(order, declare(Order, name="ends", atomic=False, retry=dq.Retry.never()))
    expired = timezone.now() - timedelta(seconds=1)
    Timeout.objects.update(state="firing", slot_taken=None, attempts=1, run_at=expired, suspected_at=expired, deaths=2)
    settle_expired("default")
    [record] = logged(caplog, "timeout_dead")
    assert (record.levelno, record.timeout_id) == (logging.ERROR, row.pk)
    assert record.getMessage().endswith(
        "is dead: WorkerDied: The process died 3 times while this timeout ran alone in it."
    )


def test_a_third_death_is_an_error_in_the_log(order: Order, declare: Declare, caplog: pytest.LogCaptureFixture) -> None:
    row = due(order, declare(Order, name="ends", retry=dq.Retry.never()))
    Timeout.objects.update(suspected_at=timezone.now() - timedelta(days=1), deaths=2)
    fire(row, deliveries=2)
    [record] = logged(caplog, "timeout_dead")
    assert (record.levelno, record.timeout_id) == (logging.ERROR, row.pk)


def test_an_attempt_that_will_be_repeated_is_a_warning(
    order: Order, declare: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    fire(due(order, declare(Order, raises(RuntimeError("no answer")), name="ends")))
    [record] = logged(caplog, "timeout_failed")
    assert record.levelno == logging.WARNING
    assert logged(caplog, "timeout_dead") == []
