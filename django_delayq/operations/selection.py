"""Select timeouts by what people know: the id of an object, a key, a number, a customer, a state, a time.

`CONDITIONS` has once what each parameter of commands, REST and the admin means.

Policies name such fields (`search`), and lead over foreign keys to other objects: to the `owner`, and to all whose
values decide about a timeout. Every query reads the writer. A search reads at most `MAX_OBJECTS` objects by each field;
what is selected by a related object or by a value is complete, however much it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Final, cast

from django.apps import apps
from django.contrib.auth import get_permission_codename
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import FieldDoesNotExist, ValidationError
from django.db import DatabaseError, connections, transaction
from django.db.models import CharField, Model, Q, QuerySet, TextField
from django.utils.translation import gettext

from django_delayq.arming.holding import Facts
from django_delayq.ledger import search
from django_delayq.ledger.locking import rows_of
from django_delayq.ledger.routing import database_of
from django_delayq.ledger.subjects import Subject, about_objects, kind_of, model_of_kind, tables_of
from django_delayq.models import Timeout, TimeoutQuerySet
from django_delayq.policy.policies import get_policies, labels_of
from django_delayq.policy.reads import related_paths
from django_delayq.sql.key_types import HAS_FAILED, HAS_KEY, HAS_OWN_QUEUE, keys_in, object_id_of, pk_of, root_of_key
from django_delayq.sql.now import DatabaseNow
from django_delayq.times.paths import end_of, field_at, is_reference, stored_type

MAX_HITS: Final = 1_000
"""A search that finds more is too general to act on, and would load all of their ids."""
MAX_KINDS: Final = 200
"""The kinds of objects that a search reads; beyond, content types are not what people name objects by."""
MAX_OBJECTS: Final = 1_000
"""Objects that a search compares by name, or a list shows by their timeouts: each is loaded, or a parameter."""
MAX_NAME: Final = 100
"""The longest name of an object: `__str__` of a note may return all of its text, which would fill a page."""


def find_ids(rows: QuerySet[Any], text: str, user: Any = None) -> list[int]:
    """Return the ids of those of `rows` that `text` finds, newest first: at most `MAX_HITS` in each way.

    It finds rows by the complete id of their object, by their key, and by the fields in `search` of all policies. An
    object id is also searched as the ledger writes it for each content type: a UUID with dashes, 1.5 as 1.50. What is
    not a value of a field's type finds nothing there. Blanks around a string are part of it: without them it may be the
    key of another object. With a `user`, only the fields are searched that `searched_fields` returns for that user.
    """
    if not text or "\0" in text:
        return []
    kinds = search.distinct(Timeout.objects.using(rows.db), "content_type_id", "object_id", limit=MAX_KINDS)
    written = {text}
    for kind in kinds:
        model = model_of_kind(kind, rows.db)
        if model is not None:
            with suppress(ValueError):
                written.add(object_id_of(model, pk_of(model, _trimmed(root_of_key(model), text))))
    found = [rows.filter(content_type__in=kinds, object_id__in=written), rows.of_key(text)]  # type: ignore[attr-defined]
    # One statement each: joined by OR, no index would answer them all.
    found += [rows.filter(_about(objects, rows.db)) for objects in _objects_with(text, rows.db, searched_fields(user))]
    hits = {pk for part in found for pk in part.order_by("-id").values_list("pk", flat=True)[:MAX_HITS]}
    return sorted(hits, reverse=True)


def find_objects(text: str, using: str, limit: int) -> list[Model]:
    """Return the objects of policies that `text` finds, whether they have timeouts or not.

    It finds them by their complete key, and by the fields in `search` of all policies: `limit` of each model and field.
    """
    if not text or "\0" in text:
        return []
    found = [obj for objects in _objects_with(text, using, searched_fields()) for obj in objects[:limit]]
    for model in dict.fromkeys(policy.concrete_model for policy in get_policies()):
        with suppress(ValueError):  # of some types of keys only the driver finds out
            found += model._base_manager.using(using).filter(pk=pk_of(model, _trimmed(root_of_key(model), text)))
    return found


def find_named(rows: QuerySet[Any], text: str, limit: int, user: Any = None) -> list[Model]:
    """Return those of `rows` of which a field in `search` of a policy is `text`, each once: at most `limit`.

    With a `user`, only the fields are searched that `searched_fields` returns for that user.
    """
    fields = [(rows.model, path) for path in names_searched(rows.model, user)]
    named = _objects_with(text, rows.db, fields)
    found = (obj for objects in named for obj in objects.filter(pk__in=rows.values("pk"))[:limit])
    return list({obj.pk: obj for obj in found}.values())[:limit]


def names_searched(model: type[Model], user: Any = None) -> list[str]:
    """Return the paths that policies name in `search` for objects of `model`, as `searched_fields` for `user`."""
    own = cast("type[Model]", model._meta.concrete_model)
    return [path for table, path in searched_fields(user) if issubclass(own, table)]


def searched_fields(user: Any = None) -> list[tuple[type[Model], str]]:
    """Return the models and paths that policies name in `search`, each once.

    A field is included only if `user` may view its model, which for a path over a relation is the one at its end:
    otherwise a search would reveal whether such an object exists. Without a user, as for commands, all are included.
    """
    named = dict.fromkeys((policy.concrete_model, path) for policy in get_policies() for path in policy.search)
    return [(model, path) for model, path in named if user is None or _may_search(user, model, path)]


def _may_search(user: Any, model: type[Model], path: str) -> bool:
    return may_view(user, cast("type[Model]", end_of(model, path)[0]._meta.concrete_model))


def may_view(user: Any, model: type[Model]) -> bool:
    """Return whether `user` may view objects of `model`, as Django's admin decides it."""
    codes = (get_permission_codename(action, model._meta) for action in ("view", "change"))
    return any(user.has_perm(f"{model._meta.app_label}.{code}") for code in codes)


