"""What a person at a terminal sees: colour, tables that fit, progress, help, and errors that name the fix."""

from __future__ import annotations

import io
import shlex
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.core.checks import ERROR, INFO, WARNING
from django.core.management import CommandError, call_command, execute_from_command_line, get_commands
from django.core.management import load_command_class as load
from django.db import OperationalError, connection
from django.db.migrations.recorder import MigrationRecorder
from django.utils import timezone

from django_delayq import Limits, Rate
from django_delayq.management.commands import delayq_status
from django_delayq.management.operating import DelayqCommand
from django_delayq.models import Installation, PolicyChange, Timeout
from django_delayq.monitoring.doctor import examine
from django_delayq.monitoring.snapshot import Snapshot, overview
from django_delayq.operations import hold
from tests.integration.commands.conftest import Do
from tests.integration.operations.conftest import as_if, dead, pending
from tests.testapp.models import Order, Parcel

pytestmark = pytest.mark.django_db(transaction=True)
COMMANDS = sorted(name for name, app in get_commands().items() if app == "django_delayq" and name != "delayq_worker")
RED, YELLOW, GREEN = "\x1b[31;1m", "\x1b[33;1m", "\x1b[32;1m"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def at_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, str]]:
    """`at_terminal("delayq_list", columns=80)` returns what the command writes to a terminal: output and errors."""

    def run(*arguments: str, columns: int = 80, **options: Any) -> tuple[str, str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("LINES", "24")
        out, err = Terminal(), Terminal()
        call_command(*arguments, stdout=out, stderr=err, **options)
        return out.getvalue(), err.getvalue()

    return run


@pytest.mark.usefixtures("without_redis")
def test_reports_are_coloured_if_that_is_wanted(do: Do) -> None:
    row = dead(Order.objects.create())
    as_if(pending(Order.objects.create()), "pending", run_at=timezone.now() - timedelta(minutes=5))
    assert f"workers   {RED}0 processes" in do("delayq_status", "--force-color").out
    assert f"dead      {YELLOW}1\x1b[0m" in do("delayq_status", "--force-color").out
    assert f"{RED}dead\x1b[0m" in do("delayq_list", "--id", str(row.pk), "--force-color").out
    assert f"{YELLOW}1\x1b[0m" in do("delayq_policies", "--force-color").out
    with pytest.raises(SystemExit):
        do("delayq_doctor", "--force-color")
    for options in ((), ("--no-color",)):
        assert "\x1b" not in do("delayq_status", *options).out + do("delayq_list", "--all", *options).out


@pytest.mark.usefixtures("without_redis")
def test_the_doctor_is_coloured(capsys: pytest.CaptureFixture[str]) -> None:
    for options, is_coloured in ((("--force-color",), True), ((), False)):
        with pytest.raises(SystemExit):
            call_command("delayq_doctor", *options)
        out = capsys.readouterr().out
        assert (f"{RED}ERROR   \x1b[0mworkers: No worker" in out, f"{GREEN}ok" in out) == (is_coloured, is_coloured)


@pytest.mark.usefixtures("without_redis")
def test_every_report_fits_eighty_columns(at_terminal: Callable[..., tuple[str, str]]) -> None:
    parcel = Parcel.objects.create(sent_at=timezone.now())
    as_if(parcel.timeouts.get(), "dead", "retries", reason="ConnectionError: the courier did not answer", attempts=10)
    pending(Order.objects.create(), "linger")
    explained = ["delayq_explain", "--id", str(parcel.timeouts.get().pk)]
    for arguments in (["delayq_list", "--state", "dead"], ["delayq_policies"], ["delayq_status"], explained):
        out, _ = at_terminal(*arguments)
        assert max(map(len, out.splitlines())) <= 80, out
    words = at_terminal("delayq_list", "--state", "dead")[0].replace("\n", " ").split()
    assert "".join(str(parcel.pk).split("-")[-1:]) in words and "courier" in words


@pytest.mark.usefixtures("without_redis")
def test_the_findings_of_the_doctor_fit_eighty_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Timeout.objects.filter(pk=dead(Order.objects.create()).pk).update(policy="testapp.order.forgotten")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with pytest.raises(SystemExit):
        call_command("delayq_doctor", "--no-color")
    out = capsys.readouterr().out
    assert "delayq_retire" in out and max(map(len, out.splitlines())) <= 80, out


@pytest.mark.parametrize("stop", ["delayq_pause", "delayq_hold"])
def test_a_stopped_policy_is_refused_in_words_that_fit_a_pause_and_a_hold(do: Do, stop: str) -> None:
    row = pending(Order.objects.create())
    do(stop, row.policy)
    with pytest.raises(CommandError, match="the policy is stopped: resume it first"):
        do("delayq_fire", "--id", str(row.pk))


def test_the_list_shows_datetimes_with_their_zone_and_only_columns_with_values(do: Do) -> None:
    row = pending(Order.objects.create())
    head, line = do("delayq_list").out.splitlines()
    assert head.split() == ["id", "policy", "object", "state", "due"]
    assert line.endswith(f"{timezone.localtime(row.due_at):%Y-%m-%d %H:%M:%S} -03")
    as_if(row, "pending", run_at=row.due_at + timedelta(hours=1), attempts=2)
    assert do("delayq_list").out.splitlines()[0].endswith("due                      next attempt             attempts")
    as_if(row, "dead", "retries", run_at=row.due_at + timedelta(hours=1), attempts=2)
    assert "next attempt" not in do("delayq_list", "--state", "dead").out, "it has none"


@pytest.mark.parametrize("name", ["cancel", "fire", "postpone", "retry", "refire"])
def test_a_timeout_that_is_named_and_left_alone_is_explained(do: Do, name: str) -> None:
    fired = as_if(pending(Order.objects.create()), "fired", "due")
    waiting = pending(Order.objects.create())
    row, why = (waiting, "not") if name in {"retry", "refire"} else (fired, "already settled")
    more = ("--by", "1h") if name == "postpone" else ()
    with pytest.raises(CommandError, match="left unchanged") as refused:
        do(f"delayq_{name}", "--id", str(row.pk), "--id", "0", *more)
    assert refused.value.returncode == 1
    assert why in str(refused.value) and f"({row.pk})" in str(refused.value)
    assert str(refused.value).endswith("\n1 not found among the selected timeouts: 0")


@pytest.mark.parametrize("selection", [{"id": []}, {"search": "nothing"}])
def test_a_selection_of_nothing_changes_nothing(selection: dict[str, Any]) -> None:
    pending(Order.objects.create())
    call_command("delayq_cancel", **selection, stdout=(out := io.StringIO()))
    assert out.getvalue() == "0 cancelled\n"


def test_a_named_timeout_is_listed_in_any_state(do: Do) -> None:
    fired = as_if(pending(Order.objects.create()), "fired", "due")
    assert "fired" in do("delayq_list", "--id", str(fired.pk)).out


def test_progress_is_erased_and_is_not_an_error() -> None:
    rows = [pending(Order.objects.create()) for _ in range(3)]
    out, err = Terminal(), Terminal()
    # Given to the command and not to call_command(), where Django would not style errors.
    call_command(type(load("django_delayq", "delayq_cancel"))(out, err, force_color=True), "--all", force_color=True)
    assert out.getvalue() == f"{len(rows)} cancelled\n"
    shown, blank, end = err.getvalue().split("\r")
    assert (shown.strip(), blank.strip(), end) == ("3 examined", "", "")
    assert len(blank) >= len(shown)


def test_progress_counts_what_all_pages_have_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django_delayq.sql.statements.CHUNK", 2)
    for _ in range(3):
        pending(order := Order.objects.create())
        pending(order, "cancel_unpaid")
    hold("testapp.order.remind", by="admin:alice")
    resume_command = type(load("django_delayq", "delayq_resume"))
    call_command(resume_command(Terminal(), err := Terminal()), "testapp.order.remind")
    shown = [line.strip() for line in err.getvalue().split("\r")]
    assert shown == ["2 examined", "3 examined", "", ""]
    hold("testapp.order.remind", by="admin:alice")
    call_command(resume_command(Terminal(), err := Terminal()), "testapp.order.remind", verbosity=0)
    assert err.getvalue().strip() == ""
    replan_command = type(load("django_delayq", "delayq_replan"))(Terminal(), err := Terminal())
    call_command(replan_command, "testapp.order.cancel_unpaid", after="2h", mode="shift")
    assert [line.strip() for line in err.getvalue().split("\r")] == ["2 examined", "3 examined", "", ""]


@pytest.mark.usefixtures("without_redis")
def test_the_watched_status_is_drawn_in_one_place(
    at_terminal: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("django_delayq.management.commands.delayq_status.time.sleep", sleep)
    out, _ = at_terminal("delayq_status", "--watch")
    lines = out.partition("\x1b[J")[0].count("\n")
    assert out.count("by the clock of database") == 2
    assert out.count(f"\x1b[{lines}F") == 1


@pytest.mark.usefixtures("without_redis")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_the_watched_status_outlives_its_database(
    at_terminal: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    def answer() -> Snapshot:
        if len(pauses) == 1:
            raise OperationalError("server closed the connection\nunexpectedly")
        return overview()

    monkeypatch.setattr("django_delayq.management.commands.delayq_status.time.sleep", sleep)
    monkeypatch.setattr(delayq_status, "overview", answer)
    out, err = at_terminal("delayq_status", "--watch", *options)
    away = (
        "The database does not answer, trying again every 2 s, until Ctrl-C: server closed the connection unexpectedly"
    )
    if options:
        assert (out.count('"database": "default"'), err) == (2, f"{away}\n")
    else:
        frames = out.split("\x1b[?7l")[1:]
        assert [away in frame for frame in frames] == [False, True, False]
        assert all("by the clock of database" in frame for frame in frames), "the last figures remain"


@pytest.mark.usefixtures("without_redis")
def test_the_name_of_the_installation_is_shown(do: Do, settings: Any) -> None:
    def level() -> int:
        return next(each.level for each in examine() if each.id == "installation")

    assert level() == INFO
    settings.DELAYQ = {**settings.DELAYQ, "INSTALLATION": "staging"}
    assert level() == INFO
    Installation.objects.create(pk=1, name="production", since_at=timezone.now())
    assert (
        "belongs   to the installation 'production', but DELAYQ['INSTALLATION'] is 'staging'" in do("delayq_status").out
    )
    assert level() == ERROR
    settings.DELAYQ = {**settings.DELAYQ, "INSTALLATION": None}
    assert level() == WARNING
    settings.DELAYQ = {**settings.DELAYQ, "INSTALLATION": "production"}
    assert level() == INFO
    assert "belongs   to the installation 'production'\n" in do("delayq_status").out


@pytest.mark.usefixtures("without_redis")
def test_rates_are_shown(do: Do, declare: Callable[..., Any]) -> None:
    declare(Order, name="text", limits=Limits(rate=Rate(20, per=timedelta(minutes=1))))
    for command in ("delayq_status", "delayq_policies"):
        assert "rate 20 in 1 min" in do(command).out
    assert '"rate": {' in do("delayq_status", "--json").out


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


def test_a_wrong_option_is_reported_in_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        execute_from_command_line(["manage.py", "delayq_cancel", "--polisy", "x"])
    usage, error = capsys.readouterr().err.splitlines()
    assert exit_info.value.code == 2
    assert usage == "usage: manage.py delayq_cancel [options]"
    assert error.endswith("error: unrecognized arguments: --polisy x")


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
def test_a_forgotten_migration_is_named(do: Do) -> None:
    for arguments in (["delayq_status"], ["delayq_list"], ["delayq_cancel", "--all"], ["delayq_explain", "--id", "1"]):
        with pytest.raises(CommandError, match="Migrations of django_delayq are not applied: run manage.py migrate"):
            do(*arguments)
    wrong = [each for each in examine() if each.level > INFO]
    assert [(each.id, each.level, each.hint) for each in wrong if each.id != "workers"] == [
        ("migrations", ERROR, "Run manage.py migrate.")
    ]


def test_another_error_of_the_database_is_not_blamed_on_migrations(do: Do, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OperationalError("disk I/O error")

    monkeypatch.setattr(delayq_status, "overview", broken)
    with pytest.raises(OperationalError, match="disk"):
        do("delayq_status")
