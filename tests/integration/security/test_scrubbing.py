"""Messages of errors pass `SCRUB` before they are stored or logged; if that fails, they are omitted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from django.core.checks import run_checks

from django_delayq import Retry
from django_delayq.conf import ConfigError
from django_delayq.ledger import error_texts
from django_delayq.ledger.error_texts import get_scrubber
from django_delayq.models import Timeout
from django_delayq.rounds import memory
from tests.integration.firing.conftest import due, fire
from tests.support.typed import Declare, Log
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
SECRET = "4000-1234-" + "5678"


def scrub(text: str, timeout: Timeout | None) -> str:
    return text.replace(SECRET, f"[card of timeout {timeout.pk}]" if timeout else "[card]")


def refuse(order: Order, timeout: Timeout) -> None:
    card = f"{SECRET}"
    try:
        raise KeyError(card)
    except KeyError as error:
        raise ValueError(f"no such card: {card}") from error


def quote(text: str, timeout: Timeout | None) -> str:
    raise RuntimeError(f"cannot scrub {text}")


def failed(declare: Declare, handler: Callable[..., Any] = refuse, retry: Retry | None = None) -> Timeout:
    row = due(Order.objects.create(), declare(Order, handler, name="refuse", retry=retry or Retry.never()))
    fire(row)
    row.refresh_from_db()
    return row


def logged(caplog: Log) -> str:
    """Everything that log handlers would print."""
    return "\n".join(logging.Formatter("%(message)s").format(record) for record in caplog.records)


def kept(row: Timeout) -> str:
    return f"{row.reason} {row.history}"


@pytest.mark.parametrize("setting", [scrub, f"{__name__}.scrub"])
def test_messages_and_tracebacks_are_scrubbed_in_the_ledger_and_in_the_log(
    declare: Declare, settings: Any, caplog: Log, setting: Any
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "SCRUB": setting}
    row = failed(declare)
    told = f"no such card: [card of timeout {row.pk}]"
    assert (row.state, row.reason) == ("dead", f"ValueError: {told}")
    assert row.errors[0]["message"] == told
    for words in ("in refuse", "KeyError"):  # its cause is included
        assert words in row.errors[0]["traceback"]
    assert told in logged(caplog) and "in refuse" in logged(caplog)
    assert SECRET not in kept(row) + logged(caplog)
    assert not any(_frames(record) for record in caplog.records), "frames have locals"


def _frames(record: logging.LogRecord) -> object:
    return record.exc_info and (record.exc_info[2] or getattr(record.exc_info[1], "__cause__", None))


@pytest.mark.parametrize("setting", [quote, lambda text, timeout: None, lambda text: text])
def test_a_scrubber_that_fails_loses_no_attempt_and_tells_nothing(
    declare: Declare, settings: Any, caplog: Log, setting: Any
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "SCRUB": setting}
    row = failed(declare, retry=Retry([60]))
    assert (row.state, row.attempts, row.errors[0]["error"]) == ("pending", 1, "ValueError")
    assert row.run_at > row.due_at
    assert "withheld" in row.errors[0]["message"]
    assert SECRET not in kept(row) + logged(caplog)
    assert {getattr(record, "event", "") for record in caplog.records} == {"scrub_failed", "timeout_failed"}


def test_what_is_kept_of_an_error_is_capped_and_contains_no_locals(declare: Declare) -> None:
    def handler(order: Order, timeout: Timeout) -> None:
        card = f"{SECRET}"
        raise type("E" * 10_000, (Exception,), {})(len(card) * 100_000 * "x")

    row = failed(declare, handler)
    assert SECRET not in kept(row)
    assert len(row.reason) <= memory.MAX_REASON
    assert len(str(row.history)) < error_texts.MAX_TRACEBACK + 2000


@pytest.mark.parametrize("wrong", ["no.such.scrubber", "tests.settings.DB"])
def test_a_scrubber_that_is_none_is_found_by_a_check_and_leaks_nothing(
    declare: Declare, settings: Any, wrong: str
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "SCRUB": wrong}
    assert "django_delayq.E007" in {message.id for message in run_checks(tags=["django_delayq"])}
    with pytest.raises(ConfigError, match="SCRUB"):
        get_scrubber()
    assert SECRET not in kept(failed(declare))
