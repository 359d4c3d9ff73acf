"""Options of the commands, and the timeouts that they select.

`call_command` passes typed values (a list, a datetime) or strings as from a shell; both are accepted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, cast

from django.apps import apps
from django.conf import settings
from django.core.exceptions import ValidationError
from django.core.management.base import CommandError, CommandParser
from django.db import router
from django.db.models import Model, Q
from django.utils import timezone, translation
from django.utils.dateparse import parse_datetime

from django_delayq.ledger.search import labels_in
from django_delayq.ledger.subjects import about_model, tables_of
from django_delayq.models import Timeout, TimeoutQuerySet
from django_delayq.operations.parameters import Choice, Flag, Length, Moment, Number, Parameter
from django_delayq.operations.registry import Operation
from django_delayq.operations.selection import CONDITIONS, MAX_HITS, about_keys, find_ids, where
from django_delayq.policy.policies import get_policy, registry
from django_delayq.times import clock
from django_delayq.times.lengths import UNITS

REPEATED: Final = ("policy", "id", "object", "state", "where")
SELECTING: Final = (*REPEATED, "model", "related", "key", "search", "queue", "due_before", "due_after")
SETTINGS: Final = ("on", "off", "declared")
KEEP: Final = "keep"
_ASKED: Final[dict[Any, tuple[str, str]]] = {
    Moment: ("WHEN", "2h, 2026-03-01T18:00"),
    Length: ("DURATION", "45m, 1h30m, 2d"),
    Number: ("NUMBER", "50"),
}
"""The word for a value in the help of a command, and examples."""
MAX_DIGITS: Final = 18
"""Of a number: what a column of ids holds, and less than Python's limit."""
_PART = re.compile(r"(\d+(?:\.\d+)?)([wdhms])")
_DURATION = re.compile(rf"(?:{_PART.pattern})+\Z")


def wrong_value(option: str, value: Any, rule: str) -> CommandError:
    """Return the error that an option has a wrong value. The exit code is 2, as for errors that argparse finds."""
    return CommandError(f"argument {option}: {value!r} {rule}", returncode=2)


def values_of(value: Any) -> list[Any]:
    """Return the values of an option that can be repeated."""
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    return [] if value is None else [value]


def number(option: str, value: Any, minimum: int = 0, maximum: int | None = None) -> int:
    """Return an integer. Raises CommandError."""
    text = str(value)
    if not text.isdecimal():
        raise wrong_value(option, value, "is not a number")
    if len(text) > MAX_DIGITS:
        raise wrong_value(option, f"{text[:MAX_DIGITS]}...", f"has more than {MAX_DIGITS} digits")
    if int(text) < minimum or (maximum is not None and int(text) > maximum):
        raise wrong_value(option, value, f"must be {minimum} to {maximum}" if maximum else f"must be {minimum} or more")
    return int(text)


def duration(option: str, value: str | timedelta, *, may_be_negative: bool = False) -> timedelta:
    """Return a duration: `90m`, `1h30m`, `2d`, or where it may be negative `-1h`. Raises CommandError."""
    if isinstance(value, timedelta):
        return value
    if may_be_negative and value.startswith("-"):
        return -duration(option, value[1:])
    if not _DURATION.match(value):
        raise wrong_value(option, value, "is not a duration, such as 45m, 1h30m, 2d or 1w")
    units = {name[0]: name for name in UNITS}
    try:
        return sum((timedelta(**{units[unit]: float(count)}) for count, unit in _PART.findall(value)), timedelta(0))
    except OverflowError as error:
        raise wrong_value(option, value, "is too long") from error


