"""What a declared policy reads: the fields that decide about its timeouts, found without a query."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from datetime import date
from enum import Enum
from functools import lru_cache
from typing import Any, cast

from django.core.exceptions import FieldDoesNotExist
from django.db.models import (
    DateTimeField,
    F,
    GeneratedField,
    Lookup,
    Model,
    OuterRef,
    Q,
    QuerySet,
    Subquery,
    Value,
)
from django.db.models.expressions import BaseExpression, Col, CombinedExpression, NegatedExpression, RawSQL
from django.db.models.query import RawQuerySet
from django.db.models.sql import Query
from django.db.models.sql.where import WhereNode

from django_delayq.policy.policies import TimeoutPolicy, get_policies, registry
from django_delayq.policy.terms import OfDialect, follows_data, has_column, named_paths
from django_delayq.times.paths import field_at, is_reference, named_in

OPERATORS = {"exact": "=", "lt": "<", "lte": "<=", "gt": ">", "gte": ">=", "in": "in"}


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


def since_name(policy: TimeoutPolicy[Any], number: int = 0) -> str | None:
    """Return by which name the rows of `with_since` have the `since` of `policy`; None: SQL cannot read it."""
    if not isinstance(policy.since, str):
        return None
    return policy.since if policy.has_plain_since else f"delayq{number}_began"


def with_since(rows: QuerySet[Any], *policies: TimeoutPolicy[Any]) -> QuerySet[Any]:
    """Return `rows` of the table of `policies`, for each of which they have the value of `since`: see `since_name`.

    A path is a subquery and no join: a statement that locks the rows would lock those of the path, too, and PostgreSQL
    refuses to lock the nullable side of a join.
    """
    for number, policy in enumerate(policies):
        name, since = since_name(policy, number), policy.since
        if name is None or name == since:
            continue
        path = cast("str", since)
        value: Any = F(path)
        if policy.counts_from_date:  # as `TimeoutPolicy.checked_since` returns it
            value = OfDialect(value, sql="midnight", output_field=DateTimeField())
        if "__" in path:
            others: QuerySet[Any, Any] = QuerySet(policy.concrete_model).order_by().filter(pk=OuterRef("pk"))
            value = Subquery(others.values_list(value)[:1], output_field=DateTimeField())
        rows = rows.alias(**{name: value})
    return rows


def columns_read(policy: TimeoutPolicy[Any]) -> frozenset[str] | None:
    """Return the names of the fields that decide on arming; None if any save may change the decision.

    Callables and raw SQL may read anything, and related rows are saved without the object.
    """
    if callable(policy.since) or reads_other_rows(policy) or (follows_data(policy) and not has_column(policy)):
        return None
    used = condition_columns(policy)
    if used is None:
        return None
    for path in (policy.since, *named_paths(policy)):
        used |= _sources(policy.model._meta.get_field(path.partition("__")[0])) if path else set()
    return frozenset(name for field in used for name in (field.name, field.attname))


def policies_by_table(
    model: type[Model], names: Collection[str] | None = None
) -> Collection[tuple[TimeoutPolicy[Any], ...]]:
    """Return the automatic policies that a write of the fields `names` of `model` concerns; None: of all fields.

    Those whose `concrete_model` is the same table are together.
    """
    derived = registry.derived
    found: dict[tuple[TimeoutPolicy[Any], ...], frozenset[str] | None] | None = derived.get(model)
    if found is None:
        by_table: dict[type[Model], list[TimeoutPolicy[Any]]] = {}
        for policy in get_policies(model):
            if policy.is_automatic:
                by_table.setdefault(policy.concrete_model, []).append(policy)
        found = {}
        for policies in by_table.values():
            read = [columns_read(policy) for policy in policies]
            # None: every write may change what one of them decides.
            found[tuple(policies)] = None if None in read else frozenset[str]().union(*filter(None, read))
        derived[model] = found
    if names is None:
        return found
    return [policies for policies in found if (fields := found[policies]) is None or fields & set(names)]


def condition_columns(policy: TimeoutPolicy[Any]) -> set[Any] | None:
    """Return the fields that `when` and `hold_when` read, with the sources of generated ones.

    None: raw SQL hides them.
    """
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


@lru_cache(maxsize=1000)  # each firing asks, and Django takes as long to resolve a condition as to send a statement
def reads_other_rows(policy: TimeoutPolicy[Any]) -> bool:
    """Return whether `when` or `hold_when` depends on rows other than the object's own, also of the same table.

    Not all joins: the base manager may have added some that the condition does not read. The object's own row is in its
    table and those of its parents. They are found by joins and not by the names of tables, because a relation to the
    same table joins it under another alias.
    """
    query, own = _condition(policy), set[str | None]()
    for alias, table in query.alias_map.items():
        link = getattr(getattr(table, "join_field", None), "remote_field", None)
        if table.parent_alias is None or (table.parent_alias in own and getattr(link, "parent_link", False)):
            own.add(alias)
    others = query.alias_map.keys() - own  # not the aliases of subqueries
    return any(isinstance(node, Query) or getattr(node, "alias", None) in others for node in _walk(query.where))


@lru_cache(maxsize=1000)
def related_paths(policy: TimeoutPolicy[Any]) -> tuple[str, ...]:
    """Return the paths of foreign keys that `policy` names, with all their beginnings: "channel", "channel__merchant".

    Those of `owner`, and of the values that `since`, `after`, `when` and `hold_when` read.
    """
    conditions = (path for condition in (policy.when, policy.hold_when) for path in named_in(condition))
    named = [policy.owner, policy.since, *named_paths(policy), *conditions]
    found: list[str] = []
    for path in named:
        model, taken = policy.model, list[str]()
        for step in path.split("__") if isinstance(path, str) else ():
            try:
                field: Any = model._meta.get_field(step)
            except FieldDoesNotExist:
                break
            if not is_reference(field):
                break
            taken.append(field.name)
            found.append("__".join(taken))
            model = field.related_model
    return tuple(dict.fromkeys(found))


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
    """Return the query of the conditions: see `resolved`."""
    return resolved(policy.model, Q(policy.when or Q(), policy.hold_when or Q()))


def resolved(model: type[Model], condition: Q) -> Any:
    """Return the query for `condition` without its negations, by the base manager. It has all that the condition reads.

    Needs no database, which may be down or empty when a project starts. To negate a generic relation, Django asks for
    its content type. Raises what Django raises for a wrong lookup or value.
    """
    return model._base_manager.filter(_without_negations(condition)).query


def _without_negations(node: Any) -> Any:
    return Q(*map(_without_negations, node.children), _connector=node.connector) if isinstance(node, Q) else node


def _walk(node: Any) -> Iterator[Any]:
    yield node
    for child in node.get_source_expressions():
        if hasattr(child, "get_source_expressions"):
            yield from _walk(child)


def times_in(node: Any) -> Iterator[Any]:
    """Yield the dates in a condition, as it was declared, and the functions that return the current time."""
    parts = list(node) if isinstance(node, tuple | list | set) else []
    of_django: Any = (Q, QuerySet, WhereNode, BaseExpression)
    if isinstance(node, date) or type(node).__name__.endswith("Now"):
        yield node
    elif isinstance(node, of_django):
        having = [name for name in ("children", "value", "lhs", "rhs", "query", "where") if hasattr(node, name)]
        parts = [getattr(node, name) for name in having] or node.get_source_expressions()
    for part in parts:
        yield from times_in(part)


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
        return str(vars(value)["name"])  # which django-stubs does not know
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
