"""What the commands share: the actor, a confirmation, a report, and output as tables or as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import pwd
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar, Final

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import timezone

from django_delayq.exceptions import DelayqError
from django_delayq.ledger.controls import PolicyState, policy_state
from django_delayq.ledger.locking import database_of
from django_delayq.ledger.search import Count, count
from django_delayq.management.options import Selection, add_selection, each
from django_delayq.models import Timeout
from django_delayq.operations import Refusal, Result
from django_delayq.operations.registry import OPERATIONS, Operation
from django_delayq.policies import TimeoutPolicy, get_policy

MAX_UNASKED: Final = 10
"""Up to this number of timeouts a command changes without asking."""


def actor() -> str:
    """Return `cli:` and the user of this process, by the operating system and not by an environment variable."""
    try:
        return f"cli:{pwd.getpwuid(os.getuid()).pw_name}"
    except KeyError:
        return f"cli:{os.getuid()}"


class DelayqCommand(BaseCommand):
    """A command that reports the errors of this library without a traceback."""

    def execute(self, *args: Any, **options: Any) -> str | None:
        try:
            return super().execute(*args, **options)
        except DelayqError as error:
            raise CommandError(str(error)) from error


class ReportCommand(DelayqCommand):
    """A command that reads, and prints lines or JSON."""

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--json", action="store_true", help="print JSON, with all values")

    def print(self, value: Any, lines: Iterable[str], options: dict[str, Any]) -> None:
        if text := as_json(value) if options["json"] else "\n".join(lines):
            self.stdout.write(text)


class AskingCommand(DelayqCommand):
    """A command that asks before it changes many timeouts."""

    runs_unattended: ClassVar[bool] = False
    """Whether it proceeds without a terminal: workers do the same on their own."""

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--dry-run", action="store_true", help="change nothing, only count")
        parser.add_argument("--yes", action="store_true", help="do not ask, however many they are")

    def ask(self, what: str, number: Count, options: dict[str, Any]) -> None:
        """Return if `what` may be done to that many timeouts. Raises CommandError if not, or without a terminal."""
        if options["yes"] or options["dry_run"] or (number.value <= MAX_UNASKED and not number.is_capped):
            return
        if not sys.stdin.isatty():
            if self.runs_unattended:
                return
            raise CommandError(f"That would {what} {number} timeouts. Without a terminal, give --yes or --dry-run.")
        self.stdout.write(f"{what} {number} timeouts? [y/N] ", ending="")
        self.stdout.flush()
        if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
            raise CommandError("Nothing was changed.")

    def report(self, line: str, options: dict[str, Any]) -> None:
        self.stdout.write(f"{line} (dry run: nothing was changed)" if options["dry_run"] else line)


class OperatorCommand(AskingCommand):
    """A command that runs an operation and stores who ran it and why."""

    name: ClassVar[str]
    """Of the operation in the registry."""
    done: ClassVar[str]

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--reason", default="", help="stored with each change, for people")
        super().add_arguments(parser)

    @property
    def operation(self) -> Operation:
        return OPERATIONS[self.name]

    def parameters(self, options: dict[str, Any]) -> dict[str, Any]:
        return {}

    def run_operation(self, target: Any, options: dict[str, Any], **more: Any) -> Any:
        return self.operation.call(target, by=actor(), reason=options["reason"], **self.parameters(options), **more)

    def show_progress(self, examined: int) -> None:
        """Show how far it is, if a person watches."""
        if sys.stderr.isatty():
            self.stderr.write(f"  {examined} examined", ending="\r")


class TimeoutCommand(OperatorCommand):
    """An operation on the timeouts that the options select."""

    def add_arguments(self, parser: CommandParser) -> None:
        states = tuple(state for state in Timeout.State.values if state in self.operation.states)
        add_selection(parser, states, default=states[:1])
        super().add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        rows = Selection.of(options).rows
        self.ask(self.operation.name, count(rows), options)
        examined = 0

        def progress(page: Result) -> None:
            nonlocal examined
            examined += page.changed + page.unchanged
            if options["verbosity"] > 0:
                self.show_progress(examined)

        result = self.run_operation(rows, options, dry_run=options["dry_run"], progress=progress)
        for why, number in result.refused.items():
            ids = ", ".join(str(row_id) for row_id, its_why in result.refusals[:50] if its_why is why)
            label = Refusal(why).label
            self.stderr.write(f"{number} left as they are: {label}{f' ({ids})' if ids else ''}")
        self.report(f"{result.changed} {self.done}", options)


class PolicyCommand(OperatorCommand):
    """An operation on each of the named policies."""

    labels: ClassVar[str | None] = "*"
    """How many labels are arguments; None: one, for commands with a further argument."""

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("label", nargs=self.labels, metavar="LABEL", help="these policies")
        parser.add_argument("--policy", action="append", metavar="LABEL", help="the same as a LABEL; may be repeated")
        super().add_arguments(parser)

    def policies(self, options: dict[str, Any]) -> list[TimeoutPolicy[Any]]:
        """Return the named policies. Raises UnknownPolicy."""
        return [get_policy(label) for label in dict.fromkeys([*each(options["label"]), *each(options["policy"])])]

    def shown(self, state: PolicyState) -> str:
        """Return what the operation changes, as the report has it before and after."""
        return stop_of(state)

    def handle(self, *args: Any, **options: Any) -> None:
        # All labels are looked up before the first policy is changed: with a wrong label nothing changes.
        policies = self.policies(options)
        if not policies:
            raise CommandError("Which policies? Give their labels, such as shop.order.cancel_unpaid.")
        for policy in policies:
            using = database_of(policy.concrete_model)
            before = policy_state(policy, using)
            pending = count(Timeout.objects.using(using).pending().of_labels(policy.labels))
            moves = before.stop in {"held", "releasing"} and not options.get("no_shift")
            if self.operation.moves_rows and moves:
                self.ask(f"move the deadlines of {policy.label}, which are", pending, options)
            was = f"{policy.label} (was {self.shown(before)}; {pending} pending)"
            if options["dry_run"]:
                self.report(f"{was}: would be {self.done}", options)
                continue
            more = {"progress": self.show_progress} if self.operation.moves_rows else {}
            change = self.run_operation(policy, options, **more)
            now = self.shown(policy_state(policy, using)) if change else "nothing to change"
            moved = f"; {change.moved} moved, {change.unmoved} left as they are" if change and change.moved else ""
            self.stdout.write(f"{was}: {now}{moved}")


class GuardCommand(PolicyCommand):
    """An operation on a guard rail: its argument is a setting, `off` or `declared`."""

    labels, done = None, "changed"

    def shown(self, state: PolicyState) -> str:
        return f"{guard_of(state, self.name) or 'off'}, {state.set_by(self.name) or 'declared'}"

    def run_operation(self, target: Any, options: dict[str, Any], **more: Any) -> Any:
        try:
            return super().run_operation(target, options, **more)
        except (TypeError, ValueError) as error:
            raise CommandError(str(error)) from error


def guard_of(state: PolicyState, guard: str) -> str:
    """Return `skip after 6:00:00`, `500 in 0:10:00` or `10 %`; empty if the guard rail is off."""
    late, brake = state.late, state.brake
    texts = {
        "late": late and f"{late.then} after {late.after}",
        "brake": brake and f"{brake.most} in {brake.per}",
        "shadow": f"{state.shadow} %" if state.shadow else "",
    }
    return texts[guard] or ""


def stop_of(state: PolicyState) -> str:
    """Return `paused until 2026-03-01 18:00:00: outage`, or `running`."""
    if not state.is_stopped:
        return "running"
    until = f" until {local(state.until)}" if state.until else ""
    return f"{state.stop}{until}{f': {state.reason}' if state.reason else ''}"


def as_json(value: Any) -> str:
    """Return JSON: datetimes in ISO format, durations in seconds, dataclasses and named tuples as objects."""
    return json.dumps(_plain(value), indent=2, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if isinstance(value, PolicyState):
            model = fields.pop("policy").concrete_model._meta.label
            in_force = {name: getattr(value, name) for name in ("delay", "late", "brake", "shadow", "is_braked")}
            fields = {"label": value.label, "model": model, **in_force, **fields}
        value = fields
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a table with aligned columns."""
    texts = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in texts]


def local(at: datetime | None) -> str:
    """Return local time to the second; empty for None."""
    if at is None:
        return ""
    return f"{timezone.localtime(at) if timezone.is_aware(at) else at:%Y-%m-%d %H:%M:%S}"


def seconds(value: float | None) -> str:
    """Return a duration in seconds; "-" for None."""
    if value is None:
        return "-"
    return f"{value:.3f} s" if value < 10 else f"{value:.0f} s"