def moment(option: str, value: str | datetime | None) -> datetime | None:
    """Return a time: `now`, `2h` (from now), `30m ago`, or a date and time. None remains None. Raises CommandError.

    A date and time without a zone is in the time zone of the project. It is refused in the hour that occurs twice, or
    not at all, when the clocks change: the command would move deadlines by an hour more or less than was meant.
    """
    if value is None or isinstance(value, datetime):
        return value
    words = value.strip().lower()
    head = words.removesuffix("ago").strip()
    try:
        if words == "now":
            return clock.now()
        if _DURATION.match(head):
            return clock.now() + duration(option, head) * (-1 if words.endswith("ago") else 1)
        if found := parse_datetime(value.strip()):
            if settings.USE_TZ and timezone.is_naive(found) and len(offsets := _offsets(found)) != 1:
                how_often = "occurs twice" if offsets else "does not occur"
                rule = f"{how_often} when the clocks change: add the offset from UTC, such as {value.strip()}+01:00"
                raise wrong_value(option, value, rule)
            return clock.in_utc(clock.fitting(found))
    except (ValueError, OverflowError) as error:
        raise wrong_value(option, value, f"is not a time: {error}") from error
    raise wrong_value(option, value, "is not a time, such as 2026-03-01T18:00, now, 2h or '30m ago'")


def _offsets(naive: datetime) -> set[timedelta | None]:
    """Return the offsets from UTC that this local time may have: two if it occurs twice, none if it does not occur."""
    zone = timezone.get_current_timezone()
    found = [naive.replace(tzinfo=zone, fold=fold) for fold in (0, 1)]
    return {at.utcoffset() for at in found if at.astimezone(UTC).astimezone(zone).replace(tzinfo=None) == naive}


def add_parameters(parser: CommandParser, operation: Operation) -> None:
    """Add what gives the parameters of `operation`."""
    group: Any = parser.add_mutually_exclusive_group(required=True) if operation.is_either else parser
    for each in operation.parameters:
        with translation.override(None):  # commands are in English
            words = "; ".join([str(each.label).lower(), *(str(label) for _, label in getattr(each, "choices", ()))])
        metavar, example = _ASKED.get(type(each), (None, ""))
        how: dict[str, Any] = {"metavar": metavar, "help": f"{words}: {example}"}
        match each:
            case Flag():
                how = {"action": "store_true", "help": f"do not {words}" if each.default else words}
            case Choice():
                how = {"choices": [value for value, _ in each.choices], "required": each.is_required, "help": words}
            case Moment(is_nullable=True):
                how |= {"default": KEEP, "help": f"{how['help']}, never (default: unchanged, or never)"}
            case Length(is_nullable=True):
                group = parser.add_mutually_exclusive_group()
                group.add_argument("--declared", action="store_true", help="the declared delay applies again")
            case Number(is_nullable=True):
                parser.add_argument("setting", nargs="?", metavar="|".join(SETTINGS), choices=SETTINGS)
        if isinstance(each, Length) and each.least < timedelta(0):
            how["help"] += f"; earlier: {each.option}=-2h"
        if not each.option.startswith("-"):
            how["metavar"] = f"{metavar}|off|declared"
        (parser if isinstance(each, Choice | Flag) else group).add_argument(each.option, **how)


def arguments_of(options: dict[str, Any], operation: Operation) -> dict[str, Any]:
    """Return the keyword arguments of the function of `operation`. Raises CommandError."""
    given, settings = dict[str, Any](), values_of(options.get("setting"))
    for each in operation.parameters:
        name, value = each.name, options[each.option.lstrip("-").replace("-", "_")]
        match each:
            case Flag():
                given[name] = bool(value) != each.default
            case Length() | Number() if value in SETTINGS:
                settings.append(value)
            case Length(is_nullable=True) if options["declared"]:
                given[name] = None
            case Moment(is_nullable=True) if value is None or str(value).strip().lower() == "never":
                given[name] = None
            case Number(is_nullable=True) if value is None and settings == ["on"]:
                given[name] = each.default
            case _ if value is None or (isinstance(each, Moment) and value == KEEP):
                pass
            case _:
                given[name] = _value_of(each, value)
    try:
        with translation.override(None):
            return operation.arguments(given, settings, _name_of)
    except ValidationError as error:
        found = [(name, words) for name, several in error.message_dict.items() for words in several]
        lines = [f"argument {name}: {words}" if name else words for name, words in found]
        raise CommandError("\n".join(lines), returncode=2) from error


