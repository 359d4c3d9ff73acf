"""What a person at a terminal reads: status, lists, colours, progress, help, any encoding, and errors that help."""

from __future__ import annotations

import io
import json
import shlex
import time
from datetime import timedelta
from typing import Any

import pytest
from django.core.checks import ERROR, INFO, WARNING
from django.core.management import CommandError, call_command, get_commands
from django.core.management import load_command_class as load
from django.db import OperationalError, connection
from django.db.migrations.recorder import MigrationRecorder
from django.utils import timezone

import django_delayq as dq
from django_delayq import Limits, Rate, operations, schedule_timeout
from django_delayq.management.commands import delayq_status
from django_delayq.management.operating import DelayqCommand
from django_delayq.models import Installation, PolicyChange, Timeout
from django_delayq.monitoring.doctor import examine
from django_delayq.monitoring.snapshot import Snapshot, overview
from django_delayq.operations import hold, pause
from django_delayq.redis_clients import get_engine
from tests.integration.management.conftest import REMIND, UNPAID, Do, Terminal, a_worker, worst
from tests.integration.operations.conftest import BY, as_if, dead, pending
from tests.support.typed import Declare, Patch
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = timedelta(hours=1)
without_redis = pytest.mark.usefixtures("without_redis")


def test_a_due_timeout_whose_entry_a_worker_has_leased_is_explained(do: Do) -> None:
    a_worker()
    row = schedule_timeout(Order.objects.create(), "remind", seconds=0)
    engine = get_engine("default")
    assert engine is not None
    engine.queue(row.queue, engine.shard_of(row.pk)).reserve({row.policy: 1}, 60_000)
    time.sleep(0.002)  # it is due to the millisecond
    assert "A worker has claimed or deferred it until " in do("delayq_explain", "--id", str(row.pk)).out


@without_redis
def test_the_status_says_how_things_stand(do: Do) -> None:
    assert "oldest    nothing due\n" in do("delayq_status").out
    a_worker(held=3)
    as_if(pending(Order.objects.create()), "pending", run_at=timezone.now() - HOUR)
    unknown = pending(Order.objects.create(), "linger")
    Timeout.objects.filter(pk=unknown.pk).update(policy="testapp.order.forgotten")
    dead(Order.objects.create())
    lines = dict(line.split(maxsplit=1) for line in do("delayq_status").out.splitlines()[1:])
    assert lines["workers"].startswith("1 process, 4 threads, 3 under way, version ")
    assert lines["pending"] == "2, of which 1 due, 1 for more than a minute"
    assert lines["oldest"].startswith("due for 1 h")
    assert (lines["dead"], lines["lag"]) == ("1", "p50 -, p99 -")
    assert " ".join(lines["testapp.order.forgotten"].split()) == "not declared 1 0 0 0 0 0 1 - -"
    assert lines["24"] == "hours  0 in time, 0 fired, 0 fired late, 1 dead"
    pause(REMIND, by=BY, reason="outage")
    out = do("delayq_status").out
    assert f"paused    {REMIND} by admin:alice: outage; 1 due" in out
    assert "oldest    nothing due that may fire\n" in out
    seen = json.loads(do("delayq_status", "--json").out)
    assert (seen["pending"]["value"], seen["redis"]["is_configured"], len(seen["workers"])) == (2, False, 1)


