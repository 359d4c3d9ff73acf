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
from django.db.models import Q
from django.utils import timezone
from pytest_django import Settings

import django_delayq as dq
from django_delayq import Wall, Working, WorkingHours
from django_delayq.firing import planning
from django_delayq.ledger.db_connections import pool_limit
from django_delayq.models import Timeout
from django_delayq.worker import Worker
from django_delayq.worker import dispatch as dispatching
from tests.engine.redis_process import RedisProcess
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


def test_a_redis_that_is_not_reached_or_refuses_scripts_is_not_said_to_wake_it(
    own_redis: RedisProcess, settings: Settings, shown: Shown, caplog: pytest.LogCaptureFixture
) -> None:
    with own_redis.client() as client:
        client.execute_command("ACL", "SETUSER", "shop", "on", ">secret", "~*", "&*", "+@all", "-eval", "-evalsha")
    for url in ("redis://127.0.0.1:1/0", f"redis://shop:secret@127.0.0.1:{own_redis.port}/0"):
        settings.DELAYQ = {**settings.DELAYQ, "REDIS": url}
        due_orders("remind")
        caplog.clear()
        assert "  Redis     not usable now: until it is, due timeouts are read from the database" in shown()
        (line,) = [each for each in caplog.messages if "serves all queues" in each]
        assert line.endswith("reading the database once a second")
        assert "redis_away" in [getattr(record, "event", "") for record in caplog.records]
    assert states() == {"fired": 2}


OFFICE = WorkingHours("Europe/Berlin", {"mon-fri": "09:00-17:00"})
DECLARED: dict[str, dict[str, Any]] = {
    "at created_at": {"after": timedelta(0), "since": "created_at", "when": Q(status="unpaid")},
    "4 working hours after paid_at, Europe/Berlin": {
        "after": Working(hours=4, calendar=OFFICE), "since": "paid_at", "when": Q(status="paid"),
    },
    "1 day, at 08:00, UTC, by hand": {"after": Wall(days=1, at="08:00", zone="UTC")},
}  # fmt: skip


@pytest.mark.usefixtures("without_redis")
def test_the_first_screen_says_what_deadlines_count_from_which_queues_are_known_and_who_runs_the_handlers(
    declare: Callable[..., Any], settings: Settings, shown: Shown
) -> None:
    for number, options in enumerate(DECLARED.values()):
        declare(Order, name=f"number_{number}", queue="sms", **options)
    lines = [line for line in shown("--queue", "sms").splitlines() if "testapp.order.number_" in line]
    assert [line.split("  ")[-1] for line in lines] == list(DECLARED)
    (line,) = [line for line in shown("--queue", "nope").splitlines() if line.startswith("  policies")]
    assert "none in this queue; known queues: default, " in line and "sms" in line
    assert "executor" not in shown()
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


# The last line counts timeouts, each once and by its last outcome, however often it was tried.

NAMES = ("fired", "skipped_or_dead", "settled_before", "to_be_tried_again")
Summary = Callable[[], tuple[int, ...]]


@pytest.fixture
def summary(source: str, caplog: pytest.LogCaptureFixture) -> Summary:
    """`summary()` runs a burst and returns the numbers of its last line."""

    def run() -> tuple[int, ...]:
        with caplog.at_level(logging.INFO, "django_delayq.worker"):
            Worker(burst=True, concurrency=1).run()
        [*_, line] = [each for each in caplog.records if vars(each).get("event") == "worker_stopped"]
        numbers = tuple(vars(line)[name] for name in NAMES)
        for name, number in zip(NAMES, numbers, strict=True):
            assert (f"{number} {name.replace('_', ' ')}" in line.getMessage()) == bool(number)
        return numbers

    return run


def fails(times: int) -> Callable[..., None]:
    tried = Counter[int]()

    def handler(_: Order, timeout: Any) -> None:
        tried[timeout.pk] += 1
        if tried[timeout.pk] <= times:
            raise LookupError("not yet")

    return handler


@pytest.mark.parametrize("options", [{}, {"atomic": False}])
def test_two_timeouts_of_which_each_failed_three_times_are_two(
    declare: Any, summary: Summary, options: dict[str, Any]
) -> None:
    due_orders(declare(Order, fails(3), name="slow_to_succeed", retry=dq.Retry([0] * 5), **options), 2)
    assert summary() == (2, 0, 0, 0)


def test_those_whose_next_attempt_is_later_are_counted_once(
    declare: Any, summary: Summary, monkeypatch: pytest.MonkeyPatch
) -> None:
    due_orders(declare(Order, fails(9), name="fails", retry=dq.Retry([0, 0, timedelta(hours=1)])), 2)
    due_orders("remind", 3)
    assert summary() == (3, 0, 0, 2)
    assert states() == {"fired": 3, "pending": 2}
    monkeypatch.setattr(dispatching, "MAX_LOST", 2)  # a worker that runs for months keeps few ids
    due_orders(declare(Order, fails(9), name="fails_once", retry=dq.Retry([timedelta(hours=1)])), 5)
    assert summary() == (0, 0, 0, 5)


def test_what_had_fired_before_is_neither_skipped_nor_dead(
    declare: Any, summary: Summary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a commit whose answer was lost: the timeout is delivered again."""
    rows = due_orders(declare(Order, name="redelivered"), 3)
    fired: dict[str, Any] = {"state": "fired", "cause": "due", "settled_at": timezone.now(), "slot_taken": None}
    plan = planning.plan

    def then_settled(*args: Any, **options: Any) -> Any:
        found = plan(*args, **options)
        Timeout.objects.filter(pk=rows[0].pk).update(attempts=1, **fired)
        return found

    monkeypatch.setattr(dispatching, "plan", then_settled)
    assert summary() == (2, 0, 1, 0)
    assert states() == {"fired": 3}