def names_of(rows: Iterable[Timeout | Subject], using: str, user: Any = None) -> dict[tuple[int, str], str]:
    """Return what people call the objects of `rows`, by content type and object id: `A-2026-0050`.

    A name is the value of the first field that a policy of the model has in `search`, otherwise what `__str__` of the
    model returns. Without a name are objects that do not exist, whose model has no `__str__`, and whose model `user`
    may not view; without a user, as for commands, all models may be viewed. It makes one query for each model.
    """
    kinds: dict[int, set[str]] = {}
    for row in rows:
        kinds.setdefault(row.content_type_id, set()).add(row.object_id)
    found: dict[tuple[int, str], str] = {}
    for kind, ids in kinds.items():
        model = model_of_kind(kind, using)
        if model is not None:
            found |= {(kind, object_id): name for object_id, name in _names(model, ids, using, user).items()}
    return found


def name_of(model: type[Model], object_id: str, using: str, user: Any = None) -> str:
    """Return what people call this object, as `names_of` does; empty: it has no name."""
    return _names(model, [object_id], using, user).get(object_id, "")


def is_key_in(name: str, object_id: str) -> bool:
    """Return whether `name` contains the id as a word, so that a page need not show both."""
    return object_id in re.split(r"[^\w-]+", name)


def _names(model: type[Model], ids: Collection[str], using: str, user: Any) -> dict[str, str]:
    path = next((each.search[0] for each in get_policies() if each.concrete_model is model and each.search), "")
    if not path and model.__str__ is Model.__str__:
        return {}  # pages show "order 19", which is shorter than "Order object (19)"
    if not (user is None or (may_view(user, model) and (not path or _may_search(user, model, path)))):
        return {}
    pks = keys_in(model, ids).values()
    objects, named = model._base_manager.using(using).filter(pk__in=list(pks)).order_by(), dict[str, str]()
    try:
        # In a savepoint: a table or a column that is missing must not prevent a page of timeouts.
        with transaction.atomic(using=using):
            found = list(objects.values_list("pk", path) if path else ((obj.pk, obj) for obj in objects))
    except (DatabaseError, OverflowError):
        return {}
    with _no_queries():
        for pk, value in found:
            named[object_id_of(model, pk)] = "" if value is None else _text(value)
    return named


