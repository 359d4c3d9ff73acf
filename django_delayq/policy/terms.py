"""The terms of a computed deadline: the values at the paths that `after` names, as a row of the ledger has them.

A deadline follows its data and nothing else. So the ledger stores with what values it was computed, as one text that
the database writes and compares: a changed value moves the deadline, and a change of code moves nothing. `terms` is
NULL if the deadline was set by hand.

    ""              by constants, such as `after=timedelta(minutes=30)`
    "4f0c:1800000000"  by values at paths: a digest of their names, then the values; a duration in microseconds
    "=2026-11-27..."   by code that reads what no path names, such as a callable: the deadline that it led to
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any

from django.core.exceptions import ValidationError
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import CharField, DurationField, F, Func, OuterRef, Q, QuerySet, Subquery, Value
from django.db.models.fields import BigIntegerField
from django.db.models.functions import Cast, Coalesce, Concat, Left
from django.db.models.sql.compiler import SQLCompiler

from django_delayq.policy.policies import TimeoutPolicy
from django_delayq.sql.dialects import dialect_of
from django_delayq.times.clock import in_utc
from django_delayq.times.lengths import paths_of, reads_unnamed
from django_delayq.times.paths import Values, column_at

MAX_TERMS = 200
"""The column of the ledger holds no more: of longer values, only the beginning is compared."""
CONSTANT = ""
"""The terms of a deadline that depends on no data but `since`."""
_BETWEEN = "\x1f"
"""The unit separator of ASCII, which no value should contain."""


def named_paths(policy: TimeoutPolicy[Any]) -> tuple[str, ...]:
    """Return the paths that `after` of `policy` names."""
    if isinstance(policy.after, str):
        return (policy.after,)
    return () if policy.fixed_length is None else paths_of(policy.fixed_length)


@lru_cache(maxsize=1000)
def _columns(policy: TimeoutPolicy[Any]) -> tuple[str, ...] | None:
    """Return the columns by whose values the terms are known; None: SQL cannot know them.

    Of a calendar it is the row that has it, so that another team is another term: the hours of one calendar may
    change without moving a deadline. A calendar of the object itself may be computed of any of its columns.
    """
    if policy.after is None or isinstance(policy.after, timedelta):
        return ()
    if callable(policy.after) or (policy.fixed_length is not None and reads_unnamed(policy.fixed_length)):
        return None
    columns = []
    for path in named_paths(policy):
        column = path if column_at(policy.model, path) is not None else path.rpartition("__")[0]
        if not column:
            return None
        columns.append(column)
    return tuple(columns)


def follows_data(policy: TimeoutPolicy[Any]) -> bool:
    """Return whether deadlines of `policy` depend on more data than its `since`."""
    return _columns(policy) != ()


def has_column(policy: TimeoutPolicy[Any]) -> bool:
    """Return whether SQL knows the terms of `policy`, which then are the value of `terms_column`."""
    return bool(_columns(policy))


def reads_again(policy: TimeoutPolicy[Any]) -> bool:
    """Return whether a deadline follows columns of other rows: before it decides, they are read again."""
    return has_column(policy) or (has_since_path(policy) and policy.is_automatic)


def has_since_path(policy: TimeoutPolicy[Any]) -> bool:
    """Return whether `since` is a column of another row."""
    return isinstance(policy.since, str) and "__" in policy.since


@lru_cache(maxsize=1000)
def prefix(policy: TimeoutPolicy[Any]) -> str:
    """Return the beginning of all terms of a policy that `has_column`: rows with another one are of other code."""
    names = _BETWEEN.join((*named_paths(policy), *(_columns(policy) or ())))
    return f"{hashlib.blake2b(names.encode(), digest_size=2).hexdigest()}:"


class OfDialect(Func):
    """What the method `sql` of the dialect, such as "midnight", makes of a column."""

    def as_sql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, *_: Any, **__: Any) -> Any:
        template = getattr(dialect_of(connection), self.extra["sql"])("%(expressions)s")
        return super().as_sql(compiler, connection, template=template)


def terms_column(policy: TimeoutPolicy[Any], using: str) -> Any:
    """Return the terms of a row of the policy's table now, as an expression. For policies that `has_column`.

    Values of related rows are a subquery, so that a statement that locks the rows locks no others: see `with_since`.
    """
    parts: list[Any] = []
    for number, path in enumerate(_columns(policy) or ()):
        value: Any = F(path)
        if isinstance(column_at(policy.model, path), DurationField):
            value = OfDialect(value, sql="microseconds", output_field=BigIntegerField())
        parts += [Value(_BETWEEN)] if number else []
        parts.append(Coalesce(Cast(value, CharField()), Value("")))
    text = Left(Concat(Value(prefix(policy)), *parts, output_field=CharField()), MAX_TERMS)
    if not any("__" in path for path in _columns(policy) or ()):
        return text
    rows: QuerySet[Any, Any] = QuerySet(policy.concrete_model, using=using).order_by().filter(pk=OuterRef("pk"))
    return Subquery(rows.values_list(text)[:1], output_field=CharField())


def lacks_none(policy: TimeoutPolicy[Any]) -> Q:
    """Return the condition on rows of the policy's table that no value at its paths is NULL: that exempts an object."""
    return Q(**{f"{path}__isnull": False for path in _columns(policy) or ()})


def values_in(terms: str | None, policy: TimeoutPolicy[Any]) -> Values | None:
    """Return the values at the paths of `policy` that `terms` contain.

    None: the object must be read, because a path leads to an attribute of Python, or values are too long; or the terms
    are of other code.
    """
    paths = named_paths(policy)
    if not terms or not has_column(policy) or paths != _columns(policy) or len(terms) >= MAX_TERMS:
        return None
    if not terms.startswith(prefix(policy)):
        return None
    parts = terms.removeprefix(prefix(policy)).split(_BETWEEN, len(paths) - 1)
    try:
        return Values(_parsed(policy, zip(paths, parts, strict=True)))
    except (ValidationError, ValueError):
        return None


def _parsed(policy: TimeoutPolicy[Any], parts: Iterator[tuple[str, str]]) -> Iterator[tuple[str, Any]]:
    for path, text in parts:
        field = column_at(policy.model, path)
        if not text:
            yield path, None
        elif isinstance(field, DurationField):
            yield path, timedelta(microseconds=int(text))
        else:
            yield path, field.to_python(text)


def terms_of_code(policy: TimeoutPolicy[Any], obj: Any, since_at: datetime) -> str:
    """Return the terms of a deadline that SQL cannot compare. An operator's delay in force does not change them."""
    due_at = policy.declared_due_of(obj, since_at)
    return f"={'' if due_at is None else in_utc(due_at).isoformat()}"


def changed(policy: TimeoutPolicy[Any], stored: str | None, terms: str | None) -> bool:
    """Return whether the data of a pending deadline with the terms `stored` has changed.

    Not if it was set by hand, nor if it was computed by other code.
    """
    begin = prefix(policy) if has_column(policy) else "="
    return stored is not None and stored.startswith(begin) and stored != terms
