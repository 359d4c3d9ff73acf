"""Real workers ask before they act, also in a burst, with and without Redis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from django_delayq.models import Timeout
from tests.support.processes import StartWorker, due_now, effects, end
from tests.support.processes import start_worker as start_worker  # noqa: PLC0414 - a fixture, for the test here
from tests.support.waiting import wait_until
from tests.testapp.models import Order

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.django_db(transaction=True)]


@pytest.mark.usefixtures("redis_client")
@pytest.mark.parametrize(("arguments", "variables"), [(["--burst"], {}), ([], {"WITHOUT_REDIS": "1"})])
def test_a_worker_acts_on_an_answer_and_not_without_one(
    declare: Callable[..., Any], start_worker: StartWorker, arguments: list[str], variables: dict[str, str]
) -> None:
    declare(Order, name="ask_first")
    answers = ("open", "paid", "silent", "open")
    rows = due_now("ask_first", len(answers))
    for answer, row in zip(answers, rows, strict=True):
        Order.objects.filter(pk=row.object_id).update(note=answer)
    worker = start_worker(*arguments, POLICIES="ask_first", seconds={}, **variables)
    if arguments:
        assert worker.wait(60) == 0
    else:
        tried = Timeout.objects.filter(attempts=1)
        wait_until(lambda: tried.count() == len(answers), "each has been tried")
        end(worker)
    for row in rows:
        row.refresh_from_db()
    assert [row.state for row in rows] == ["fired", "skipped", "pending", "fired"]
    assert rows[2].errors[0]["error"] == "TimeLimitExceeded"
    assert effects("ask_first") == {rows[0].pk: 1, rows[3].pk: 1}
