"""What the commands share: help with examples, errors without a traceback, the actor, a confirmation, a report."""

from __future__ import annotations

import os
import pwd
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from inspect import cleandoc
from pathlib import Path
from typing import Any, ClassVar, Final

from django.core.management.base import BaseCommand, CommandError, CommandParser, DjangoHelpFormatter
from django.db import OperationalError, ProgrammingError, router, transaction
from django.utils import translation

from django_delayq.exceptions import DelayqError
from django_delayq.ledger.controls import PolicyState, policy_state
from django_delayq.ledger.db_connections import not_migrated
from django_delayq.ledger.locking import transaction_of
from django_delayq.ledger.routing import database_of
from django_delayq.ledger.search import Count, count
from django_delayq.logs import one_line
from django_delayq.management import output
from django_delayq.management.options import (
    Selection,
    add_parameters,
    add_repeated,
    add_selection,
    arguments_of,
    values_of,
    wrong_value,
)
from django_delayq.models import WAITING, Timeout
from django_delayq.operations import PolicyConflict, Refusal, Result
from django_delayq.operations.policies import outlasts
from django_delayq.operations.previews import Preview, preview_timeouts
from django_delayq.operations.registry import OPERATIONS, TIMEOUT_OPERATIONS
from django_delayq.policy.policies import TimeoutPolicy, get_policies, get_policy
from django_delayq.rounds.memory import clean

EXAMPLES: Final = "Examples:"
MAX_UNASKED: Final = 10
"""Up to this number of timeouts a command changes without asking."""
FIRING: Final = ("fire", "retry", "refire")
"""The operations whose result need not say that their timeouts are due at once."""
STILL_FIRING: Final = 3
"""The exit code of a cancellation that could only forbid further attempts. Not 0, so that a script does not refund."""
PROGRESS_SECONDS: Final = 60
"""More often, the log of a nightly sync of a big table would be mostly progress."""
INDENT: Final = output.Painted("  ")


def actor() -> str:
    """Return `cli:` and the user of this process, by the operating system and not by an environment variable."""
    try:
        return f"cli:{pwd.getpwuid(os.getuid()).pw_name}"
    except KeyError:
        return f"cli:{os.getuid()}"


def foretold(preview: Preview) -> str:
    """Return what an operation would do, in English."""
    with translation.override("en"):
        return one_line(" ".join(preview.sentences()))


def has_terminal() -> bool:
    """Return whether a person can answer: not under cron, and not where standard input is closed (`None`)."""
    return bool(sys.stdin and sys.stdin.isatty())


class _HelpFormatter(DjangoHelpFormatter):
    """Prints the examples as they are: one command a line."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(EXAMPLES) else super()._fill_text(text, width, indent)


class DelayqCommand(BaseCommand):
    """A command with its docstring as help, which ends with examples, and errors without a traceback.

    Its output and options may be in any script, whatever the encoding of the terminal has.
    """

    arguments: ClassVar[str] = ""
    """Positional arguments, for the line that precedes an error. Django's line has all options: nine lines."""
    examples: ClassVar[str]

    def __init_subclass__(cls, **declared: Any) -> None:
        """Set the attributes `declared` of a command: `class Command(TimeoutCommand, name="cancel")`."""
        cls.help, heading, examples = cleandoc(cls.__doc__ or "").partition(EXAMPLES)
        cls.examples = f"{heading}{examples}"
        for name, value in declared.items():
            setattr(cls, name, value)

    def __init__(self, stdout: Any = None, stderr: Any = None, **options: Any) -> None:
        streams: Any = output.Encodable(stdout or sys.stdout), output.Encodable(stderr or sys.stderr)
        super().__init__(*streams, **options)

    def execute(self, *args: Any, **options: Any) -> str | None:
        """Refuse what no database stores: a NUL, and bytes of the shell that are not text (lone surrogates)."""
        for name, value in options.items():
            for text in values_of(value) if name != "reason" else ():  # which is stored without them
                if isinstance(text, str) and clean(text) != text:
                    raise wrong_value(f"--{name.replace('_', '-')}", text, "is not text in the encoding of this shell")
        options |= {name: output.Encodable(options[name]) for name in ("stdout", "stderr") if options.get(name)}
        try:
            return super().execute(*args, **options)
        except DelayqError as error:
            raise CommandError(str(error)) from error
        except (OperationalError, ProgrammingError) as error:
            if missing := not_migrated(error, router.db_for_write(Timeout)):
                raise CommandError(str(missing)) from error
            raise

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        epilog = self.examples.replace("manage.py", Path(prog_name).name)
        usage = f"%(prog)s {self.arguments} [options]".replace("  ", " ")
        kwargs = {"usage": usage, "epilog": epilog, "formatter_class": _HelpFormatter, **kwargs}
        return super().create_parser(prog_name, subcommand, **kwargs)


