"""Check declarations when they are made, so that a wrong policy fails at the start and not at its first deadline.

Also read the condition of a policy, without a query: which columns it depends on, and how it is shown to people.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import date, timedelta
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.core.exceptions import FieldDoesNotExist, FieldError, ValidationError
from django.db.models import (
    CharField,
    DateTimeField,
    F,
    GeneratedField,
    IntegerField,
    Lookup,
    Model,
    Q,
    QuerySet,
    TextField,
    UUIDField,
    Value,
)
from django.db.models.expressions import BaseExpression, Col, CombinedExpression, NegatedExpression, RawSQL
from django.db.models.query import RawQuerySet
from django.db.models.sql import Query

from django_delayq.clock import LATEST_YEAR, LONGEST, UNITS, duration_text
from django_delayq.exceptions import PolicyError, suggestion
from django_delayq.key_types import refusal
from django_delayq.policy_options import MAX_STORED, Brake, Late, Limits, Retry

if TYPE_CHECKING:
    from django_delayq.policies import TimeoutPolicy

_NAME = r"[A-Za-z_][A-Za-z0-9_-]*"
NAME = re.compile(rf"{_NAME}\Z")
ALIAS = re.compile(rf"{_NAME}(\.{_NAME}\.{_NAME})?\Z")
MODEL_LABEL = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*\Z")
SILENCED_BY_POLICY = ("W001", "W002", "W013", "W015", "W016", "I004")
"""The system checks that report a policy which works as it is declared, if that is what the developer means."""
MAX_LABEL = 200
MAX_BATCH = 10_000
OPERATORS = {"exact": "=", "lt": "<", "lte": "<=", "gt": ">", "gte": ">=", "in": "in"}


def check_call(model: Any, options: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise PolicyError for a call of `timeout_policy` without a model or with unknown options."""
    is_model = isinstance(model, type) and issubclass(model, Model)
    if not is_model and (isinstance(model, type) or callable(model)):
        name = getattr(model, "__qualname__", repr(model))
        raise PolicyError(
            f"@timeout_policy is given {name}, which is not a model. The model comes first, in parentheses: "
            "@timeout_policy(Order, after=...)."
        )
    for option in [each for each in options if each not in known]:
        hint = suggestion(option, known, f"The options are {', '.join(known)}.")
        if option in UNITS:  # as calls that schedule have them
            value = options[option] if isinstance(options[option], int | float) else "..."
            hint = f"Write after=timedelta({option}={value})."
        raise PolicyError(f"timeout_policy() has no option {option!r}. {hint}")


def check_declaration(policy: TimeoutPolicy[Any]) -> None:
    """Raise `PolicyError` for anything that is wrong regardless of the model's fields."""
    for wrong, message in _faults(policy):
        if wrong:
            raise PolicyError(f"Timeout policy {policy.name!r}: {message}")
    _read_iterators(policy.when, policy.name)


def _read_iterators(when: Any, policy: str) -> None:
    """Replace iterators in a condition, such as `map()` or a generator, by lists.

    Each query would read them again, so that the condition would hold for the first query alone. Raises PolicyError for
    one without items: most likely, another condition has read it.
    """
    for place, child in enumerate(when.children if isinstance(when, Q) else ()):
        name, value = child if isinstance(child, tuple) else ("", child)
        if not isinstance(value, Iterator):
            _read_iterators(value, policy)
            continue
        items = list(value)
        if not items:
            words = f"{name} in its when is an iterator without items, which matches nothing. Give a list."
            raise PolicyError(f"Timeout policy {policy!r}: {words}")
        when.children[place] = (name, items)
    if isinstance(when, BaseExpression) and not isinstance(when, Query):
        for part in when.get_source_expressions():
            _read_iterators(part, policy)


