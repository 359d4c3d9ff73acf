"""Errors that come with megabytes, and many suspects: the log stays readable."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from django_delayq.firing import Work, run
from django_delayq.firing.log_lines import log_suspect
from django_delayq.firing.state import firing_state
from django_delayq.logs import Formatter
from django_delayq.models import Timeout
from tests.support.workers import due_orders
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def as_in_a_new_process() -> None:
    firing_state.forget()


def test_a_message_of_megabytes_is_logged_cut(declare: Any, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> None:
        raise ValueError("x" * 5_000_000)

    [row] = due_orders(declare(Order, fail, name="failing"))
    run(Work(row.policy, (row.pk,), (row.object_id,)), "default")
    lines = [Formatter().format(record) for record in caplog.records if record.levelno >= logging.WARNING]
    assert "5,000,000 characters" in lines[0]
    assert sum(map(len, lines)) < 20_000
    assert len(str(Timeout.objects.get().history)) < 20_000


def test_of_many_suspects_one_line_a_minute_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for row in due_orders("remind", 5):
        log_suspect(row)
    found = [each.levelname for each in caplog.records if vars(each).get("event") == "timeout_suspected"]
    assert found == ["WARNING", *["DEBUG"] * 4]
