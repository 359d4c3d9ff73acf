"""The commands: arguments in, one call out; the first screen of a worker, and the numbers of its last line."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.utils import timezone
from pytest_django import Settings

import django_delayq as dq
from django_delayq.firing import planning
from django_delayq.ledger.db_connections import pool_limit
from django_delayq.models import Timeout
from django_delayq.worker import Worker
from django_delayq.worker import dispatch as dispatching
from tests.support.workers import due_orders, states
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
Shown = Callable[..., str]


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Shown:
    """Run a burst with these options, and return its first screen."""

    def run(*options: str) -> str:
        call_command("delayq_worker", "--burst", *options)
        return capsys.readouterr().out

    return run


def test_the_worker_command_says_what_it_serves(source: str, shown: Shown) -> None:
    due_orders("remind", 3)
    out = shown("--concurrency", "2", "--queue", "default")
    assert states() == {"fired": 3}
    limit = pool_limit("default")
    threads = limit.threads(2) if limit else 2
    lines = out.splitlines()
    assert lines[0].startswith("django-delayq 0.")
    has_server = connection.vendor != "sqlite"
    assert lines[1].endswith(f", at most {limit.size if limit else threads + 3} connections" if has_server else "')")
    assert lines[2].startswith("  Redis     reached at " if source == "redis" else "  Redis     none: ")
    assert lines[2].endswith(f", at most {threads + 6} connections" if source == "redis" else "once a second")
    assert lines[3:5] == [f"  threads   {threads}", "  queues    default"]
    shown_lines = [line.split(maxsplit=1) for line in lines]
    assert ["testapp.order.cancel_unpaid", "30 min after created_at"] in shown_lines
    assert ["testapp.order.remind", "by hand, each with its own delay"] in shown_lines
    assert out.endswith("A second signal aborts them.\n\n"), "a blank line separates it from the log"


def test_a_redis_that_is_not_reached_is_not_said_to_wake_it(
    settings: Settings, shown: Shown, caplog: pytest.LogCaptureFixture
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": "redis://127.0.0.1:1/0"}
    due_orders("remind")
    assert "  Redis     not usable now: until it is, due timeouts are read from the database" in shown()
    (line,) = [each for each in caplog.messages if "serves all queues" in each]
    assert line.endswith("reading the database once a second")
    assert "redis_away" in [getattr(record, "event", "") for record in caplog.records]
    assert states() == {"fired": 1}


@pytest.mark.usefixtures("without_redis")
def test_the_first_screen_says_which_queues_are_known_and_who_runs_the_handlers(
    settings: Settings, shown: Shown
) -> None:
    (line,) = [line for line in shown("--queue", "nope").splitlines() if line.startswith("  policies")]
    assert "none in this queue; known queues: default" in line
    executor = "tests.integration.worker.test_remote.QueueExecutor"
    settings.DELAYQ = {**settings.DELAYQ, "EXECUTOR": executor}
    assert f"  executor  {executor}: runs the handlers" in shown()
    assert shown("--log-format", "json") == ""


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("delayq_worker --concurrency 0", "concurrency"),
        ("delayq_worker --concurrency x", "concurrency"),
        ("delayq_worker --concurrency 5000", "concurrency"),
        ("delayq_worker --max-timeouts 0", "max-timeouts"),
        ("delayq_worker --nonsense", "nonsense"),
        ("delayq_worker --burst", "has an unknown scheme or form"),
        ("delayq_sync --policy testapp.order.cancel_unpayd", "cancel_unpaid"),
        ("delayq_sync --backfill", "needs --policy"),
    ],
)
def test_wrong_arguments_and_settings_are_errors_of_the_command(settings: Settings, command: str, words: str) -> None:
    if command.endswith("--burst"):
        settings.DELAYQ = {**settings.DELAYQ, "REDIS": "redis+magic://me:secret@host"}
    with pytest.raises(CommandError, match=words) as refused:
        call_command(*command.split())
    assert "secret" not in str(refused.value)


def last_line(caplog: pytest.LogCaptureFixture) -> dict[str, int]:
    """Run a burst, and return the numbers of its last line."""
    with caplog.at_level(logging.INFO, "django_delayq.worker"):
        Worker(burst=True, concurrency=1).run()
    [*_, line] = [each for each in caplog.records if vars(each).get("event") == "worker_stopped"]
    names = ("fired", "skipped_or_dead", "settled_before", "to_be_tried_again")
    numbers = {name: vars(line)[name] for name in names if vars(line)[name]}
    for name in names:
        number = numbers.get(name, 0)
        assert (f"{number} {name.replace('_', ' ')}" in line.getMessage()) == bool(number)
    return numbers


def fails(times: int) -> Callable[..., None]:
    tried = Counter[int]()

    def handler(_: Order, timeout: Any) -> None:
        tried[timeout.pk] += 1
        if tried[timeout.pk] <= times:
            raise LookupError("not yet")

    return handler


@pytest.mark.usefixtures("without_redis")
def test_the_last_line_counts_each_timeout_once_by_its_last_outcome(
    declare: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    due_orders(declare(Order, fails(3), name="inside", retry=dq.Retry([0] * 5)), 2)
    due_orders(declare(Order, fails(3), name="outside", retry=dq.Retry([0] * 5), atomic=False), 2)
    due_orders(declare(Order, fails(9), name="later", retry=dq.Retry([0, 0, timedelta(hours=1)])), 2)
    redelivered = due_orders("remind", 3)[0]  # as after a commit whose answer was lost
    fired: dict[str, Any] = {"state": "fired", "cause": "due", "settled_at": timezone.now(), "slot_taken": None}
    plan = planning.plan

    def then_settled(deliveries: Any, *args: Any, **options: Any) -> Any:
        found = plan(deliveries, *args, **options)
        Timeout.objects.filter(pk__in=deliveries).filter(pk=redelivered.pk).update(attempts=1, **fired)
        return found

    monkeypatch.setattr(dispatching, "plan", then_settled)
    assert last_line(caplog) == {"fired": 6, "settled_before": 1, "to_be_tried_again": 2}
    assert states() == {"fired": 7, "pending": 2}
    monkeypatch.setattr(dispatching, "MAX_LOST", 2)  # a worker that runs for months keeps few ids
    due_orders(declare(Order, fails(9), name="once", retry=dq.Retry([timedelta(hours=1)])), 5)
    assert last_line(caplog) == {"to_be_tried_again": 5}