def _faults(policy: TimeoutPolicy[Any]) -> Iterator[tuple[bool, str]]:
    model, after, since = policy.model, policy.after, policy.since
    yield from _faults_of_callables(policy)
    is_model = isinstance(model, type) and issubclass(model, Model)
    is_label = isinstance(model, str) and MODEL_LABEL.match(model) is not None
    yield not (is_model or is_label), f'the model must be a model class or "app.Model", not {model!r}.'
    yield is_model and model._meta.abstract, f"{model} is abstract and has no table; declare one per concrete model."
    yield not NAME.match(str(policy.name)), "a name has letters, digits, _ and - only, and no digit first; give name=."
    yield (
        not all(isinstance(alias, str) and ALIAS.match(alias) for alias in policy.aliases),
        'aliases are former names ("name") or labels ("app.model.name").',
    )
    unknown = [str(each) for each in policy.silenced_checks if check_id(each) not in SILENCED_BY_POLICY]
    yield bool(unknown), f"silenced_checks has {', '.join(unknown)}; it may have {', '.join(SILENCED_BY_POLICY)}."
    yield any(len(label) > MAX_LABEL for label in policy.labels), f"its label is longer than {MAX_LABEL} characters."
    for option, other, words in (("after", timedelta, "a timedelta"), ("since", str, "the name of a field")):
        given = getattr(policy, option)
        is_fitting = given is None or isinstance(given, other) or callable(given)
        yield not is_fitting, f"{option} must be {words} or a callable, not {given!r}."
    negative = duration_text(after) if isinstance(after, timedelta) and after < timedelta(0) else ""
    yield bool(negative) and since is None, f"after must not be negative without since, but is {negative}."
    too_long = isinstance(after, timedelta) and not -LONGEST < after < LONGEST
    yield too_long, f"after must be shorter than {LONGEST.days // 365} years, or each deadline is after {LATEST_YEAR}."
    yield any(inspect.iscoroutinefunction(one) for one in (after, since)), "after and since cannot be async."
    # The type and not the repr, which would evaluate a queryset in it.
    kind = type(policy.when).__name__
    yield policy.when is not None and not isinstance(policy.when, Q), f"when must be a Q, not of type {kind}."
    yield policy.retry is not None and not isinstance(policy.retry, Retry), "retry must be a Retry: Retry([60, 600])."
    yield not _is_count(policy.batch, 1, MAX_BATCH), f"batch must be an int from 1 to {MAX_BATCH}, or None."
    yield policy.batch is not None and not policy.atomic, "batch needs atomic=True: its objects share one transaction."
    yield not _is_count(policy.max_extensions, 0, MAX_STORED), "max_extensions must be an int, 0 or more, or None."
    for option, type_ in (("limits", Limits), ("late", Late), ("brake", Brake)):
        given = getattr(policy, option)
        yield given is not None and not isinstance(given, type_), f"{option} must be a {type_.__name__}, not {given!r}."
    yield not isinstance(policy.shadow, bool), f"shadow must be True or False, not {policy.shadow!r}."
    yield not isinstance(policy.atomic, bool), f"atomic must be True or False, not {policy.atomic!r}."
    yield (
        not isinstance(policy.queue, str) or not policy.queue or len(policy.queue) > 100 or "\0" in policy.queue,
        f"queue must be a string of 1 to 100 characters, not {policy.queue!r}.",
    )


def check_id(given: Any) -> str:
    """Return the id of a system check without the label of this app, with which settings have it."""
    return str(given).removeprefix("django_delayq.")


def _faults_of_callables(policy: TimeoutPolicy[Any]) -> Iterator[tuple[bool, str]]:
    handler = policy.handler
    yield not callable(handler), f"the handler must be a function, not {handler!r}."
    arguments = ("queryset", "timeouts") if policy.batch else ("obj", "timeout")
    called = {"the handler": (handler, arguments), "after": (policy.after, ("obj",)), "since": (policy.since, ("obj",))}
    for name, (one, given) in called.items():
        if callable(one):
            wrong = _misfit(one, given)
            yield bool(wrong), f"{name} {wrong}"