def _text(value: Any) -> str:
    """Return `str(value)` in one line; empty if it raises: it is code of the project."""
    try:
        return " ".join(str(value).split())[:MAX_NAME]
    except Exception:  # noqa: BLE001
        return ""


def _no_queries() -> ExitStack:
    """Refuse queries on all connections: a `__str__` that reads related objects would make one for each object."""

    def refuse(*_: Any) -> Any:
        raise DatabaseError("A name is made without a query.")

    stack = ExitStack()
    for connection in connections.all(initialized_only=True):
        stack.enter_context(connection.execute_wrapper(refuse))
    return stack


def about_reference(reference: str, using: str) -> Q:
    """Return the condition on rows about the object `app.model:key`, see `about_keys`.

    Raises:
        LookupError: there is no such model, and no content type of a former one.
        ValueError: it is not a key of this model.
    """
    label, _colon, key = reference.partition(":")
    app, _dot, name = label.partition(".")
    if "\0" in reference:  # PostgreSQL refuses it
        raise ValueError(f"{reference!r} contains a NUL.")
    try:
        kind = ContentType.objects.db_manager(using).get_by_natural_key(app, name.lower())
    except ContentType.DoesNotExist as error:
        raise LookupError(f"There is no model {label}.") from error
    model = kind.model_class()
    if model is None:  # the model was removed: its rows keep their ids
        return Q(content_type=kind.pk, object_id=key)
    return about_keys(model, [key], using)


def about_keys(model: type[Model], keys: Iterable[str], using: str) -> Q:
    """Return the condition on rows about the objects of `model` with these keys, also as objects of its parents.

    The objects need not exist. Raises ValueError for what is not a key of `model`.
    """
    pks = [pk_of(model, key) for key in keys]
    written = [object_id_of(model, pk) for pk in pks]
    if any("\0" in key for key in written):  # PostgreSQL refuses it
        raise ValueError("A key contains a NUL.")
    tables = tables_of(model)
    own = [table for table in tables if root_of_key(table) is root_of_key(model)]
    rows = Q(content_type__in=[kind_of(table, using) for table in own], object_id__in=written)
    parents = [table for table in tables if table not in own]
    if parents:  # they have keys of their own, which only the object knows
        rows |= about_objects(parents, list(model._base_manager.using(using).filter(pk__in=pks)), using)
    return rows


def related_to(model: type[Model], pk: Any, using: str) -> Q:
    """Return the condition on rows about all objects whose policies lead to this object of `model`.

    Over the foreign keys that they name: see `related_paths`.
    """
    wanted = Q(pk__in=[])
    for table, path in _paths_to(model):
        related, keys = _model_at(table, path), [pk]
        if root_of_key(related) is not root_of_key(model):  # it is a multi-table child with a key of its own
            keys = list(rows_of(model, using).filter(pk=pk).values_list(cast("Any", related._meta.pk).name, flat=True))
        objects = table._base_manager.using(using).filter(**{f"{path}__pk__in": keys})
        wanted |= _about_all(objects.order_by("-pk"), tables_of(table), using)
    return wanted


def about_related(reference: str, using: str) -> Q:
    """Return the condition on rows about the object `app.model:key`, and about all whose policies lead to it.

    Raises what `about_reference` raises, and LookupError also if the model has no policy, and none leads to it.
    """
    wanted, model = about_reference(reference, using), model_named(reference)
    if model is None:  # the model was removed
        return wanted
    if not is_related(model) and not get_policies(model):
        raise LookupError(f"No policy leads to {model._meta.label} over a foreign key that it names.")
    return wanted | related_to(model, pk_of(model, reference.partition(":")[2]), using)


