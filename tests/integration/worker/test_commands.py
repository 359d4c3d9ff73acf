"""The commands: arguments in, one call out; and the first screen of a worker."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from pytest_django import Settings

from django_delayq.ledger.db_connections import pool_limit
from tests.support.workers import due_orders, states

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


@pytest.mark.usefixtures("without_redis")
def test_the_first_screen_names_the_known_queues_the_executor_and_a_redis_that_is_not_reached(
    settings: Settings, shown: Shown
) -> None:
    (line,) = [line for line in shown("--queue", "nope").splitlines() if line.startswith("  policies")]
    assert "none in this queue; known queues: default" in line
    executor = "tests.integration.worker.test_remote.QueueExecutor"
    settings.DELAYQ = {**settings.DELAYQ, "EXECUTOR": executor}
    assert f"  executor  {executor}: runs the handlers" in shown()
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": "redis://127.0.0.1:1/0"}
    assert "  Redis     not usable now: until it is, due timeouts are read from the database" in shown()
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