def _misfit(function: Callable[..., Any], arguments: Sequence[str]) -> str:
    """Return why calling `function` with positional `arguments` would not run it; "" if it would, or may."""
    if isinstance(function, type):
        return f"is a class, {function}, which would only be instantiated; give a function or an instance."
    called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    if any(inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one) for one in (function, called)):
        return "has a `yield`: calling it would only make a generator, and run none of its lines."
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none
        return ""
    try:
        signature.bind(*arguments)
    except TypeError as error:
        return f"is called with ({', '.join(arguments)}), but takes {signature}: {error}."
    return ""


def _is_count(value: Any, least: int, most: int) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and least <= value <= most)


def check_against_model(policy: TimeoutPolicy[Any]) -> None:
    """Raise `PolicyError` if `since`, `when`, `search` or `owner` does not fit the fields of the model."""
    model: Any = policy.model
    if isinstance(model, str):
        try:
            model = apps.get_model(model)
        except LookupError as error:
            raise PolicyError(f"Timeout policy {policy.name!r}: there is no model {policy.model!r}.") from error
        object.__setattr__(policy, "model", model)
    if words := refusal(model):
        raise PolicyError(f"Timeout policy {policy.label}: {words}")
    if isinstance(policy.since, str):
        _check_field(policy, "since", policy.since, "a DateTimeField", _is_datetime)
    if policy.when is not None:
        try:
            model._base_manager.filter(policy.when)
        except (FieldError, ValidationError, ValueError, TypeError) as error:
            # Without the value, whose text would evaluate a queryset in it.
            raise PolicyError(f"Timeout policy {policy.label}: its when does not fit: {error}") from error
    for path in policy.search:
        _check_field(policy, "search", path, "a field of strings, integers or UUIDs", _is_searchable)
    if policy.owner is not None:
        _check_field(policy, "owner", policy.owner, "a path of foreign keys", _is_reference)
        if words := refusal(field_at(model, policy.owner).related_model):
            raise PolicyError(f"Timeout policy {policy.label}: owner={policy.owner!r}: {words}")


def _check_field(policy: TimeoutPolicy[Any], option: str, path: str, rule: str, accepts: Callable[[Any], bool]) -> None:
    """Raise `PolicyError` unless `path` is a field that `accepts`, or leads to one over foreign keys."""
    model = policy.model
    try:
        fits = accepts(model._meta.get_field(path) if option == "since" else field_at(model, path))
    except (FieldDoesNotExist, AttributeError):  # the latter: not a string
        fits = False
    if not fits:
        known = [field.name for field in model._meta.concrete_fields if accepts(field)]
        hint = suggestion(path, known, f"It has: {', '.join(known) or 'none'}.")
        words = f"{option}={path!r} is not {rule} of {model.__name__}. {hint}"
        raise PolicyError(f"Timeout policy {policy.label}: {words}")


def field_at(model: type[Model], path: str) -> Any:
    """Return the field at the end of `path`, which leads over foreign keys: `order__number`.

    Raises FieldDoesNotExist.
    """
    *steps, name = path.split("__")
    for step in steps:
        field: Any = model._meta.get_field(step)
        if not _is_reference(field):
            raise FieldDoesNotExist(f"{step!r} of {model.__name__} is not a foreign key.")
        model = field.related_model
    return model._meta.get_field(name)


def unindexed(policy: TimeoutPolicy[Any]) -> list[str]:
    """Return the paths of `search` whose field begins no index that has all rows."""
    found = []
    for path in policy.search:
        field, options = field_at(policy.model, path), field_at(policy.model, path).model._meta
        indexes = [index.fields for index in options.indexes if index.condition is None]
        indexes += [each.fields for each in options.total_unique_constraints]
        first = {fields[0].lstrip("-") for fields in (*indexes, *options.unique_together) if fields}
        if not (field.unique or field.db_index or field.name in first):
            found.append(path)
    return found