def model_named(reference: str) -> type[Model] | None:
    """Return the model of `app.model:key`; None if there is no such model."""
    with suppress(LookupError, ValueError):
        return apps.get_model(reference.partition(":")[0])
    return None


def related_timeouts(obj: Model, *, settled: bool = False) -> TimeoutQuerySet:
    """Return the waiting timeouts about `obj`, and about all objects whose policies lead to it, soonest first.

    With `settled`, all of them: waiting, firing and settled ones.

    A policy leads to the objects on its `owner` path, and to those that `since`, `after`, `when` and `hold_when` read
    over foreign keys: from a merchant to the orders of all of its channels. The condition is one statement, however
    many objects there are, and operations change the rows page by page.

    Raises:
        ValueError: `obj` is not saved.
    """
    if obj.pk is None:
        raise ValueError(f"{obj!r} is not saved: its timeouts are kept by its primary key.")
    using = database_of(type(obj), obj)
    rows: TimeoutQuerySet = Timeout.objects.using(using).order_by("run_at", "id")
    rows = rows if settled else rows.waiting()
    return rows.filter(about_objects(tables_of(type(obj)), [obj], using) | related_to(type(obj), obj.pk, using))


def where(model: type[Model], conditions: Iterable[str], using: str, *, only: type[Model] | None = None) -> Q:
    """Return the condition on rows about the objects of `model` that have all these values: "channel__merchant=7".

    A path leads over foreign keys to a column. At a foreign key, the value is the key of the object.

    Args:
        model: the model of a policy.
        conditions: each a path, `=` and a value.
        using: the database.
        only: only rows about objects of this table, not about their parents.

    Raises:
        ValueError: there is no such path, or no such value of its column.
    """
    objects = model._base_manager.using(using).order_by("-pk")
    for condition in conditions:
        path, value = _parsed(model, condition)
        objects = objects.filter(**{path: value})
    return _about_all(objects, tables_of(model) if only is None else [only], using)


def may_ask_where(user: Any, model: type[Model], conditions: Iterable[str]) -> bool:
    """Return whether `user` may view the models whose columns these conditions compare, as for `searched_fields`."""
    return all(_may_search(user, model, condition.partition("=")[0]) for condition in conditions)


def column_at(model: type[Model], path: str) -> Any:
    """Return the field of the column at `path`, which may lead over foreign keys; None: there is none."""
    with suppress(FieldDoesNotExist):
        field = field_at(model, path)
        return field if field.concrete and not field.many_to_many else None
    return None


def _parsed(model: type[Model], condition: str) -> tuple[str, Any]:
    path, is_given, text = condition.partition("=")
    field = column_at(model, path)
    if not is_given or field is None:
        words = gettext("{model} has no column {path}. Give a column, or a path of foreign keys to one: channel__id=7.")
        raise ValueError(words.format(model=model._meta.label, path=repr(path)))
    field = field.target_field if is_reference(field) else stored_type(field)
    try:
        if "\0" in text:  # PostgreSQL refuses it
            raise ValidationError(text)
        return path, field.to_python(_trimmed(field, text))
    except (ValidationError, ValueError, TypeError) as error:
        words = gettext("{value} is not a value of {path}.")
        raise ValueError(words.format(value=repr(text), path=path)) from error


def is_related(model: type[Model]) -> bool:
    """Return whether policies lead to objects of `model`, over foreign keys that they name."""
    return bool(_paths_to(model))


def owners_of(model: type[Model], pk: Any, using: str) -> list[tuple[type[Model], Any]]:
    """Return model and key of the owners of this object of `model`."""
    paths = list(dict.fromkeys(policy.owner for policy in get_policies(model) if policy.owner))
    if not paths:
        return []
    keys = model._base_manager.using(using).filter(pk=pk).values_list(*(f"{path}__pk" for path in paths)).first()
    named = zip((_model_at(model, path) for path in paths), keys or (), strict=False)
    return list(dict.fromkeys((owner, key) for owner, key in named if key is not None))


