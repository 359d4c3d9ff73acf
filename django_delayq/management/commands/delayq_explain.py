"""`manage.py delayq_explain`: show what happened to timeouts, and why."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db.models import Min, Model
from django.utils import timezone

from django_delayq.conf import ConfigError
from django_delayq.exceptions import EngineError
from django_delayq.ledger.controls import policy_state
from django_delayq.ledger.routing import database_of
from django_delayq.ledger.subjects import Subject, about_objects, subject_of, tables_of
from django_delayq.management.operating import ReportCommand
from django_delayq.management.options import model_of, number
from django_delayq.management.output import Painted, local, seconds
from django_delayq.models import Timeout, TimeoutQuerySet
from django_delayq.monitoring.snapshot import PEEKED, obstacles
from django_delayq.operations.selection import about_keys, find_ids, find_named, find_objects, names_of
from django_delayq.policy.policies import get_policies, registry, resolve_policy
from django_delayq.redis_clients import get_engine
from django_delayq.scheduling.story import Story, condition_values, story_of
from django_delayq.sql.key_types import pk_of
from django_delayq.sql.now import database_now
from django_delayq.times import clock

MAX_FOUND = 50
"""Each object that is found is explained with its history: for more, the text to search for is a mistake."""
DATETIME_WIDTH = 25
"""Of an event, with the blanks after its datetime."""


class Command(ReportCommand):
    """Explains the timeouts of an object, or one timeout: what happened, when, why, who did it, and what follows.

    For each policy of the object it shows the newest rounds, also if the object or the policy no longer exists. An
    object is named by its primary key, or by a field in `search` of its policies; a key takes precedence.

    Examples:
      manage.py delayq_explain shop.order 1234
      manage.py delayq_explain shop.order A-2026-0017 --policy cancel_unpaid
      manage.py delayq_explain --search A-2026-0017
      manage.py delayq_explain --id 17 --json
    """

    arguments = "[APP.MODEL OBJECT]"

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("model", nargs="?", metavar="APP.MODEL", help="the model of the object")
        words = "its primary key, or a field in search= of its policies"
        parser.add_argument("object", nargs="?", metavar="OBJECT", help=words)
        parser.add_argument("--id", metavar="N", help="only the timeout with this id")
        parser.add_argument("--search", metavar="TEXT", help="what has this object id, key, or field of a policy")
        parser.add_argument("--policy", metavar="NAME", help="only this policy: its name or label")
        super().add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        ways = {"id": _by_id, "search": _by_search, "model": _by_object}
        given = [name for name in ways if options[name] is not None]
        if len(given) > 1:
            raise CommandError("Give only one of an object, --search and --id.")
        if not given:
            raise CommandError("Which timeouts? Give an object, such as shop.order 1234, or --search, or --id.")
        if options["id"] is not None and options["policy"] is not None:
            raise CommandError("--id names one timeout: --policy does not go with it.")
        subjects = ways[given[0]](options)
        if others := _others(subjects, options):
            text = f"{options['object']} is a primary key. As a field in search= it also finds the {others}."
            self.stderr.write(text)
        names = names_of(subjects, database_of(Timeout))
        found = [_explained(each, names.get((each.content_type_id, each.object_id), "")) for each in subjects]
        values = [asdict(story) | more for story, more in found]
        self.print(values, self._lines(found), options)

    def _lines(self, found: list[tuple[Story, dict[str, str]]]) -> Iterator[str]:
        yield f"Times are in the zone {timezone.get_current_timezone_name()}."
        for story, more in found:
            yield ""
            name = more["name"]
            title = f"{story.title}: {name}" if name else story.title
            for line in filter(None, (title, story.note)):
                yield from self.wrapped(line, self.style.MIGRATE_LABEL, label=Painted(""))
            for event in story:
                paint = self.style.ERROR if event.what in {"failed", "dead"} else str
                yield from self.wrapped(str(event), paint, hanging=DATETIME_WIDTH)
            yield from self.wrapped(story.deadline) if story.deadline else ()
            yield from self.wrapped(story.outlook, self.style.MIGRATE_LABEL)
            if more["values"]:
                yield from self.wrapped(f"The object has now: {more['values']}")
            if more["late"]:
                yield from self.wrapped(more["late"], self.style.WARNING)


def _explained(subject: Subject, name: str) -> tuple[Story, dict[str, str]]:
    """Return the story, and what belongs beside it: the `values` only if the condition ended the last round."""
    story = story_of(subject)
    is_over = bool(story.events) and story.events[-1].details.get("cause") == Timeout.Cause.CONDITION
    values = condition_values(subject) if is_over else ""
    return story, {"name": name, "values": values, "late": _why_late(subject)}


def _by_id(options: dict[str, Any]) -> list[Subject]:
    row = Timeout.objects.using(database_of(Timeout)).filter(pk=number("--id", options["id"])).first()
    if row is None:
        raise CommandError(f"There is no timeout {options['id']}. Settled ones are deleted after RETENTION.")
    return [subject_of(row, None)]


def _by_search(options: dict[str, Any]) -> list[Subject]:
    """Return the subjects of the timeouts that are found; without any, those of the objects that have none."""
    rows: TimeoutQuerySet = Timeout.objects.using(database_of(Timeout))
    text, name = options["search"], options["policy"]
    found = _subjects(rows.filter(pk__in=find_ids(rows, text)), [], name)
    if not found:
        found = _subjects(rows.none(), find_objects(text, rows.db, MAX_FOUND + 1), name)
    if not found:
        raise CommandError(f"Neither a timeout nor an object with a policy is found by {text!r}.")
    if len(found) > MAX_FOUND:
        raise CommandError(f"{text!r} finds more than {MAX_FOUND} objects or policies.")
    return found


def _by_object(options: dict[str, Any]) -> list[Subject]:
    """Return the subjects of the object that have rows, and then the other policies of its model."""
    label, key, name = options["model"], options["object"], options["policy"]
    if key is None:
        words = "Which object? Give its model and its primary key, such as shop.order 1234."
        raise CommandError(f"{words} Did you mean --search {label}?")
    model = model_of(label)
    using = database_of(model)
    every: TimeoutQuerySet = Timeout.objects.using(using)
    try:
        rows = every.filter(about_keys(model, [key], using))
        objects = list(model._base_manager.using(using).filter(pk=pk_of(model, key)))
        refusal = f"There is no {model.__name__} {key}, and no timeout of it."
    except ValueError:
        rows, objects, refusal = every.none(), [], f"{key} is not a key of {model.__name__}."
    if not objects and not rows.exists():
        objects = _named(model, key, using)
        if not objects:
            raise CommandError(f"{refusal} No field in search= of its policies is {key!r} either.")
        rows = every.filter(about_objects(tables_of(model), objects, using))
    if name is not None and (registry.get(name) or not rows.filter(policy=name).exists()):
        name = resolve_policy(name, model).label  # raises UnknownPolicy
    return _subjects(rows, objects, name)


def _others(subjects: list[Subject], options: dict[str, Any]) -> str:
    """Return the objects that the given text also names, if it is the key of the one that is shown; mostly none."""
    if options["model"] is None:
        return ""
    model, shown = model_of(options["model"]), {subject.pk for subject in subjects}
    others = [obj for obj in _named(model, options["object"], database_of(model)) if obj.pk not in shown]
    return ", ".join(f"{model._meta.verbose_name} {obj.pk}" for obj in others)


def _named(model: type[Model], text: str, using: str) -> list[Model]:
    found = find_named(model._base_manager.using(using), text, MAX_FOUND + 1)
    if len(found) > MAX_FOUND:
        raise CommandError(f"{text!r} finds more than {MAX_FOUND} objects.")
    return found


def _subjects(rows: TimeoutQuerySet, objects: list[Model], name: str | None) -> list[Subject]:
    """Return the policies, objects and keys of `rows`, and then those of `objects` whose policies have no row.

    Each comes with all its rounds. With `name`, a label or the name of a policy, only those of that policy.
    """
    # One row of each, and not all rounds, which may be very many.
    kinds = rows.order_by().values("policy", "content_type_id", "object_id", "key")
    first = kinds.annotate(first_id=Min("id")).values("first_id")
    rows = rows.filter(pk__in=first).order_by("id").defer("history", "payload")
    found = [replace(subject_of(row, None), row_id=None) for row in rows]
    known = {subject.policy for subject in found}
    found += [subject_of(obj, policy) for obj in objects for policy in get_policies(type(obj)) if policy not in known]
    named = [each for each in found if name in (None, *each.labels, each.policy and each.policy.name)]
    # Rows under a former and the present label of a policy have the same slot.
    return list({subject.slot: subject for subject in named}.values())


def _why_late(subject: Subject) -> str:
    """Return why a due timeout has not fired, if its policy is not stopped; empty: it is not due."""
    row, now = subject.pending().first(), database_now(subject.using)
    is_stopped = subject.policy is not None and policy_state(subject.policy, subject.using).is_stopped
    if row is None or row.run_at > now or is_stopped:
        return ""
    text = f"It has been due for {seconds((now - row.run_at).total_seconds())}."
    if subject.policy is None:
        renamed = "Its policy is not declared. If it was renamed, name it in aliases= of its successor."
        return f"{text} {renamed} If it was removed: manage.py delayq_retire {row.policy}."
    if held_until := _held_until(row, now, subject.using):
        text += f" A worker has claimed or deferred it until {local(held_until)}."
    for obstacle in obstacles(subject.using, (), [row.queue]):
        return f"{text} {obstacle.english()} Start one: {obstacle.command}"
    if held_until:
        return f"{text} If that worker has died, another one fires it then."
    return f"{text} Workers are running: manage.py delayq_status and delayq_doctor show what delays them."


def _held_until(row: Timeout, now: datetime, using: str) -> datetime | None:
    """Return until when a worker has claimed or deferred the due `row`, in the ledger or in Redis; None: none has."""
    if row.claimed_until is not None and row.claimed_until > now:
        return row.claimed_until
    with suppress(ConfigError, EngineError):  # the doctor shows why Redis does not answer
        if engine := get_engine(using):
            entries = dict(engine.queue(row.queue, engine.shard_of(row.pk)).peek(PEEKED, row.policy))
            # The entry of a due row has a time in the future only while it is leased, or after it could not be fired.
            if (ahead_ms := entries.get(row.pk, 0) - clock.to_ms(now)) > 0:
                return now + timedelta(milliseconds=ahead_ms)
    return None