class ReportCommand(DelayqCommand):
    """A command that reads, and prints lines or JSON. It also runs where a system check fails, without notices."""

    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--json", action="store_true", help="print JSON, with all values")

    def print(self, value: Any, lines: Iterable[str], options: dict[str, Any]) -> None:
        if text := output.as_json(value, output.encoding_of(self.stdout)) if options["json"] else "\n".join(lines):
            self.stdout.write(text)

    def wrapped(
        self, text: str, paint: output.Paint = str, *, label: output.Painted = INDENT, hanging: int = 0
    ) -> list[str]:
        """Return `text` as lines that fit the terminal, beside `label`; `hanging`: blanks before all but the first."""
        text, width, blank = one_line(text), output.terminal_width(self.stdout), " " * len(label)
        lines = [text] if width is None else textwrap.wrap(text, width - len(label), subsequent_indent=" " * hanging)
        return [f"{blank if place else label.paint(label)}{paint(line)}" for place, line in enumerate(lines)]

    def table(self, head: Sequence[str], rows: Sequence[output.Cells], *optional: str) -> list[str]:
        """Return a table that fits the terminal; `optional` columns are omitted first."""
        painted = [output.Painted(name, self.style.MIGRATE_LABEL) for name in head]
        return output.table(painted, rows, output.terminal_width(self.stdout), optional=optional)


class AskingCommand(DelayqCommand):
    """A command that asks before it changes many timeouts."""

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--dry-run", action="store_true", help="change nothing, only print what would change")
        parser.add_argument("--yes", action="store_true", help="do not ask, however many they are")

    def ask(self, what: str, number: Count, options: dict[str, Any]) -> None:
        """Return if `what` may be done to that many timeouts. Raises CommandError if not, or without a terminal."""
        if options["yes"] or options.get("dry_run") or number.value <= MAX_UNASKED:
            return
        if not has_terminal():
            ways = "--yes or --dry-run" if "dry_run" in options else "--yes"
            raise CommandError(f"That would {what} {number} timeouts. Without a terminal, give {ways}.")
        self.stdout.write(f"{what} {number} timeouts? [y/N] ", ending="")
        self.stdout.flush()
        if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
            raise CommandError("Nothing was changed.")

    @contextmanager
    def progress(self, options: dict[str, Any]) -> Iterator[Callable[[int | Result], None]]:
        """Yield a function that adds the rows of a page, or those of its result, and shows how many there were.

        On a terminal in a line that the next output overwrites. Elsewhere in a line each minute, so that the log of a
        long run shows that it has not stopped.
        """
        total, shown_at, is_quiet = 0, time.monotonic(), options["verbosity"] == 0

        def add(page: int | Result) -> None:
            nonlocal total, shown_at
            total += page if isinstance(page, int) else page.changed + page.unchanged
            if self.stderr.isatty() and not is_quiet:
                self.stderr.write(f"  {total} examined", style_func=str, ending="\r")
            elif not is_quiet and time.monotonic() - shown_at >= PROGRESS_SECONDS:
                shown_at = time.monotonic()
                self.stdout.write(f"{total} examined")
                self.stdout.flush()

        yield add
        if self.stderr.isatty():  # no part of the progress remains beside the result
            self.stderr.write(" " * len(f"  {total} examined"), style_func=str, ending="\r")
            self.stderr.flush()

    def report(self, line: str, options: dict[str, Any]) -> None:
        # The line may have a reason that was given in the admin or by REST.
        self.stdout.write(one_line(f"{line} (dry run: nothing was changed)" if options["dry_run"] else line))


