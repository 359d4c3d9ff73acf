"""Look: what each policy's `when` and `since` say of a row now, and what the ledger has for it, in one query.

The query for one row is compiled once per model and database: through the ORM it would cost more than ten
times the CPU on every save.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from django.contrib.contenttypes.models import ContentType
from django.db import connections
from django.db.models import Case, Exists, F, IntegerField, OuterRef, Q, Subquery, Value, When
from django.db.models.fields import BigIntegerField, DateTimeField

from django_delayq.key_types import key_type
from django_delayq.ledger.controls import delay_in_force
from django_delayq.ledger.locking import as_it_is, for_update, has_own_manager, lock_parents, may_read_stale, rows_of
from django_delayq.ledger.subjects import object_id
from django_delayq.models import Timeout
from django_delayq.policies import registry
from django_delayq.policy_rules import reads_other_rows

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from datetime import datetime, timedelta

    from django.db.models import Model, QuerySet

    from django_delayq.policies import TimeoutPolicy

State, Cause = Timeout.State, Timeout.Cause
# These close the round of their `since` value: it is not armed again. So does a skip that the handler asked for:
# armed anew it would be due at once, and the handler would be asked for ever.
CLOSING = (
    Q(state__in=(State.FIRED, State.DEAD, State.FIRING))
    | Q(state=State.CANCELLED, cause=Cause.HAND)
    | Q(state=State.SKIPPED, cause=Cause.HANDLER)
)
COLUMNS = 6


@dataclass(frozen=True, slots=True)
class Observed:
    """What holds for one object and policy, read in one locked look."""

    pk: Any
    policy: TimeoutPolicy[Any]
    holds: bool
    since_at: datetime | None
    pending_id: int | None
    pending_since: datetime | None
    closed: bool | None
    """Whether the round of `since_at` is closed; None: not known yet (a `since` that SQL cannot read)."""
    after: timedelta | None = None
    """The delay that an operator has put in force; None: the declared one."""


def observations(model: type[Model], policies: Sequence[TimeoutPolicy[Any]], using: str) -> QuerySet[Any, Any]:
    """Return a query over the table of `model`: the key, then `COLUMNS` per policy, as `read` expects them.

    It joins nothing but parents' tables, whatever the managers of `model` do, so that it can be locked. Inside a
    transaction that may read stale rows, MySQL is made to read the ledger as it is now.
    """
    content_type = ContentType.objects.db_manager(using).get_for_model(model)
    key = model._meta.pk
    assert key is not None
    own_id = object_id(OuterRef(key.name), model, using)
    columns: dict[str, Any] = {}
    for number, policy in enumerate(policies):
        since = F(policy.since) if isinstance(policy.since, str) else None
        rows = as_it_is(Timeout.objects.using(using), using).filter(
            content_type=content_type.pk, object_id=own_id, policy__in=policy.labels, key=""
        )
        pending = rows.filter(slot_taken=1).order_by("-id")
        columns[f"delayq{number}_holds"] = _holds(policy, using)
        columns[f"delayq{number}_since"] = since or Value(None, output_field=DateTimeField())
        columns[f"delayq{number}_pending"] = Subquery(pending.values("id")[:1], output_field=BigIntegerField())
        columns[f"delayq{number}_round"] = Subquery(pending.values("since_at")[:1], output_field=DateTimeField())
        columns[f"delayq{number}_closed"] = (
            Exists(rows.filter(CLOSING, since_at=OuterRef(policy.since)))
            if isinstance(policy.since, str)
            else Value(None, output_field=IntegerField())
        )
        columns[f"delayq{number}_after"] = delay_in_force(policy, using)
    return cast("QuerySet[Any, Any]", rows_of(model, using).annotate(**columns).values_list("pk", *columns))


def _holds(policy: TimeoutPolicy[Any], using: str) -> Any:
    """Return `when` as 1 or 0; NULL is 0.

    What reads other rows, or may read what the policy's base manager adds, is a query of its own: PostgreSQL locks
    neither the nullable side of a join nor groups. A row that the base manager hides does not match.
    """
    when = policy.when
    if has_own_manager(policy.model) or reads_other_rows(policy):
        rows = policy.model._base_manager.using(using).filter(pk=OuterRef("pk"))
        when = Q(Exists(rows.filter(when) if when else rows))
    elif not when:
        return Value(1, output_field=IntegerField())
    return Case(When(when, then=Value(1)), default=Value(0), output_field=IntegerField())


def read(row: Sequence[Any], policies: Sequence[TimeoutPolicy[Any]]) -> list[Observed]:
    """The row of `observations` as one `Observed` per policy."""
    pk, rest = row[0], row[1:]
    seen = []
    for number, policy in enumerate(policies):
        holds, since_at, pending, pending_since, closed, after = rest[COLUMNS * number : COLUMNS * (number + 1)]
        known = None if closed is None else bool(closed)
        seen.append(Observed(pk, policy, bool(holds), since_at, pending, pending_since, known, after))
    return seen


def observe_one(model: type[Model], policies: Sequence[TimeoutPolicy[Any]], pk: Any, using: str) -> list[Observed]:
    """What holds for the row `pk`, which stays locked until the end of the transaction; [] if it is gone."""
    connection = connections[using]
    sql, params, converters = _compiled(model, policies, using)
    key: Any = model._meta.pk
    lock_parents(model, [pk], using)
    with connection.cursor() as cursor:
        cursor.execute(sql, [*params, key.get_db_prep_value(pk, connection)])
        row = cursor.fetchone()
    if row is None:
        return []
    values = list(row)
    for position, (functions, expression) in converters:
        for convert in functions:
            values[position] = convert(values[position], expression, connection)
    return read(values, policies)


def observe_many(
    model: type[Model], policies: Sequence[TimeoutPolicy[Any]], pks: Collection[Any], using: str
) -> list[Observed]:
    """What holds for the rows `pks`, which the caller has locked.

    A statement after the one that locked: it sees what was committed while the lock was waited for.
    """
    rows = as_it_is(observations(model, policies, using), using).filter(pk__in=pks).order_by("pk")
    return [seen for row in rows for seen in read(row, policies)]


def condition_holds(policy: TimeoutPolicy[Any], pk: Any, using: str) -> bool:
    """Whether `when` holds on the row `pk` as this transaction sees it; a row that is gone: no."""
    rows = policy.model._base_manager.using(using).filter(pk=pk)
    return bool(as_it_is(rows.filter(policy.when) if policy.when else rows, using).values_list("pk")[:1])


MAX_COMPILED = 500
_CACHE: dict[tuple[Any, ...], tuple[str, list[Any], list[Any]]] = {}


def _compiled(
    model: type[Model], policies: Sequence[TimeoutPolicy[Any]], using: str
) -> tuple[str, list[Any], list[Any]]:
    """SQL, all its parameters but the last (the key), and converters; made anew when policies come or go.

    The content type's id is part of the cache's key, as tests make content types anew.
    """
    content_type = ContentType.objects.db_manager(using).get_for_model(model)
    stale = may_read_stale(using)
    name = (registry.version, model, using, stale, content_type.pk, tuple(id(policy) for policy in policies))
    found = _CACHE.get(name)
    if found is None:
        query = for_update(observations(model, policies, using).filter(pk=key_type(model).sample), using).query
        compiler = query.get_compiler(using)
        sql, params = compiler.as_sql()
        expressions = [column[0] for column in compiler.select[: compiler.col_count]]
        converters = list(compiler.get_converters(expressions).items())
        if len(_CACHE) >= MAX_COMPILED:
            _CACHE.clear()
        found = _CACHE[name] = (sql, list(params[:-1]), converters)
    return found