def _paths_to(model: type[Model]) -> list[tuple[type[Model], str]]:
    """Return the models of policies that lead to a `model`, or one of its parents, each with the path to it."""
    paths = dict.fromkeys((policy.concrete_model, path) for policy in get_policies() for path in related_paths(policy))
    own = cast("type[Model]", model._meta.concrete_model)
    return [(table, path) for table, path in paths if issubclass(own, _model_at(table, path))]


def _model_at(model: type[Model], path: str) -> type[Model]:
    return cast("type[Model]", field_at(model, path).related_model._meta.concrete_model)


def _objects_with(term: str, using: str, fields: Iterable[tuple[type[Model], str]]) -> Iterator[QuerySet[Any]]:
    """Yield for each model and path the objects whose value is `term`."""
    for model, path in fields:
        with suppress(ValidationError, ValueError, TypeError):
            field = stored_type(field_at(model, path))
            value = field.to_python(_trimmed(field, term))
            yield model._base_manager.using(using).filter(**{path: value}).order_by()


def _trimmed(field: Any, text: str) -> str:
    """Return `text` without the blanks around it, unless values of `field` may have some."""
    return text if isinstance(field, CharField | TextField) else text.strip()


def _about(objects: QuerySet[Any], using: str) -> Q:
    """Return the condition on rows about the first `MAX_OBJECTS` of `objects`, also as objects of parent models."""
    return about_objects(tables_of(objects.model), objects[:MAX_OBJECTS], using)


def _about_all(objects: QuerySet[Any], tables: Sequence[type[Model]], using: str) -> Q:
    """Return the condition on rows about all of `objects`, as objects of `tables`.

    Few are a list of keys, by which an index finds the rows. Of many, such as all orders of a large merchant, the
    database reads the keys itself.
    """
    is_many = objects[MAX_OBJECTS : MAX_OBJECTS + 1].values("pk").exists()
    return about_objects(tables, objects if is_many else objects[:MAX_OBJECTS], using)


CONDITIONS: Final[dict[str, Callable[[Any], Q]]] = {
    "policy": lambda label: Q(policy__in=labels_of(label)),
    "object": lambda reference: about_reference(reference, database_of(Timeout)),
    "related": lambda reference: about_related(reference, database_of(Timeout)),
    "key": lambda key: Q(HAS_KEY, key=key) if key else Q(key=""),
    "queue": lambda queue: Q(queue=queue) if queue == "default" else Q(HAS_OWN_QUEUE, queue=queue),
    "state": lambda state: Q(state=state),
    "due_from": lambda at: Q(run_at__gte=at),
    "due_until": lambda at: Q(run_at__lt=at),
    "overdue": lambda is_asked: Q(run_at__lte=DatabaseNow()) if is_asked else Q(),
    "failing": lambda is_asked: HAS_FAILED if is_asked else Q(),
    "settled_from": lambda at: Q(settled_at__gte=at),
    "settled_until": lambda at: Q(settled_at__lt=at),
    "set_by": lambda who: Q(terms__isnull=who == "hand"),
}
"""What selects timeouts, for commands, REST and the admin alike: the condition on rows that a checked value means.

`object` and `related` raise LookupError and ValueError as `about_related` does. `find_ids` and `where` depend on more
than their value.
"""


def most_used_first(ids: list[int], count: int) -> list[int]:
    """Return `ids` with the first `count` of them sorted: those that have used most of their time come first.

    The database cannot compare open hours, so that these rows and their objects are read.
    """
    rows = Timeout.objects.using(database_of(Timeout)).filter(pk__in=ids[:count]).defer("history", "payload")
    facts = Facts(list(rows), rows.db, locks=False)
    shares = {row.pk: progress.share for row in facts.rows if (progress := facts.progress(row))}
    return sorted(ids[:count], key=lambda pk: shares.get(pk, -1.0), reverse=True) + ids[count:]
