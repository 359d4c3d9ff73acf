"""What a person at a terminal sees: colour, tables that fit, progress, help, any encoding, and errors that help."""

from __future__ import annotations

import io
import json
import shlex
from datetime import timedelta
from typing import Any

import pytest
from django.core.checks import ERROR, INFO
from django.core.management import CommandError, call_command, get_commands
from django.core.management import load_command_class as load
from django.db import OperationalError, connection
from django.db.migrations.recorder import MigrationRecorder
from django.utils import timezone

import django_delayq as dq
from django_delayq.management.commands import delayq_status
from django_delayq.management.operating import DelayqCommand
from django_delayq.models import PolicyChange, Timeout
from django_delayq.monitoring.doctor import examine
from django_delayq.operations import hold
from tests.integration.commands.conftest import REMIND, UNPAID, Do, Terminal
from tests.integration.operations.conftest import as_if, dead, pending
from tests.support.typed import Declare, Patch
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
COMMANDS = sorted(name for name, app in get_commands().items() if app == "django_delayq" and name != "delayq_worker")
RED, YELLOW, GREEN = "\x1b[31;1m", "\x1b[33;1m", "\x1b[32;1m"


@pytest.mark.usefixtures("without_redis")
def test_reports_are_coloured_if_that_is_wanted(do: Do, capsys: pytest.CaptureFixture[str]) -> None:
    row = dead(Order.objects.create())
    as_if(pending(Order.objects.create()), "pending", run_at=timezone.now() - timedelta(minutes=5))
    status = do("delayq_status", "--force-color").out
    assert f"workers   {RED}0 processes" in status and f"dead      {YELLOW}1\x1b[0m" in status
    assert f"{RED}dead\x1b[0m" in do("delayq_list", "--id", str(row.pk), "--force-color").out
    assert f"{YELLOW}1\x1b[0m" in do("delayq_policies", "--force-color").out
    for options in ((), ("--no-color",)):
        assert "\x1b" not in do("delayq_status", *options).out + do("delayq_list", "--all", *options).out
    for options, is_coloured in ((("--force-color",), True), ((), False)):
        with pytest.raises(SystemExit):
            call_command("delayq_doctor", *options)
        out = capsys.readouterr().out
        assert (f"{RED}ERROR   \x1b[0mworkers: No worker" in out, f"{GREEN}ok" in out) == (is_coloured, is_coloured)


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