def _is_reference(field: Any) -> bool:
    return bool(field.concrete and (field.many_to_one or field.one_to_one) and field.related_model)


def _is_searchable(field: Any) -> bool:
    kinds = (CharField, TextField, IntegerField, UUIDField)
    return bool(field.concrete) and not field.is_relation and isinstance(stored_type(field), kinds)


def _is_datetime(field: Any) -> bool:
    return isinstance(stored_type(field), DateTimeField)


def stored_type(field: Any) -> Any:
    """Return `field`, or the output of a generated field."""
    return field.output_field if isinstance(field, GeneratedField) else field


def columns_read(policy: TimeoutPolicy[Any]) -> frozenset[str] | None:
    """Return the names of the fields that decide on arming; None if any save may change the decision.

    Callables and raw SQL may read anything, and related rows are saved without the object.
    """
    if callable(policy.since) or callable(policy.after) or reads_other_rows(policy):
        return None
    used = condition_columns(policy)
    if used is None:
        return None
    if policy.since:
        used |= _sources(policy.model._meta.get_field(policy.since))
    return frozenset(name for field in used for name in (field.name, field.attname))


def condition_columns(policy: TimeoutPolicy[Any]) -> set[Any] | None:
    """Return the fields that `when` reads, with the sources of generated ones; None if raw SQL hides them."""
    nodes = list(_walk(_condition(policy).where))
    if any(isinstance(node, RawSQL) for node in nodes):
        return None
    return {source for node in nodes if isinstance(node, Col) for source in _sources(node.target)}


def _sources(field: Any) -> set[Any]:
    """Return `field` and, if it is generated, the fields in its expression: `update_fields` names only those."""
    if not isinstance(field, GeneratedField):
        return {field}
    generated: Any = field  # django-stubs does not know its expression
    columns = _walk(generated.expression.resolve_expression(Query(field.model), allow_joins=False))
    return {field}.union(*(_sources(node.target) for node in columns if isinstance(node, Col)))


def reads_other_rows(policy: TimeoutPolicy[Any]) -> bool:
    """Return whether `when` depends on rows other than the object's own, also of the same table."""
    return bool(tables_of_other_rows(policy))


@lru_cache(maxsize=1000)  # each firing asks, and Django takes as long to resolve a condition as to send a statement
def tables_of_other_rows(policy: TimeoutPolicy[Any]) -> frozenset[str]:
    """Return the tables in which `when` reads rows other than the object's own, and those joined on the way.

    Not all joins: the base manager may have added some that the condition does not read. The object's own row is in its
    table and those of its parents. They are found by joins and not by the names of tables, because a relation to the
    same table joins it under another alias.
    """
    query = _condition(policy)
    own, found = set[str | None](), set[str]()
    for alias, table in query.alias_map.items():
        link = getattr(getattr(table, "join_field", None), "remote_field", None)
        if table.parent_alias is None or (table.parent_alias in own and getattr(link, "parent_link", False)):
            own.add(alias)
    for node in _walk(query.where):
        if isinstance(node, Query):
            found.update(_tables_of_subquery(node))
        elif isinstance(node, Col):
            alias = node.alias
            while alias in query.alias_map and alias not in own:  # else it is one of a subquery
                found.add(query.alias_map[alias].table_name)
                alias = query.alias_map[alias].parent_alias
    return frozenset(found)


def _tables_of_subquery(query: Any) -> Iterator[str]:
    """Yield the tables that `query` reads. Without a filter it has no aliases until it is compiled."""
    yield query.model._meta.db_table
    yield from (table.table_name for table in query.alias_map.values())
    for node in (node for root in (query.where, *query.annotations.values()) for node in _walk(root)):
        if isinstance(node, Query):
            yield from _tables_of_subquery(node)
    for part in query.combined_queries:
        yield from _tables_of_subquery(part)


