"""Find timeouts by what people know: the id of an object, a key, a number, a customer.

Policies name such fields (`search`) and the path to the owner of an object (`owner`). Every query is bounded and reads
the writer. At most `MAX_OBJECTS` objects are read by each field or path.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, suppress
from typing import Any, Final, cast

from django.contrib.auth import get_permission_codename
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import ValidationError
from django.db import DatabaseError, connections, transaction
from django.db.models import CharField, Model, Q, QuerySet, TextField

from django_delayq.key_types import object_id_of, pk_of, root_of_key
from django_delayq.ledger import search
from django_delayq.ledger.locking import rows_of
from django_delayq.ledger.subjects import Subject, about_objects, kind_of, model_of_kind, tables_of
from django_delayq.models import Timeout
from django_delayq.paths import field_at, stored_type
from django_delayq.policies import get_policies

MAX_HITS: Final = 1_000
"""A search that finds more is too general to act on, and would load all of their ids."""
MAX_KINDS: Final = 200
"""The kinds of objects that a search reads; beyond, content types are not what people name objects by."""
MAX_OBJECTS: Final = 1_000
"""Objects that a search compares by name: each is loaded."""
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
            found += model._base_manager.using(using).filter(pk=pk_of(model, _trimmed(root_of_key(model), text)))[
                :limit
            ]
    return found


def find_named(model: type[Model], text: str, using: str, limit: int) -> list[Model]:
    """Return the objects of `model` of which a field in `search` of a policy is `text`, each once: at most `limit`."""
    own = cast("type[Model]", model._meta.concrete_model)
    fields = [(model, path) for table, path in searched_fields() if issubclass(own, table)]
    found = (obj for objects in _objects_with(text, using, fields) for obj in objects[:limit])
    return list({obj.pk: obj for obj in found}.values())[:limit]


def searched_fields(user: Any = None) -> list[tuple[type[Model], str]]:
    """Return the models and paths that policies name in `search`, each once.

    A field is included only if `user` may view its model, which for a path over a relation is the one at its end:
    otherwise a search would reveal whether such an object exists. Without a user, as for commands, all are included.
    """
    named = dict.fromkeys((policy.concrete_model, path) for policy in get_policies() for path in policy.search)
    return [(model, path) for model, path in named if user is None or _may_search(user, model, path)]


def _may_search(user: Any, model: type[Model], path: str) -> bool:
    relation = path.rpartition("__")[0]
    return may_view(user, _model_at(model, relation) if relation else model)


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


def titled(kind: str, object_id: str, name: str = "") -> str:
    """Return how pages name an object of the model `kind`: `order A-2026-0050`; without a name `order 19`."""
    if not name:
        return f"{kind} {object_id}"
    return name if kind.casefold() in name.casefold() else f"{kind} {name}"


def is_key_in(name: str, object_id: str) -> bool:
    """Return whether `name` contains the id as a word, so that a page need not show both."""
    return object_id in re.split(r"[^\w-]+", name)


def _names(model: type[Model], ids: Collection[str], using: str, user: Any) -> dict[str, str]:
    path = next((each.search[0] for each in get_policies() if each.concrete_model is model and each.search), "")
    if not path and model.__str__ is Model.__str__:
        return {}  # pages show "order 19", which is shorter than "Order object (19)"
    if not (user is None or (may_view(user, model) and (not path or _may_search(user, model, path)))):
        return {}
    pks = []
    for object_id in ids:
        with suppress(ValueError):
            pks.append(pk_of(model, object_id))
    objects, named = model._base_manager.using(using).filter(pk__in=pks).order_by(), dict[str, str]()
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


def owned_by(model: type[Model], pk: Any, using: str) -> Q:
    """Return the condition on rows about objects that belong to this object of `model`: the newest of each model."""
    wanted = Q(pk__in=[])
    for table, path in _paths_to(model):
        owner, keys = _model_at(table, path), [pk]
        if root_of_key(owner) is not root_of_key(model):  # it is a multi-table child with a key of its own
            keys = list(rows_of(model, using).filter(pk=pk).values_list(cast("Any", owner._meta.pk).name, flat=True))
        owned = table._base_manager.using(using).filter(**{f"{path}__pk__in": keys})
        wanted |= _about(owned.order_by("-pk"), using)
    return wanted


def is_owner(model: type[Model]) -> bool:
    """Return whether objects belong to those of `model`, according to the policies."""
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
    """Return the models of policies whose owner is a `model`, or one of its parents, each with the path to it."""
    paths = dict.fromkeys((policy.concrete_model, policy.owner) for policy in get_policies() if policy.owner)
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
