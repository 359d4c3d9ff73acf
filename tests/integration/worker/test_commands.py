"""The commands: arguments in, one call out."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.db.models import Q
from pytest_django import Settings

from django_delayq import Wall, Working, WorkingHours
from django_delayq.ledger.db_connections import pool_limit
from tests.engine.redis_process import RedisProcess
from tests.support.workers import due_orders, states
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.usefixtures("source")
def test_the_worker_command_says_what_it_serves(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    due_orders("remind", 3)
    call_command("delayq_worker", "--burst", "--concurrency", "2", "--queue", "default")
    assert states() == {"fired": 3}
    out = capsys.readouterr().out
    limit = pool_limit("default")
    threads = limit.threads(2) if limit else 2
    lines = out.splitlines()
    assert lines[0].startswith("django-delayq 0.")
    has_server = connection.vendor != "sqlite"
    assert lines[1].endswith(f", at most {limit.size if limit else threads + 3} connections" if has_server else "')")
    assert lines[2].startswith("  Redis     reached at " if source == "redis" else "  Redis     none: ")
    assert lines[2].endswith(f", at most {threads + 6} connections" if source == "redis" else "once a second")
    assert lines[3:5] == [f"  threads   {threads}", "  queues    default"]
    shown = [line.split(maxsplit=1) for line in lines]
    assert ["testapp.order.cancel_unpaid", "30 min after created_at"] in shown
    assert ["testapp.order.remind", "by hand, each with its own delay"] in shown


def test_a_worker_that_does_not_reach_redis_does_not_say_that_redis_wakes_it(
    settings: Settings, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": "redis://127.0.0.1:1/0"}
    with caplog.at_level("INFO", "django_delayq.worker"):
        call_command("delayq_worker", "--burst")
    assert "  Redis     not usable now: until it is, due timeouts are read from the database" in capsys.readouterr().out
    (line,) = [each for each in caplog.messages if "serves all queues" in each]
    assert line.endswith("reading the database once a second")


def test_a_user_of_redis_who_may_run_no_scripts_is_shown_at_the_start(
    own_redis: RedisProcess, settings: Settings, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with own_redis.client() as client:
        client.execute_command("ACL", "SETUSER", "shop", "on", ">secret", "~*", "&*", "+@all", "-eval", "-evalsha")
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": f"redis://shop:secret@127.0.0.1:{own_redis.port}/0"}
    order = due_orders("remind")[0]
    call_command("delayq_worker", "--burst")
    assert "  Redis     not usable now" in capsys.readouterr().out
    assert "redis_away" in [getattr(record, "event", "") for record in caplog.records]
    order.refresh_from_db()
    assert order.state == "fired"


@pytest.mark.usefixtures("without_redis")
def test_a_blank_line_separates_the_first_screen_from_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    call_command("delayq_worker", "--burst")
    assert capsys.readouterr().out.endswith("A second signal aborts them.\n\n")
    call_command("delayq_worker", "--burst", "--log-format", "json")
    assert capsys.readouterr().out == ""


OFFICE = WorkingHours("Europe/Berlin", {"mon-fri": "09:00-17:00"})


@pytest.mark.usefixtures("without_redis")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"after": timedelta(0), "since": "created_at", "when": Q(status="unpaid")}, "at created_at"),
        (
            {"after": Working(hours=4, calendar=OFFICE), "since": "paid_at", "when": Q(status="paid")},
            "4 working hours after paid_at, Europe/Berlin",
        ),
        ({"after": Wall(days=1, at="08:00", zone="UTC")}, "1 day, at 08:00, UTC, by hand"),
    ],
    ids=["a time", "working hours", "by hand"],
)
def test_the_first_screen_says_what_deadlines_count_from(
    declare: Callable[..., Any], capsys: pytest.CaptureFixture[str], options: dict[str, Any], words: str
) -> None:
    declare(Order, name="on_time", **options)
    call_command("delayq_worker", "--burst")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "testapp.order.on_time " in line]
    assert line.endswith(f"  {words}")


@pytest.mark.usefixtures("without_redis")
def test_the_first_screen_of_a_queue_without_policies_names_the_known_queues(
    declare: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    declare(Order, name="text", queue="sms")
    call_command("delayq_worker", "--burst", "--queue", "nope")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  policies")]
    assert "none in this queue; known queues: default, " in line and "sms" in line


@pytest.mark.usefixtures("without_redis")
def test_the_first_screen_names_the_executor(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    executor = "tests.integration.worker.test_remote.QueueExecutor"
    call_command("delayq_worker", "--burst")
    assert "executor" not in capsys.readouterr().out
    settings.DELAYQ = {**settings.DELAYQ, "EXECUTOR": executor}
    call_command("delayq_worker", "--burst")
    assert f"  executor  {executor}: runs the handlers" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--concurrency", "0"],
        ["--concurrency", "x"],
        ["--concurrency", "5000"],
        ["--max-timeouts", "0"],
        ["--nonsense"],
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(CommandError):
        call_command("delayq_worker", *arguments)


def test_wrong_settings_are_an_error_of_the_command(settings: Settings) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": "redis+magic://me:secret@host"}
    with pytest.raises(CommandError, match="has an unknown scheme or form") as refused:
        call_command("delayq_worker", "--burst")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--policy", "testapp.order.cancel_unpayd"], "cancel_unpaid"), (["--backfill"], "needs --policy")],
)
def test_a_sync_of_a_misspelled_policy_or_a_backfill_of_all_is_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(CommandError, match=words):
        call_command("delayq_sync", *arguments)