def test_the_reports_show_delays_stops_and_guards_in_force(do: Do, declare: Any) -> None:
    rate = Rate(20, per=timedelta(seconds=1), by="status")
    limits = Limits(run=timedelta(seconds=30), rate=rate, snoozes=2, total=timedelta(1))
    declare(Order, name="watched", shadow=True, limits=limits)
    Order.objects.create(status="unpaid", created_at=timezone.now())
    do("delayq_late", REMIND, "6h"), do("delayq_brake", REMIND, "off")
    do("delayq_replan", UNPAID, "--after", "45m", "--mode", "keep")
    operations.pause(UNPAID, by="brake", reason="501 fired in 10 minutes")
    status, policies = (do(command).out.splitlines() for command in ("delayq_status", "delayq_policies"))
    assert f"paused    {UNPAID} by brake: 501 fired in 10 minutes; 0 due" in status
    for lines in (status, policies):
        listed = {line.split()[0]: line for line in lines}
        assert listed[REMIND].endswith("late skip after 6 h*, brake off*")
        limited = "shadow 100 %, run 30 s, rate 20 in 1 s by status, snoozes 2, total 1 d"
        assert listed["testapp.order.watched"].endswith(limited)
    (line,) = [line for line in policies if line.startswith(UNPAID)]
    assert line.split()[1:6] == ["45", "min*", "paused", "1", "0"]
    found = {each["label"]: each for each in json.loads(do("delayq_policies", "--json").out)}
    assert found[REMIND]["state"]["late"] == {"after": 21600, "then": "skip"}
    unpaid = found[UNPAID]["state"]
    assert (found["testapp.order.watched"]["state"]["shadow"], unpaid["is_braked"]) == (100, True)
    assert (found[UNPAID]["pending"], len(found[UNPAID]["hours"])) == ({"value": 1, "is_capped": False}, 24)
    assert unpaid["after"] == unpaid["delay"] == 45 * 60 and unpaid["by"] == "brake"


@without_redis
def test_the_name_of_the_installation_is_shown(do: Do, settings: Any) -> None:
    levels = [worst("installation")[0]]
    for name in ("staging", "staging", None, "production"):
        settings.DELAYQ = {**settings.DELAYQ, "INSTALLATION": name}
        levels.append(worst("installation")[0])
        if len(levels) == 2:
            Installation.objects.create(pk=1, name="production", since_at=timezone.now())
            told = "belongs   to the installation 'production', but DELAYQ['INSTALLATION'] is 'staging'"
            assert told in do("delayq_status").out
    assert levels == [INFO, INFO, ERROR, WARNING, INFO]
    assert "belongs   to the installation 'production'\n" in do("delayq_status").out


@without_redis
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_the_watched_status_outlives_its_database(monkeypatch: Patch, options: list[str]) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise KeyboardInterrupt

    def answer() -> Snapshot:
        if len(slept) == 1:
            raise OperationalError("server closed the connection\nunexpectedly")
        return overview()

    monkeypatch.setattr("django_delayq.management.commands.delayq_status.time.sleep", sleep)
    monkeypatch.setattr(delayq_status, "overview", answer)
    monkeypatch.setenv("LINES", "24")
    call_command("delayq_status", "--watch", *options, stdout=(out := Terminal()), stderr=(err := Terminal()))
    away = "The database does not answer, trying again every 2 s, until Ctrl-C: server closed the connection"
    away += " unexpectedly"
    assert slept == [2.0] * 3
    if options:
        assert (out.getvalue().count('"database": "default"'), err.getvalue()) == (2, f"{away}\n")
    else:
        frames = out.getvalue().split("\x1b[?7l")[1:]
        assert [away in frame for frame in frames] == [False, True, False]
        assert all("by the clock of database" in frame for frame in frames), "the last figures remain"


COMMANDS = sorted(name for name, app in get_commands().items() if app == "django_delayq" and name != "delayq_worker")