SOFT_DELETION = frozenset(("deleted", "deleted_at", "deleted_on", "is_deleted", "is_removed", "removed_at"))
"""How apps for soft deletion (safedelete, model-utils, softdelete) and most projects name their field."""


def ignored_deletion(policy: TimeoutPolicy[Any]) -> list[str]:
    """Return the fields that mark deleted rows, or by which the default manager hides rows, if `when` reads none.

    Rows that the base manager hides are skipped as gone, so the fields that it reads count as read.
    """
    used = condition_columns(policy)
    manager = policy.model._default_manager
    try:
        hiding = {node.target for node in _walk(manager.all().query.where) if isinstance(node, Col)}
    except Exception:  # noqa: BLE001 - code of the project, which may need a request or a tenant
        hiding = set()
    own = [field for field in policy.model._meta.concrete_fields if field.name in SOFT_DELETION or field in hiding]
    return [] if used is None or used.intersection(own) else [field.name for field in own]


def _condition(policy: TimeoutPolicy[Any]) -> Any:
    """Return the query of the condition, by the policy's base manager."""
    return policy.model._base_manager.filter(policy.when or Q()).query


def _walk(node: Any) -> Iterator[Any]:
    yield node
    for child in node.get_source_expressions():
        if hasattr(child, "get_source_expressions"):
            yield from _walk(child)


def condition_text(when: Q) -> str:
    """Return `when` as code in one notation for all languages, such as `reminders < 3 and state = "pending"`.

    A queryset is rendered as the label of its model, and an object as label and key: their own `repr` would run a query
    and print what `__str__` of the objects returns, also to users who may not view them.
    """
    return _shown(when) or "always"


def _shown(node: Any) -> str:
    if isinstance(node, tuple):
        return _comparison(*node)
    if not isinstance(node, Q):
        return _value(node)
    word = node.connector.lower()
    parts = [_value(child) if isinstance(child, Q) and len(child) > 1 else _shown(child) for child in node.children]
    joined = f" {word} ".join(part for part in parts if part)
    return f"not ({joined})" if node.negated and joined else joined


def _comparison(name: str, value: Any) -> str:
    """Return a lookup: with an operator if there is one, otherwise as Django names it."""
    path, _separator, lookup = name.rpartition("__")
    if lookup == "isnull" or value is None:
        is_null = value is not False
        return f"{path if lookup in {'isnull', 'exact'} else name} is {'None' if is_null else 'not None'}"
    if path and lookup in OPERATORS:
        return f"{path} {OPERATORS[lookup]} {_value(value)}"
    return f"{name} = {_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, Enum | Value):
        value = value.value
    if isinstance(value, QuerySet | RawQuerySet | Query):
        return f"a query of {value.model._meta.label if value.model else '?'}"
    if isinstance(value, Model):
        return f"{value._meta.label} {value.pk}"
    if isinstance(value, Q):
        return f"({_shown(value)})"
    if type(value) is F:  # an OuterRef is one, too
        return str(getattr(value, "name", ""))
    if isinstance(value, BaseExpression):
        return _expression(value)
    if isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, date):
        return f'"{value.isoformat()}"'
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _expression(value: BaseExpression) -> str:
    """Return the name of an expression with its parts, whose own `repr` may contain that of a queryset."""
    given = [value.lhs, value.rhs] if isinstance(value, Lookup) else value.get_source_expressions()
    parts = [_value(part) for part in given if part is not None]
    if isinstance(value, Lookup) and value.lookup_name in OPERATORS and len(parts) == 2:
        return f"{parts[0]} {OPERATORS[value.lookup_name]} {parts[1]}"
    if isinstance(value, NegatedExpression):
        return f"not ({', '.join(parts)})"
    if isinstance(value, CombinedExpression):
        return f" {value.connector} ".join(parts)
    return f"{type(value).__name__}({', '.join(parts)})" if parts else repr(value)
