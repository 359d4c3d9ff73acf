"""What a declaration may say, checked when it is made: a wrong policy must not wait for its first order."""

from __future__ import annotations

import difflib
import inspect
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.core.exceptions import FieldDoesNotExist, FieldError
from django.db.models import DateTimeField, Model, Q
from django.db.models.expressions import Col, Subquery

from django_delayq.exceptions import PolicyError
from django_delayq.key_types import refusal
from django_delayq.retries import Retry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django_delayq.policies import TimeoutPolicy

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*\Z")
MODEL_LABEL = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*\Z")
MAX_LABEL = 200
MAX_BATCH = 10_000


def check_declaration(policy: TimeoutPolicy[Any]) -> None:
    """Refuse with `PolicyError` whatever can be seen to be wrong without the model's fields."""
    for wrong, message in _faults(policy):
        if wrong:
            raise PolicyError(f"Timeout policy {policy.name!r}: {message}")


def _faults(policy: TimeoutPolicy[Any]) -> Iterator[tuple[bool, str]]:
    model, after, since = policy.model, policy.after, policy.since
    yield not callable(policy.handler), "the handler must be a function."
    is_model = isinstance(model, type) and issubclass(model, Model)
    is_label = isinstance(model, str) and MODEL_LABEL.match(model) is not None
    yield not (is_model or is_label), f'the model must be a model class or "app.Model", not {model!r}.'
    yield is_model and model._meta.abstract, f"{model} is abstract and has no table; declare one per concrete model."
    yield not NAME.match(str(policy.name)), "a name has letters, digits, _ and - only, and no digit first; give name=."
    yield (
        not all(isinstance(alias, str) and _is_alias(alias) for alias in policy.aliases),
        'aliases are former names ("name") or labels ("app.model.name").',
    )
    yield any(len(label) > MAX_LABEL for label in policy.labels), f"its label is longer than {MAX_LABEL} characters."
    yield (
        after is not None and not isinstance(after, timedelta) and not callable(after),
        f"after must be a timedelta or a callable, not {after!r}.",
    )
    yield isinstance(after, timedelta) and after < timedelta(0), f"after must not be negative, but is {after}."
    yield (
        since is not None and not isinstance(since, str) and not callable(since),
        f"since must be the name of a field or a callable, not {since!r}.",
    )
    yield any(inspect.iscoroutinefunction(one) for one in (after, since)), "after and since cannot be async."
    yield policy.when is not None and not isinstance(policy.when, Q), f"when must be a Q, not {policy.when!r}."
    yield policy.retry is not None and not isinstance(policy.retry, Retry), "retry must be a Retry."
    yield not _is_count(policy.batch, 1, MAX_BATCH), f"batch must be an int from 1 to {MAX_BATCH}, or None."
    yield policy.batch is not None and not policy.atomic, "batch needs atomic=True: its objects share one transaction."
    yield not _is_count(policy.max_extensions, 0, 32_000), "max_extensions must be an int, 0 or more, or None."
    yield not isinstance(policy.atomic, bool), f"atomic must be True or False, not {policy.atomic!r}."
    yield (
        not isinstance(policy.queue, str) or not policy.queue or len(policy.queue) > 100 or "\0" in policy.queue,
        f"queue must be a text of 1 to 100 characters, not {policy.queue!r}.",
    )


def _is_alias(alias: str) -> bool:
    parts = alias.split(".")
    return len(parts) in {1, 3} and all(NAME.match(part) for part in parts)


def _is_count(value: Any, least: int, most: int) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and least <= value <= most)


def check_against_model(policy: TimeoutPolicy[Any]) -> None:
    """Refuse with `PolicyError` a `since` or `when` that names what the model does not have."""
    model: Any = policy.model
    if isinstance(model, str):
        try:
            model = apps.get_model(model)
        except LookupError as error:
            raise PolicyError(f"Timeout policy {policy.name!r}: there is no model {policy.model!r}.") from error
        object.__setattr__(policy, "model", model)  # frozen for users; this completes the declaration
    if words := refusal(model):
        raise PolicyError(f"Timeout policy {policy.label}: {words}")
    if isinstance(policy.since, str):
        _check_since(policy, policy.since)
    if policy.when is not None:
        try:
            model._base_manager.filter(policy.when)
        except (FieldError, ValueError, TypeError) as error:
            raise PolicyError(f"Timeout policy {policy.label}: when={policy.when} does not fit: {error}") from error


def _check_since(policy: TimeoutPolicy[Any], since: str) -> None:
    dates = [field.name for field in policy.model._meta.concrete_fields if isinstance(field, DateTimeField)]
    try:
        field = policy.model._meta.get_field(since)
    except FieldDoesNotExist:
        field = None
    if not isinstance(field, DateTimeField):
        near = difflib.get_close_matches(since, dates, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"It has: {', '.join(dates) or 'none'}."
        raise PolicyError(
            f"Timeout policy {policy.label}: since={since!r} is no DateTimeField of {policy.model.__name__}. {hint}"
        )


def columns_read(policy: TimeoutPolicy[Any]) -> frozenset[str] | None:
    """The names of the fields that decide over arming; None when that cannot be told from the declaration.

    Callables may read anything, and related rows are other tables: then every save is relevant.
    """
    if callable(policy.since) or callable(policy.after) or reads_other_tables(policy):
        return None
    names: set[str] = {policy.since} if policy.since else set()
    if policy.when is not None:
        where = policy.model._base_manager.filter(policy.when).query.where
        for node in _walk(where):
            if isinstance(node, Col):
                names.update({node.target.name, node.target.attname})
    return frozenset(names)


def reads_other_tables(policy: TimeoutPolicy[Any]) -> bool:
    """Whether `when` depends on rows other than the object's own."""
    if policy.when is None:
        return False
    query = policy.model._base_manager.filter(policy.when).query
    own = {policy.model._meta.db_table, *(parent._meta.db_table for parent in policy.model._meta.all_parents)}
    used = {table.table_name for alias, table in query.alias_map.items() if query.alias_refcount[alias]}
    return not used <= own or any(isinstance(node, Subquery) for node in _walk(query.where))


def _walk(node: Any) -> Iterator[Any]:
    yield node
    children = node.children if hasattr(node, "children") else node.get_source_expressions()
    for child in children:
        if hasattr(child, "get_source_expressions") or hasattr(child, "children"):
            yield from _walk(child)