class OperatorCommand(AskingCommand):
    """A command that runs an operation and stores who ran it and why."""

    name: ClassVar[str] = ""
    """Of the operation in the registry; empty: it has none, and options of its own."""
    done: ClassVar[str]

    def add_arguments(self, parser: CommandParser) -> None:
        if self.name:
            add_parameters(parser, OPERATIONS[self.name])
        parser.add_argument("--reason", default="", help="stored with each change, for people")
        super().add_arguments(parser)

    def parameters(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the operation. Raises CommandError."""
        return arguments_of(options, OPERATIONS[self.name])

    def run_operation(self, target: Any, options: dict[str, Any], **more: Any) -> Any:
        operation = OPERATIONS[self.name]
        call, has_progress = partial(operation.call, target), self.name in TIMEOUT_OPERATIONS or operation.moves_rows
        return self.call(call, options, has_progress=has_progress, **more, **self.parameters(options))

    def call(self, call: Callable[..., Any], options: dict[str, Any], *, has_progress: bool = True, **more: Any) -> Any:
        """Return what `call` returns of `more`, of the user and of the reason, and show its progress if it has any."""
        with self.progress(options) as add:
            more |= {"progress": add} if has_progress else {}
            return call(by=actor(), reason=options["reason"], **more)


class TimeoutCommand(OperatorCommand):
    """An operation on the timeouts that the options select."""

    states: ClassVar[tuple[str, ...]] = ()
    """Those that it selects without `--state`; empty: waiting ones, or else the first in which it can succeed."""

    def add_arguments(self, parser: CommandParser) -> None:
        states = tuple(state for state in Timeout.State.values if state in OPERATIONS[self.name].states)
        waiting = tuple(state for state in states if state in WAITING)
        add_selection(parser, self.states or states, default=self.states or waiting or states[:1])
        super().add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        selection = Selection.of(options)
        rows, absent = selection.rows, selection.absent()
        self.ask(self.name, count(rows), options)
        result: Result = self.run_operation(rows, options, dry_run=options["dry_run"])
        due = f", {result.due_at_once} of them due at once" if result.due_at_once and self.name not in FIRING else ""
        before = f", and {result.continued} before it was interrupted" if result.continued else ""
        said = f"{result.changed} {self.done}{due}{before}"
        if result.dry_run:  # those that are refused are listed below
            preview = preview_timeouts(replace(result, refused={}), OPERATIONS[self.name].will)
            said += f". {foretold(preview)}"
        self.report(said, options)
        lines, code = [], STILL_FIRING if result.refused.keys() == {Refusal.NO_RETRY} and not absent else 1
        for why, number in result.refused.items():
            ids = ", ".join(str(row_id) for row_id, its_why in result.refusals[:50] if its_why is why)
            words = "not cancelled, may still succeed" if why is Refusal.NO_RETRY else "left unchanged"
            lines.append(f"{number} {words}: {why.label}{f' ({ids})' if ids else ''}")
        if absent:
            lines.append(f"{len(absent)} not found among the selected timeouts: {', '.join(map(str, absent))}")
        if lines:
            raise CommandError("\n".join(lines), returncode=code)


class PolicyCommand(OperatorCommand):
    """An operation on each of the named policies."""

    arguments = "LABEL ..."
    labels: ClassVar[str | None] = "*"
    """How many labels are arguments; None: one, for commands with a further argument."""
    all_help: ClassVar[str | None] = None
    """What `--all` does; None: there is no such option."""

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("label", nargs=self.labels, metavar="LABEL", help="these policies")
        if self.labels is not None:
            add_repeated(parser, "--policy", "LABEL", "the same as a LABEL; may be repeated")
        if self.all_help is not None:
            parser.add_argument("--all", action="store_true", help=self.all_help)
        super().add_arguments(parser)

    def policies(self, options: dict[str, Any]) -> list[TimeoutPolicy[Any]]:
        """Return the named policies, or with `--all` every one. Raises UnknownPolicy, and CommandError for both."""
        labels = [*values_of(options["label"]), *values_of(options.get("policy"))]
        if not options.get("all"):
            return [get_policy(label) for label in dict.fromkeys(labels)]
        if labels:
            raise CommandError("Give either labels of policies, or --all.")
        return sorted(get_policies(), key=lambda policy: policy.label)

    def left_alone(self, state: PolicyState, options: dict[str, Any]) -> str:
        """Return why `--all` leaves a policy in this state as it is; empty: it does not."""
        return ""

    def shown(self, state: PolicyState) -> str:
        """Return what the operation changes, as the report has it before and after."""
        return output.stop_of(state)

    def handle(self, *args: Any, **options: Any) -> None:
        # All labels are looked up before the first policy is changed: with a wrong label nothing changes.
        policies = self.policies(options)
        if not policies:
            others = ", or --all" if self.all_help else ""
            raise CommandError(f"Which policies? Give their labels, such as shop.order.cancel_unpaid{others}.")
        found = [(policy, database_of(policy.concrete_model)) for policy in policies]
        states, operation = [(policy_state(policy, using), using) for policy, using in found], OPERATIONS[self.name]
        for before, using in states:
            if self.parameters(options).get("shift") and before.stop in {"held", "releasing"}:  # only resume shifts
                self.ask(f"move the deadlines of {before.label}, which are", _pending(before.policy, using), options)
        refused = []
        for before, using in states:
            policy = before.policy
            was = f"{policy.label} (was {self.shown(before).rstrip('.')}; {_pending(policy, using)} pending)"
            if options.get("all") and (why := self.left_alone(before, options)):
                self.report(f"{was}: {why}", options)
                continue
            try:
                # A dry run does the same in a transaction that rolls back, so that it is refused where the command is.
                with _rolled_back(using) if options["dry_run"] else nullcontext():
                    change = self.run_operation(policy, options)
            except PolicyConflict as error:  # the others are changed: an operator stops them in an emergency
                refused.append(str(error))
                continue
            moved = f"; {change.moved} moved, {change.unmoved} left unchanged" if change and change.moved else ""
            now = f"{self.shown(policy_state(policy, using))}{moved}" if change else "nothing to change"
            if change and options["dry_run"]:
                preview = operation.preview(policy, **self.parameters(options))
                now = f"would be {self.done}. {foretold(preview)}"
            self.report(f"{was}: {now}", options)
        if refused:
            raise CommandError("\n".join(refused))


def _pending(policy: TimeoutPolicy[Any], using: str) -> Count:
    return count(Timeout.objects.using(using).pending().of_labels(policy.labels))


class StopCommand(PolicyCommand):
    """Stops policies, all of them with `--all`, until they are resumed or until a time."""

    all_help = "all policies; one that is stopped for longer already is left as it is"

    def parameters(self, options: dict[str, Any]) -> dict[str, Any]:
        return {**({"until": None} if options["all"] else {}), **super().parameters(options)}

    def left_alone(self, state: PolicyState, options: dict[str, Any]) -> str:
        is_longer = outlasts(state, self.parameters(options)["until"])
        return "left as it is, because it is stopped for longer" if is_longer else ""


@contextmanager
def _rolled_back(using: str) -> Iterator[None]:
    """Undo what the block writes. Functions that it registered for after the commit are not called."""
    with transaction_of(using), transaction.atomic(using=using):
        yield
        transaction.set_rollback(True, using=using)


class GuardCommand(PolicyCommand):
    """An operation on a guard rail: its argument is a setting, `off` or `declared`."""

    labels, done = None, "changed"

    def shown(self, state: PolicyState) -> str:
        text, by = output.guards_of(state)[self.name]
        origin = f", set by {by}" if by else ", as declared" if text != "off" else ""
        return f"{text}{origin}"