def _value_of(parameter: Parameter, value: Any) -> Any:
    option = _name_of(parameter)
    match parameter:
        case Moment():
            return moment(option, value)
        case Length():
            return duration(option, value, may_be_negative=parameter.least < timedelta(0))
        case Number():
            return number(option, value, parameter.least, parameter.most)
    return value


def _name_of(parameter: Parameter) -> str:
    """Return what errors call `parameter`: its option, or the word for its argument."""
    return parameter.option if parameter.option.startswith("-") else _ASKED[type(parameter)][0]


def add_repeated(parser: Any, option: str, metavar: str, words: str) -> None:
    """Add an option that takes several values, and may be repeated."""
    parser.add_argument(option, action="extend", nargs="+", metavar=metavar, help=words)


def add_selection(parser: CommandParser, states: tuple[str, ...], default: tuple[str, ...]) -> None:
    """Add the options that select timeouts in any of `states`; without `--state`, in those of `default`."""
    group = parser.add_argument_group("which timeouts (all conditions together)")
    add = group.add_argument
    add_repeated(group, "--id", "N", "this one, in any state; may be repeated")
    words = "of this policy (with --model, its name is enough); may be repeated"
    add_repeated(group, "--policy", "LABEL", words)
    add("--model", metavar="APP.MODEL", help="of objects of this model")
    add_repeated(group, "--object", "ID", "of this object; with --policy or --model; may be repeated")
    words = "of this object, and of all whose policies lead to it over foreign keys"
    add("--related", metavar="APP.MODEL:ID", help=words)
    words = "of objects with this value of a column, channel__merchant=7; with --policy or --model; all must fit"
    add_repeated(group, "--where", "PATH=VALUE", words)
    add("--key", help="with this key")
    add("--search", metavar="TEXT", help="with this object id, key, or field that a policy names")
    add("--queue", metavar="Q", help="in this queue")
    words = f"in this state: {', '.join(states)}; may be repeated (default: {', '.join(default)})"
    add_repeated(group, "--state", "STATE", words)
    add("--due-before", metavar="WHEN", help="next attempt before: 2h, '30m ago', a date and time")
    add("--due-after", metavar="WHEN", help="next attempt at or after")
    add("--all", action="store_true", help="all in such a state, if no other condition is given")
    parser.set_defaults(states=states, default_states=default)


@dataclass(frozen=True, slots=True)
class Selection:
    """The timeouts that the options select."""

    rows: TimeoutQuerySet
    states: list[str]
    labels: list[str]
    """Those of the selected policies, present and former ones; empty: all policies."""
    ids: list[int]
    """Those that `--id` names."""

    @classmethod
    def of(cls, options: dict[str, Any]) -> Selection:
        """Return the selection. Raises UnknownPolicy, and CommandError for a wrong value or without a restriction."""
        if not options["all"] and all(options[name] is None for name in SELECTING):
            raise CommandError("Which timeouts? Give --policy, --id, --object ... or --all.")
        ids = [number("--id", value) for value in values_of(options["id"])]
        states = list(dict.fromkeys(values_of(options["state"])))
        for state in states:
            if state not in options["states"]:
                raise wrong_value("--state", state, f"must be one of {', '.join(options['states'])}")
        # A row that is named by its id is found in any state, so that the command can report why it leaves it alone.
        states = states or (list(Timeout.State.values) if ids else list(options["default_states"]))
        rows: TimeoutQuerySet = Timeout.objects.using(router.db_for_write(Timeout)).filter(state__in=states)
        if not any(Timeout.State(state).is_settled for state in states):
            rows = rows.unsettled()  # which has an index of its own
        labels, about_objects = _about(options, rows.db)
        asked = {"key": options["key"], "due_until": moment("--due-before", options["due_before"])}
        asked |= {"due_from": moment("--due-after", options["due_after"]), "queue": options["queue"]}
        conditions = [CONDITIONS[name](value) for name, value in asked.items() if value is not None]
        rows = rows.filter(about_objects, _about_related(options["related"]), *conditions)
        rows = rows.of_labels(labels) if labels else rows
        rows = rows.filter(pk__in=ids) if ids else rows
        if options["search"] is not None:
            found = find_ids(rows, options["search"])
            if len(found) >= MAX_HITS:  # it is not certain that these are all
                rule = f"finds {MAX_HITS} timeouts or more: add --policy, --model or --key"
                raise wrong_value("--search", options["search"], rule)
            rows = rows.filter(pk__in=found)
        if any(options[name] is not None and not values_of(options[name]) for name in REPEATED):
            rows = rows.none()  # a program may pass an empty list: it must not select all
        return cls(rows, states, labels, ids)

    def absent(self) -> list[int]:
        """Return the ids of `--id` that no selected timeout has."""
        found = set(self.rows.values_list("pk", flat=True)) if self.ids else set()
        return [row_id for row_id in dict.fromkeys(self.ids) if row_id not in found]

    def first(self, limit: int, deferred: Sequence[str]) -> list[Timeout]:
        """Return the first `limit` rows by their next attempt, without their `deferred` columns.

        They are read state by state, and settled ones label by label, in the order of an index: sorting a million rows
        to show fifty would take a second.
        """
        found: list[Timeout] = []
        for state in self.states:
            part = self.rows.filter(state=state).order_by("run_at", "id").defer(*deferred)
            is_settled = Timeout.State(state).is_settled
            labels = self.labels or (labels_in(Timeout.objects.using(part.db)) if is_settled else [])
            parts = [part.filter(policy=label) for label in labels] or [part.unsettled()]
            found += [row for some in parts for row in some[:limit]]
        return sorted(found, key=lambda row: (row.run_at, row.pk))[:limit]


