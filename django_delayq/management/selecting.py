"""Which timeouts a command is about: the options, and the rows that they mean."""

from __future__ import annotations

from typing import Any, cast

from django.apps import apps
from django.contrib.contenttypes.models import ContentType
from django.core.management.base import CommandError, CommandParser
from django.db import router
from django.db.models import Model, Q

from django_delayq.exceptions import UnknownPolicy
from django_delayq.key_types import object_id_of
from django_delayq.ledger.search import labels_in
from django_delayq.management.moments import moment
from django_delayq.models import Timeout, TimeoutQuerySet
from django_delayq.policies import TimeoutPolicy, get_policy, registry

CHOICES = ("policy", "id", "object", "model", "key", "queue", "state", "due_before", "due_after")


def add_selection(parser: CommandParser, *, states: tuple[str, ...], default: tuple[str, ...]) -> None:
    """The options that choose timeouts; `states` that may be asked for, and those that are meant if none is."""
    group = parser.add_argument_group("which timeouts (all of these together)")
    group.add_argument("--id", action="append", type=int, metavar="N", help="this one; may be repeated")
    group.add_argument(
        "--policy",
        action="append",
        metavar="LABEL",
        help="of this policy (with --model, its name will do); may be repeated",
    )
    group.add_argument("--model", metavar="APP.MODEL", help="about objects of this model")
    group.add_argument(
        "--object", action="append", metavar="ID", help="about this object; with --policy or --model; may be repeated"
    )
    group.add_argument("--key", help="with this key")
    group.add_argument("--queue", metavar="Q", help="in this queue")
    group.add_argument(
        "--state",
        action="append",
        choices=states,
        help=f"in this state; may be repeated (default: {', '.join(default)})",
    )
    group.add_argument("--due-before", type=moment, metavar="WHEN", help="next attempt before: 2h, '30m ago', a date")
    group.add_argument("--due-after", type=moment, metavar="WHEN", help="next attempt at or after")
    group.add_argument("--all", action="store_true", help="all that are in such a state, if nothing else is said")
    parser.set_defaults(default_states=default)


def selected(options: dict[str, Any]) -> TimeoutQuerySet:
    """The rows that `options` mean. Raises CommandError for what does not exist, and where nothing narrows it down."""
    if not options["all"] and not any(options[name] is not None for name in CHOICES):
        raise CommandError("Which timeouts? Give --policy, --id, --object ... or --all.")
    using = router.db_for_write(Timeout)
    states = options["state"] or list(options["default_states"])
    rows: TimeoutQuerySet = Timeout.objects.using(using).filter(state__in=states)
    labels = _labels(options, using)
    if labels:
        rows = rows.of_labels(labels)
    if options["model"] is not None or options["object"] is not None:
        rows = rows.filter(_about(options, using))
    plain = {"id": "pk__in", "key": "key", "queue": "queue", "due_before": "run_at__lt", "due_after": "run_at__gte"}
    given = {look_up: options[name] for name, look_up in plain.items() if options[name] is not None}
    return rows.filter(**given)


def first_of(rows: TimeoutQuerySet, options: dict[str, Any], limit: int) -> list[Timeout]:
    """The first `limit` of the selected `rows` by their next attempt.

    State by state, and for settled ones label by label, as the indexes have them in that order: to sort a million
    rows in order to show fifty takes a second.
    """
    using, found = rows.db, []
    names = _labels(options, using)
    for state in options["state"] or options["default_states"]:
        part = rows.filter(state=state).order_by("run_at", "id").defer("history", "payload")
        if names or Timeout.State(state).is_settled:
            parts = [part.filter(policy=label) for label in names or labels_in(Timeout.objects.using(using))]
        else:
            parts = [part.filter(settled_at__isnull=True)]
        found += [row for each in parts for row in each[:limit]]
    return sorted(found, key=lambda row: (row.run_at, row.pk))[:limit]


def policy_named(label: str, model: type[Model] | None = None) -> TimeoutPolicy[Any]:
    """The declared policy of that label, or name for `model`. Raises CommandError, with near names."""
    try:
        return get_policy(label if model is None else (model, label))
    except UnknownPolicy as error:
        raise CommandError(str(error)) from error


def _labels(options: dict[str, Any], using: str) -> list[str]:
    """Present and former labels; of a policy that nobody declares any more its own, if rows name it."""
    found: list[str] = []
    for name in options["policy"] or ():
        if registry.get(name) is None and name in labels_in(Timeout.objects.using(using)):
            found.append(name)
        elif "." not in name and options["model"] is not None:
            found += policy_named(name, _model(options["model"])).labels
        else:
            found += policy_named(name).labels
    return found


def _model(label: str) -> type[Model]:
    try:
        return cast("type[Model]", apps.get_model(label)._meta.concrete_model)
    except (LookupError, ValueError) as error:
        raise CommandError(f"There is no model {label!r}: give app.Model.") from error


def _about(options: dict[str, Any], using: str) -> Q:
    """The objects, by the tables that they are in: an id alone could be anybody's."""
    models = [policy_named(name).concrete_model for name in options["policy"] or () if registry.get(name)]
    if options["model"] is not None:
        models = [_model(options["model"])]
    if not models:
        raise CommandError("--object needs --policy or --model: an id alone could be anybody's.")
    wanted = Q(pk__in=[])
    for model in models:
        kind = Q(content_type=ContentType.objects.db_manager(using).get_for_model(model).pk)
        if options["object"] is not None:
            try:
                kind &= Q(object_id__in=[object_id_of(model, each) for each in options["object"]])
            except Exception as error:
                raise CommandError(f"{', '.join(options['object'])} is no key of {model.__name__}.") from error
        wanted |= kind
    return wanted
