"""Render the condition of a policy for people, without running a query."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

from django.db.models import Lookup, Model, Q, QuerySet, Value
from django.db.models.expressions import BaseExpression, CombinedExpression, NegatedExpression
from django.db.models.query import RawQuerySet
from django.db.models.sql import Query
from django.utils.translation import gettext as _


def condition_text(when: Q) -> str:
    """Return `when` as a sentence of Django's lookups, such as `status = 'unpaid' and paid_at = None`.

    A queryset is rendered as the label of its model, and an object as label and key: their own `repr` would run a query
    and print what `__str__` of the objects returns, also to users who may not view them.
    """
    return _condition(when) or _("always")


def _condition(node: Any) -> str:
    if isinstance(node, tuple):
        return f"{node[0]} = {_value(node[1])}"
    if not isinstance(node, Q):
        return _value(node)
    word = {"OR": _("or"), "XOR": _("either, or")}.get(node.connector, _("and"))
    parts = [
        f"({_condition(child)})" if isinstance(child, Q) and len(child) > 1 else _condition(child)
        for child in node.children
    ]
    joined = f" {word} ".join(part for part in parts if part)
    return _("not ({condition})").format(condition=joined) if node.negated and joined else joined


def _value(value: Any) -> str:
    if isinstance(value, Enum | Value):
        value = value.value
    if isinstance(value, QuerySet | RawQuerySet | Query):
        return _("a query of {model}").format(model=value.model._meta.label if value.model else "?")
    if isinstance(value, Model):
        return f"{value._meta.label} {value.pk}"
    if isinstance(value, Q):
        return f"({_condition(value)})"
    if isinstance(value, BaseExpression):
        return _expression(value)
    if isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping):
        return f"[{', '.join(map(_value, value))}]"
    return repr(value)


def _expression(value: BaseExpression) -> str:
    """Return the name of an expression with its parts, whose own `repr` may contain that of a queryset."""
    given = [value.lhs, value.rhs] if isinstance(value, Lookup) else value.get_source_expressions()
    parts = [_value(part) for part in given if part is not None]
    if isinstance(value, NegatedExpression):
        return _("not ({condition})").format(condition=", ".join(parts))
    if isinstance(value, CombinedExpression):
        return f" {value.connector} ".join(parts)
    return f"{type(value).__name__}({', '.join(parts)})" if parts else repr(value)