def labels_of_policies(named: Any, using: str, model: type[Model] | None = None) -> list[str]:
    """Return the labels, present and former ones, of the policies that `--policy` names; none: it names none.

    A name is enough for a policy of `model`. The label of a policy that is no longer declared must be in the ledger.
    Raises UnknownPolicy.
    """
    labels = list[str]()
    for name in values_of(named):
        if registry.get(name) is None and Timeout.objects.using(using).of_labels([name]).exists():
            labels.append(name)
        else:
            labels += get_policy(name if model is None or "." in name else (model, name)).labels
    return list(dict.fromkeys(labels))


def model_of(label: str) -> type[Model]:
    """Return the model of `app.Model`. Raises CommandError."""
    try:
        return cast("type[Model]", apps.get_model(label)._meta.concrete_model)
    except (LookupError, ValueError) as error:
        raise CommandError(f"There is no model {label!r}: give app.Model.") from error


def _about(options: dict[str, Any], using: str) -> tuple[list[str], Q]:
    """Return the labels of the selected policies, as `labels_of_policies` does, and the condition on the objects."""
    model = None if options["model"] is None else model_of(options["model"])
    labels, named = labels_of_policies(options["policy"], using, model), values_of(options["policy"])
    models = [model] if model else [policy.concrete_model for policy in map(registry.get, named) if policy]
    asked = [option for option in ("object", "where") if options[option] is not None]
    if model is None and not asked:
        return labels, Q()
    if model is None and (not named or len(models) < len(named)):  # a policy that is not declared names no model
        words = "needs --model, or policies that are declared: objects of several models may have the same id."
        raise CommandError(f"--{asked[0]} {words}")
    wanted, ids, conditions = Q(pk__in=[]), [*map(str, values_of(options["object"]))], values_of(options["where"])
    for table in dict.fromkeys(models):
        try:
            about = about_keys(table, ids, using) if ids else about_model(tables_of(table), table, using)
        except ValueError as error:
            raise CommandError(f"{', '.join(ids)} is not a key of {table.__name__}.") from error
        try:
            wanted |= about & where(table, conditions, using) if conditions else about
        except ValueError as error:
            raise wrong_value("--where", " ".join(conditions), f"is refused: {error}") from error
    return labels, wanted


def _about_related(reference: Any) -> Q:
    """Return the condition on the rows of `--related`. Raises CommandError."""
    try:
        return Q() if reference is None else CONDITIONS["related"](str(reference))
    except LookupError as error:
        raise wrong_value("--related", reference, f"is refused: {error}") from error
    except ValueError as error:
        raise wrong_value("--related", reference, "is not an object, such as shop.customer:17") from error
