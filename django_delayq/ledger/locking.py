"""The order of locks: business row first, then timeout row, everywhere.

Two transactions that lock in opposite orders deadlock, and the database aborts one of them, which may be a payment.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction
from django.db.models import F, Manager, Model, QuerySet, Value

from django_delayq.models import Timeout, TimeoutQuerySet
from django_delayq.sql.dialects import dialect_of
from django_delayq.sql.key_types import array_of, refusal, root_of_key
from django_delayq.sql.statements import CHUNK, Param, Raw, compiled, in_array, selected, sql_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from django.db.models.sql import UpdateQuery


M = TypeVar("M", bound=Model)


@contextmanager
def transaction_of(using: str) -> Iterator[None]:
    """Join the caller's transaction, without a savepoint; outside of one, open one.

    Joining keeps the caller's transaction usable after an error: `atomic(savepoint=False)` would mark it for rollback.
    So an error inside must be raised before anything is written.
    """
    connection = connections[using]
    if connection.in_atomic_block:
        begin_write(using)
        yield
        return
    # Under REPEATABLE READ, PostgreSQL would raise an error where a locked row is newer than the snapshot, and MySQL
    # would mix old and new rows. This library locks the rows that it decides by and needs them as they are then.
    must_commit_reads = dialect_of(connection).repeats_reads(connection) and connection.get_autocommit()
    with transaction.atomic(using=using):
        if must_commit_reads:
            with connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        begin_write(using)
        yield


def read_committed(rows: QuerySet[M], using: str) -> QuerySet[M]:
    """Return `rows` as a locking read where a plain one inside this transaction may show them as they were."""
    connection = connections[using]
    return for_update(rows, using) if dialect_of(connection).plain_reads_may_be_stale(connection) else rows


def is_private(using: str) -> bool:
    """Return whether a read now may show what other transactions do not see: it is not committed, or outdated.

    Not in the transaction of a `TestCase`, in which all of a test runs.
    """
    blocks: list[Any] = connections[using].atomic_blocks
    return not all(block._from_testcase for block in blocks)


def begin_write(using: str) -> None:
    """Make the current transaction a writing one from here on, on SQLite; elsewhere do nothing."""
    connection = connections[using]
    dialect_of(connection).begin_write(connection, Timeout._meta.db_table)


def begin_now(using: str) -> None:
    """Have the driver of PostgreSQL send BEGIN, which it does with the first statement; this one takes no snapshot."""
    with connections[using].cursor() as cursor:
        cursor.execute("SHOW transaction_isolation")


def for_update(rows: QuerySet[M], using: str, *, wait: bool = True) -> QuerySet[M]:
    """Return `rows` as a query that locks them until the transaction ends; `wait=False` leaves out locked ones.

    SKIP LOCKED and not NOWAIT: NOWAIT aborts a PostgreSQL transaction, and MariaDB reports it like a lock wait that
    timed out. On PostgreSQL FOR NO KEY UPDATE, which does not block inserts of child rows.
    """
    features = connections[using].features
    if not features.has_select_for_update:
        return rows
    if not wait and not features.has_select_for_update_skip_locked:
        raise ImproperlyConfigured("The database must support SKIP LOCKED: MySQL 8.0.17 or MariaDB 10.6 at least.")
    return rows.select_for_update(skip_locked=not wait, no_key=features.has_select_for_no_key_update)


def delete_free(rows: QuerySet[Any], using: str) -> None:
    """Delete `rows`, page by page, without those that other transactions have locked."""
    count = CHUNK
    while count == CHUNK:
        with transaction_of(using):
            ids = list(for_update(rows, using, wait=False).values_list("pk", flat=True)[:CHUNK])
            rows.filter(pk__in=ids).delete()
        count = len(ids)


def raising_instead_of_waiting(using: str) -> AbstractContextManager[None]:
    """Let statements of the block raise where they would wait for a lock that SKIP LOCKED cannot see.

    A firing has locked objects. If it waited for a transaction that waits for one of them, the database would abort
    one of the two, which may be a request.
    """
    connection = connections[using]
    return dialect_of(connection).raising_instead_of_waiting(connection)


def lock_objects(model: type[M], pks: Collection[Any], using: str, *, wait: bool = True) -> dict[Any, M]:
    """Lock the business rows `pks` on the writer; return them fresh, by key, in the order of their keys.

    A key that is missing from the answer is gone, or, with `wait=False`, locked by another transaction.
    """
    to_python = root_of_key(model).to_python
    return {to_python(row.pk): row for row in locking_rows(model, pks, using, wait=wait)}


def locking_rows(model: type[M], pks: Collection[Any], using: str, *, wait: bool = True) -> QuerySet[M]:
    """Return a queryset that locks the rows `pks` of `model`, and no others, at the latest when it is evaluated.

    The locking statement finds rows by primary key alone. A condition would lock every row that InnoDB scans.
    PostgreSQL refuses to lock outer joins, groups and distinct rows, and the base manager of a model may add any of
    them. So the rows of a model with a base manager of its own are locked here, and then read through that manager.
    """
    rows = _locking(model, pks, using, wait)
    if not has_own_manager(model):
        return rows
    seen = model._base_manager.using(using).select_related(None).filter(pk__in=[row.pk for row in rows]).order_by("pk")
    return read_committed(seen, using) if wait else seen


def lock_keys(model: type[Model], pks: Collection[Any], using: str, *, wait: bool = True) -> list[Any]:
    """Lock the rows `pks` of `model`, also those that its base manager hides; return the keys of those it has locked.

    `wait=False` leaves out rows that other transactions have locked.
    """
    rows = _locking(model, pks, using, wait)
    # Without waiting, nothing has locked the parents' rows: the statement does, if it reads their columns, too.
    return list(rows.values_list("pk", flat=True)) if wait else [row.pk for row in rows]


def _locking(model: type[M], pks: Collection[Any], using: str, wait: bool) -> QuerySet[M]:
    if wait:
        lock_parents(model, pks, using)
    return for_update(with_keys(rows_of(model, using), pks).order_by("pk"), using, wait=wait)


def with_keys(rows: QuerySet[M], pks: Collection[Any]) -> QuerySet[M]:
    """Return those of `rows` that have the keys `pks`.

    For each value of `pk__in`, Django and the driver take longer than the database. One array has all of them.
    """
    model = rows.model
    if refusal(model) or not dialect_of(connections[rows.db]).key_arrays or not pks:
        return rows.filter(pk__in=pks)  # without a key, Django executes no statement
    array = Value(array_of(model, map(root_of_key(model).to_python, pks)))
    return rows.filter(in_array(model, array, rows.db))


def rows_of(model: type[M], using: str) -> QuerySet[M]:
    """Return the rows of the table of `model`, in no order, whatever its managers and `Meta.ordering` add."""
    return QuerySet(model, using=using).order_by()


def has_own_manager(model: type[Model]) -> bool:
    """Return whether `Meta.base_manager_name` names a manager, which may join, annotate, group, filter and order."""
    return type(model._base_manager) is not Manager


def lock_parents(model: type[Model], pks: Collection[Any], using: str) -> None:
    """Lock the rows of the multi-table children `pks` in their parents' tables, the topmost first, as `save()` does.

    A statement over both tables would lock the child's row first, and deadlock with a transaction that saves it.
    """
    parents = model._meta.all_parents if connections[using].features.has_select_for_update else ()
    for parent in reversed(parents):
        wanted = pks
        if root_of_key(parent) is not root_of_key(model):  # the child has its own key
            name = cast("Any", parent._meta.pk).name
            wanted = list(rows_of(model, using).filter(pk__in=pks).values_list(name, flat=True))
        keys = rows_of(parent, using).filter(pk__in=wanted).order_by("pk").values_list("pk", flat=True)
        list(for_update(keys, using))


def lock_object(model: type[M], pk: Any, using: str) -> M | None:
    """Lock the business row `pk` and return it fresh; None if it does not exist any more."""
    if has_own_manager(model):
        return next(iter(locking_rows(model, [pk], using)), None)
    lock_parents(model, [pk], using)
    return next(iter(_locked.objects(using, model, False, pk=pk)), None)


def lock_row(model: type[Model], pk: Any, using: str) -> None:
    """Lock the business row `pk` without reading it."""
    lock_parents(model, [pk], using)
    _locked.rows(using, model, True, pk=pk)


@compiled
def _locked(using: str, model: type[Model], only_key: bool) -> QuerySet[Any, Any]:
    rows = for_update(rows_of(model, using).filter(pk=Param(cast("Any", model._meta.pk), "pk")), using)
    return rows.values_list("pk") if only_key else rows


def can_lock_and_write(model: type[Model], using: str) -> bool:
    """Return whether `lock_clause` can lock a row of `model` in the statement that writes the ledger.

    Not for multi-table children, whose parents are locked first, and not if the base manager may hide the row. Outside
    a transaction not under REPEATABLE READ, for the reason given in `transaction_of`.
    """
    connection = connections[using]
    dialect = dialect_of(connection)
    return (
        dialect.locks_and_writes_at_once
        and connection.features.can_return_columns_from_insert
        and not has_own_manager(model)
        and not cast("Any", model._meta.concrete_model)._meta.parents
        and (connection.in_atomic_block or not dialect.repeats_reads(connection))
    )


def lock_clause(model: type[Model], using: str, **columns: Any) -> tuple[str, tuple[Any, ...]]:
    """Return a WITH clause that locks the object `pk`, and selects `columns` of it as `locked`; and its parameters."""
    rows = rows_of(model, using).filter(pk=Param(cast("Any", model._meta.pk), "pk")).annotate(**columns)
    sql, parameters = sql_of(rows.values_list("pk", *columns), using)
    connection = connections[using]
    if connection.features.has_select_for_update:  # not by for_update(): outside a transaction Django refuses it
        sql += f" {connection.ops.for_update_sql(no_key=connection.features.has_select_for_no_key_update)}"
    return f"WITH locked AS MATERIALIZED ({sql})", parameters


def locking_update(
    changed: UpdateQuery, model: type[Model] | None, columns: Sequence[str], using: str, since: str | None = None
) -> Raw:
    """Return an UPDATE that locks its object first, unless `model` is None, and returns these columns, or all.

    With the column `since` of the object, it changes only the round of its value.
    """
    sql, parameters = sql_of(changed, using)
    connection, quoted = connections[using], connections[using].ops.quote_name
    table = quoted(Timeout._meta.db_table)
    if model is not None:
        lock, first = lock_clause(model, using, **({"delayq_since": F(since)} if since else {}))
        of_round = f"{table}.{quoted('since_at')} = (SELECT delayq_since FROM locked)"
        condition = of_round if since else "EXISTS (SELECT 1 FROM locked)"
        sql, parameters = f"{lock} {sql} AND {condition}", (*first, *parameters)
    fields: Any = [field for field in Timeout._meta.concrete_fields if not columns or field.name in columns]
    returning = ", ".join(selected(f"{table}.{quoted(field.column)}", field, connection) for field in fields)
    return Raw(f"{sql} RETURNING {returning}", parameters, fields, is_prepared=True)


def lock_in_slot_order(rows: TimeoutQuerySet, using: str) -> list[Timeout]:
    """Wait for `rows` and lock them, in the order of their slots, in which all callers lock several.

    A database that locks what it reads would wait for rows that are none of them. There the rows that are free are
    locked first, without waiting, and then the missing ones, one by one.
    """
    ordered = rows.order_by("slot", "id")
    if not dialect_of(connections[using]).locks_what_it_reads:
        return list(for_update(ordered, using))
    found = {row.pk: row for row in for_update(ordered, using, wait=False)}
    missing = [pk for pk in ordered.values_list("pk", flat=True) if pk not in found]
    waited_for = (for_update(rows.filter(pk=pk), using).first() for pk in missing)
    return [*found.values(), *(row for row in waited_for if row is not None)]