def test_progress_is_erased_is_not_an_error_and_counts_all_pages(monkeypatch: Patch) -> None:
    monkeypatch.setattr("django_delayq.sql.statements.CHUNK", 2)
    for _ in range(3):
        pending(order := Order.objects.create())
        pending(order, "cancel_unpaid")

    def progress(name: str, *arguments: str, color: bool = False, **options: Any) -> tuple[str, list[str]]:
        out, err = Terminal(), Terminal()
        # Given to the command and not to call_command(), where Django would not style errors.
        command = type(load("django_delayq", name))(out, err, force_color=color)
        call_command(command, *arguments, force_color=color, **options)
        return out.getvalue(), err.getvalue().split("\r")

    for verbosity, shown in ((1, ["2 examined", "3 examined", "", ""]), (0, ["", ""])):
        hold(REMIND, by="admin:alice")
        assert [line.strip() for line in progress("delayq_resume", REMIND, verbosity=verbosity)[1]] == shown
    lines = progress("delayq_replan", UNPAID, after="2h", mode="shift")[1]
    assert [line.strip() for line in lines] == ["2 examined", "3 examined", "", ""]
    out, (*shown, blank, end) = progress("delayq_cancel", "--policy", REMIND, color=True)
    assert (out, shown[-1].strip(), blank.strip(), end) == ("3 cancelled\n", "3 examined", "", "")
    assert len(blank) >= len(shown[-1])


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_in_the_help_are_valid(name: str) -> None:
    command = load("django_delayq", name)
    assert isinstance(command, DelayqCommand) and command.examples
    parser = command.create_parser("manage.py", name)
    assert command.examples in parser.format_help()
    for example in command.examples.splitlines()[1:]:
        program, called, *arguments = shlex.split(example)
        assert (program, called) == ("manage.py", name)
        parser.parse_args(arguments)


@pytest.fixture
def unmigrated() -> Any:
    """A database of which one migration is not applied: a table is missing."""
    MigrationRecorder.Migration.objects.filter(app="django_delayq").update(app="elsewhere")
    with connection.schema_editor() as editor:
        editor.delete_model(PolicyChange)
        editor.alter_db_table(Timeout, Timeout._meta.db_table, "elsewhere")
    yield
    with connection.schema_editor() as editor:
        editor.create_model(PolicyChange)
        editor.alter_db_table(Timeout, "elsewhere", Timeout._meta.db_table)
    MigrationRecorder.Migration.objects.filter(app="elsewhere").update(app="django_delayq")


@pytest.mark.usefixtures("without_redis", "unmigrated")
def test_a_forgotten_migration_is_named(do: Do, monkeypatch: Patch) -> None:
    for arguments in (["delayq_status"], ["delayq_list"], ["delayq_cancel", "--all"], ["delayq_explain", "--id", "1"]):
        with pytest.raises(CommandError, match="Migrations of django_delayq are not applied: run manage.py migrate"):
            do(*arguments)
    wrong = [(each.id, each.level, each.hint) for each in examine() if each.level > INFO and each.id != "workers"]
    assert wrong == [("migrations", ERROR, "Run manage.py migrate.")]

    def broken() -> None:
        raise OperationalError("disk I/O error")

    monkeypatch.setattr(delayq_status, "overview", broken)
    with pytest.raises(OperationalError, match="disk"):
        do("delayq_status")


KEY, REASON = "Bücher 中 😀", "übergroß 訂單 😀"


def stream_of(encoding: str) -> Any:
    """Return a stream with this encoding, which accepts nothing else."""
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")


def said(encoding: str, *arguments: str) -> str:
    call_command(*arguments, stdout=(out := stream_of(encoding)), stderr=stream_of(encoding))
    out.flush()
    return str(out.buffer.getvalue().decode(encoding))


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_letter_that_the_output_does_not_have_is_escaped_and_json_remains_json(
    order: Order, encoding: str, declare: Declare
) -> None:
    declare(Order, name="remind_again", queue="почта")
    dq.schedule_timeout(order, "remind", minutes=5, key=KEY, reason=REASON, payload={"note": REASON})
    texts = {
        name: said(encoding, name, *more) for name, more in {"delayq_list": (), "delayq_worker": ("--burst",)}.items()
    }
    if encoding == "utf-8":
        assert "\\u" not in "".join(texts.values())
    else:
        assert "\\u043f" in texts["delayq_worker"] and "\\u8a02" in texts["delayq_list"]
        assert ("\\xfc" in texts["delayq_list"]) is (encoding == "ascii")
    (found,) = json.loads(said(encoding, "delayq_list", "--json"))
    assert (found["key"], found["reason"], found["payload"]) == (KEY, REASON, {"note": REASON})
