"""Change many rows page by page: each page locks its objects first, then its rows.

The values of many rows travel as one JSON parameter, which the database unfolds into rows. Through the ORM each row
costs an instance, the preparation of its 24 values and as many placeholders, together several times the work of the
database. JSON is encoded and decoded in C.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from django.db import connections
from django.db.models import Model, Q, QuerySet, TextField

from django_delayq.ledger.locking import (
    lock_in_slot_order,
    lock_keys,
    lock_objects,
    read_committed,
    transaction_of,
    with_keys,
)
from django_delayq.ledger.outbox import push_due
from django_delayq.ledger.planned import begin_each
from django_delayq.ledger.routing import database_of
from django_delayq.ledger.shares import shares_of
from django_delayq.ledger.subjects import kind_of, model_and_pk_of, objects_of, order_matters, root_of
from django_delayq.ledger.traces import current_trace
from django_delayq.models import Timeout
from django_delayq.rounds.columns import DEFAULTS, REPLACED, TIMES
from django_delayq.rounds.memory import clipped
from django_delayq.sql import statements
from django_delayq.sql.dialects import dialect_of
from django_delayq.sql.key_types import pk_of
from django_delayq.sql.statements import Param, Raw, chunks, compiled, param, selected, update
from django_delayq.times import clock

if TYPE_CHECKING:
    from datetime import datetime

    from django.db.models.sql import UpdateQuery

    from django_delayq.policy.policies import TimeoutPolicy

    Rows = Timeout | QuerySet[Timeout] | Iterable[Timeout]

PENDING = Q(slot_taken=1)
OBJECT_COLUMNS = ("policy", "content_type_id", "object_id")
"""The columns that name the object of a row."""
R = TypeVar("R")
_EXPECTED = "Expected timeouts, such as pending_timeouts(...) returns, not {}."


@dataclass(frozen=True)
class Page:
    """Rows and their objects, both locked until the transaction ends; not locked in a dry run."""

    using: str
    ids: Sequence[int]
    """The rows that were asked for."""
    rows: list[Timeout]
    """Those of them that exist, or that are pending if only those were asked for, in the order of their slots."""
    locked: dict[type[Model], dict[Any, Model]] | None
    """The existing objects of `rows` by model and key, if they are locked and the caller asked for them."""


def each_page(
    rows: Rows,
    change: Callable[[Page], R],
    *,
    only: Q = PENDING,
    by_id: str = "",
    dry_run: bool = False,
    columns: Sequence[str] = (),
) -> Iterator[R]:
    """Call `change` for each page of `rows` in a transaction of its own, or in the caller's; yield its results.

    Inside a caller's transaction the locks of all pages add up, so the pages come in lock order, and of each object the
    newest row first. Outside, each transaction ends before its result is yielded, so that the caller may stop between
    two pages.

    Args:
        rows: a `Timeout`, a queryset or an iterable of them. They are read again on the writer.
        change: gets a `Page`, and writes.
        only: the condition that rows of a page fulfil; others are left out.
        by_id: `"pk"` or `"-pk"`: outside a transaction, read the ids of a queryset page by page in this order. A list
            of a million ids is not needed. Rows that are created meanwhile are left out: workers may fire rows of the
            first pages, and their handlers schedule the next rounds, which belong to the queryset, too.
        dry_run: lock nothing and open no transaction.
        columns: those of the rows that `change` reads, if it needs no others and no objects: half of the work is to
            make instances.
    """
    using, pages = _pages(rows, by_id)
    for ids in pages:
        with nullcontext() if dry_run else transaction_of(using):
            result = change(read_page(ids, using, only=only, lock=not dry_run, columns=columns))
        yield result


def read_page(
    ids: Sequence[int], using: str, *, only: Q = PENDING, lock: bool = True, columns: Sequence[str] = ()
) -> Page:
    """Return the rows `ids` and their objects, locked in the order in which all callers lock: objects, then rows.

    The objects are fresh. Call it inside `transaction_of(using)`. The other arguments are those of `each_page`.
    """
    rows: Any = with_keys(Timeout.objects.using(using).filter(only), ids)
    if not lock:
        rows = rows.only(*columns) if columns else rows.defer("payload")
        return Page(using, ids, list(rows.order_by("slot", "id")), None)
    locking: Any = lock_keys if columns else lock_objects
    places = objects_of(rows.values_list(*OBJECT_COLUMNS, named=True), using)
    found = {model: locking(model, pks, using) for model, pks in places}
    read = lock_in_slot_order(rows.only(*columns) if columns else rows, using)
    return Page(using, ids, read, None if columns else found)


def newest_id(using: str) -> int:
    """Return the id of the newest row; 0: there is none."""
    return Timeout.objects.using(using).order_by("-pk").values_list("pk", flat=True).first() or 0


def _pages(rows: Rows, by_id: str) -> tuple[str, Iterator[Sequence[int]]]:
    """Return the writer and pages of ids, in the order of the objects' tables and keys, in which all callers lock them.

    Not in the order of the strings, where 10 comes before 9. Of one object the newest row comes first. A queryset is
    evaluated again, by the writer.
    """
    if isinstance(rows, QuerySet):
        if rows.model is not Timeout:
            raise TypeError(_EXPECTED.format(rows.model.__name__ + " queryset"))
        using = database_of(Timeout, rows)
        found: Any = rows.using(using)
        if not order_matters(rows):
            if by_id and not connections[using].in_atomic_block:
                return using, _pages_by_id(found, by_id, newest_id(using))
            found = found.order_by()
        found = found.values_list(*OBJECT_COLUMNS, "pk", named=True)
    else:
        found = _listed(rows)
        writers = sorted({database_of(Timeout, row) for row in found}) or [database_of(Timeout)]
        if len(writers) > 1:
            raise TypeError(f"The timeouts are in several databases, {', '.join(writers)}. Pass those of one.")
        using = writers[0]
    places = set()
    for row in found:  # a join may repeat one
        model, pk = model_and_pk_of(row, using)
        kind = row.content_type_id if model is None else kind_of(root_of(model), using)
        places.add((kind, pk is None, row.object_id if pk is None else pk, -row.pk))
    return using, chunks([-place[-1] for place in sorted(places)])


def _pages_by_id(rows: QuerySet[Timeout], order: str, newest: int) -> Iterator[Sequence[int]]:
    beyond, last = ("pk__lt", newest + 1) if order == "-pk" else ("pk__gt", 0)
    rows = rows.filter(pk__lte=newest).order_by(order)
    while page := list(rows.filter(**{beyond: last}).values_list("pk", flat=True)[: statements.CHUNK]):
        yield list(dict.fromkeys(page))
        last = page[-1]


def _listed(rows: Any) -> list[Timeout]:
    is_several = isinstance(rows, Iterable) and not isinstance(rows, type | str | Model)
    listed = list(rows) if is_several else [rows]
    for row in listed:
        if not isinstance(row, Timeout):
            raise TypeError(_EXPECTED.format(row.__name__ if isinstance(row, type) else type(row).__name__))
        if row.pk is None:
            raise ValueError("This Timeout is not a row of the ledger.")
    return listed


Round: TypeAlias = "tuple[str, str, datetime | None, datetime, str | None]"
"""A round that begins: `slot`, `object_id`, `since_at`, `due_at`, and with what values its policy has computed it.

None: it was set by hand, as all of one call. A plain tuple, which takes a third of the time.
"""


def insert_rounds(
    policy: TimeoutPolicy[Any],
    rounds: Iterable[Round],
    using: str,
    *,
    key: str = "",
    payload: Any = None,
    reason: str = "",
    replace: bool = False,
) -> int:
    """Insert a pending row for each of `rounds`, one statement a page; return how many. The objects are locked.

    A slot that is taken keeps its row as it is, or with `replace` begins a new round with the new values.
    """
    common = {"policy": policy.label, "content_type_id": kind_of(policy.concrete_model, using), "key": key}
    common |= {"queue": policy.queue, "payload": payload, "reason": clipped(reason), "created_at": clock.now()}
    common["trace"] = current_trace()
    inserts_first = not replace or connections[using].features.supports_update_conflicts_with_target  # not MySQL
    count = 0
    for page in chunks(sorted(rounds, key=itemgetter(0))):
        written: list[tuple[int, datetime]] = []
        for replaces in [False] * inserts_first + [True] * replace:
            if len(written) < len(page):
                written = _write(policy, page, common, using, replace=replaces)
                push_due(((policy.queue, policy.label, *row) for row in written), using, earlier_only=not replaces)
        count += len(written)
    return count


def _write(
    policy: TimeoutPolicy[Any], page: Sequence[Round], common: dict[str, Any], using: str, *, replace: bool = False
) -> list[tuple[int, datetime]]:
    """Insert the rounds whose slots are free, with `replace` all; return id and `run_at` of the rows written.

    The columns of which each row has its own value travel as JSON. If all rows of a page have the same times, these are
    parameters. Without a `run_at`, it is `due_at`.
    """
    connection = connections[using]
    digits = os.urandom(16 * len(page)).hex()  # one call of the system for all
    keys = [digits[start : start + 32] for start in range(0, len(digits), 32)]
    slots, object_ids, since, due, terms = zip(*page, strict=True)
    given: dict[str, Sequence[Any]] = {"slot": slots, "object_id": object_ids, "idempotency_key": keys}
    common = {**common, "terms": terms[0]}
    if len({*terms}) > 1:
        given["terms"] = terms
    if shares := shares_of(policy, object_ids, using):
        given["share"] = [shares.get(object_id, "") for object_id in object_ids]
    shared = len({*since}) == len({*due}) == 1 and not policy.has_plan
    if shared:
        common = {**common, "since_at": since[0], **dict.fromkeys(TIMES, due[0]), "run_at": policy.opening(due[0])}
    else:
        written_as = functools.cache(lambda at: at and str(connection.ops.adapt_datetimefield_value(at)))
        given |= {"since_at": [*map(written_as, since)], "due_at": [*map(written_as, due)]}
        run_at = due
        if policy.has_plan:
            pks = [pk_of(policy.concrete_model, object_id) for object_id in object_ids]
            first = begin_each(policy, list(zip(pks, since, due, strict=True)), common["created_at"], using)
            run_at, given["step"], given["steps_over"] = zip(*first, strict=True)
        if policy.has_plan or policy.within is not None:
            given["run_at"] = [*map(written_as, map(policy.opening, run_at))]
    rows = json.dumps([dict(zip(given, row, strict=True)) for row in zip(*given.values(), strict=True)])
    empty = tuple(name for name in ("payload", "since_at", "terms") if common.get(name, given) is None)
    empty += () if common["trace"] else ("trace",)
    shape = (using, tuple(given), empty, replace)
    if connection.features.supports_update_conflicts_with_target:
        written = _inserted.rows(*shape, rows=rows, **common)
        return [(*row, common["run_at"]) for row in written] if shared else cast("list[tuple[int, datetime]]", written)
    _inserted.execute(*shape, rows=rows, **common)
    found = Timeout.objects.using(using).filter(slot__in=slots, slot_taken=1)
    return list(read_committed(found.filter(idempotency_key__in=keys), using).values_list("id", "run_at"))


@compiled
def _inserted(using: str, given: Sequence[str], empty: Sequence[str], replace: bool) -> Raw:
    connection = connections[using]
    common = ("policy", "content_type_id", "key", "queue", "payload", "reason", "created_at", "since_at", "terms")
    columns: dict[str, Any] = {name: param(name) for name in (*common, "trace", *TIMES)} | {
        name: f"given.{name}" for name in given
    }
    if "terms" not in empty:
        columns["computed_due_at"] = columns["due_at"]
    # As a parameter it would have no type.
    columns |= {name: "''" if name == "trace" else "NULL" for name in empty}
    returning: Sequence[str] = ("id",)
    if "due_at" in given:
        columns |= dict.fromkeys(set(TIMES) - set(given), "given.due_at")
        returning = ("id", "run_at")  # only where they differ, because drivers take long to read datetimes
    if not connection.features.supports_update_conflicts_with_target:  # MariaDB would return kept rows, too
        returning = ()
    types = {name: cast("Any", Timeout._meta.get_field(name)).rel_db_type(connection) for name in given}
    source = f"SELECT {{values}} FROM {dialect_of(connection).rows_of_json(types, 'given')}"
    after = [Param(TextField(), "rows")]
    return insert_statement(using, columns, source, after=after, returning=returning, replace=replace)


def insert_statement(
    using: str,
    columns: Mapping[str, Param | str],
    source: str,
    *,
    common: Mapping[str, Any] | None = None,
    before: tuple[str, Sequence[Any]] = ("", ()),
    after: Sequence[Any] = (),
    returning: Sequence[str] = (),
    replace: bool = False,
) -> Raw:
    """Return an INSERT of new rows that leaves rows alone whose slot is taken, or with `replace` begins new rounds.

    Columns that are not given have their defaults, as a part of the SQL: each parameter takes time in the driver.

    Args:
        using: the database.
        columns: the parameter or the SQL of each column that is given.
        common: values of other columns, which become a part of the SQL, too.
        source: where the values come from, with `{values}` for them.
        before, after: a WITH clause and its parameters, and those at the end of `source`.
        returning: the columns that it returns.
        replace: see above.
    """
    connection = connections[using]
    (lock, first), dialect, quoted = before, dialect_of(connection), connection.ops.quote_name
    every: list[Any] = [field for field in Timeout._meta.concrete_fields if not field.primary_key]
    names = {field.attname: quoted(field.column) for field in every}
    sqls = dict.fromkeys(names, "%s") | {name: sql for name, sql in columns.items() if isinstance(sql, str)}
    values = {**DEFAULTS, "history": "[]", **(common or {}), **columns}
    parameters = [*first, *(values[name] for name, sql in sqls.items() if sql == "%s"), *after]
    source = source.format(values=", ".join(sqls.values()))
    end = dialect.on_conflict_keep
    if replace:
        replaced = [names[name] for name in REPLACED]
        end = dialect.on_conflict([quoted("slot"), quoted("slot_taken")], replaced)
    sql = f"{lock} INSERT INTO {quoted(Timeout._meta.db_table)} ({', '.join(names.values())}) {source} {end}"
    fields: list[Any] = [Timeout._meta.get_field(name) for name in returning]
    returned = ", ".join(selected(quoted(field.column), field, connection) for field in fields)
    return Raw(f"{sql} RETURNING {returned}" if returned else sql, parameters, fields)


def update_each(
    rows: Sequence[Timeout], using: str, states: Sequence[Timeout.State] = (Timeout.State.PENDING,)
) -> None:
    """Write what was changed in `rows`, instances from the ledger, if the row is still in one of `states`.

    Each gets the columns that were changed in one of them. So no event needs a list of what it may change, which could
    lack a column; and what another transaction has written meanwhile into other columns remains.

    PostgreSQL gets one JSON parameter; the others one statement, sent for all rows. Not `bulk_update`: for 500 rows it
    builds thousands of expressions, and takes more time in Python than the database takes to write them.
    """
    pairs = [(vars(row), vars(row)["stored"]) for row in rows]
    names = tuple([name for name in DEFAULTS if any(_differs(name, has, stored) for has, stored in pairs)])
    each = [{name: getattr(row, name) for name in ("id", *names)} for row in rows]
    if not names:
        return
    if len(rows) > 1 and dialect_of(connections[using]).updates_from_rows:
        _updated.execute(using, names, tuple(states), rows=json.dumps(each, default=str))
    else:
        _written.execute_many(using, names, tuple(states), each=each)
    for row in rows:
        row.note_stored()


def _differs(name: str, has: Mapping[str, Any], stored: Mapping[str, Any]) -> bool:
    return name in has and (name not in stored or has[name] != stored[name])


@compiled
def _updated(using: str, names: tuple[str, ...], states: tuple[Timeout.State, ...]) -> Raw:
    connection = connections[using]
    quoted, table = connection.ops.quote_name, connection.ops.quote_name(Timeout._meta.db_table)
    fields: list[Any] = [Timeout._meta.get_field(name) for name in ("id", *names)]
    rows = dialect_of(connection).rows_of_json({each.column: each.rel_db_type(connection) for each in fields}, "given")
    values = ", ".join(f"{quoted(each.column)} = given.{each.column}" for each in fields[1:])
    wanted = ", ".join(f"'{state.value}'" for state in states)
    condition = f"{table}.id = given.id AND {table}.state IN ({wanted})"
    return Raw(f"UPDATE {table} SET {values} FROM {rows} WHERE {condition}", [Param(TextField(), "rows")])


@compiled
def _written(using: str, names: tuple[str, ...], states: tuple[Timeout.State, ...]) -> UpdateQuery:
    rows = Timeout.objects.using(using).filter(pk=param("id"))
    rows = dialect_of(connections[using]).in_states(rows, states)
    return update(rows, **{name: param(name) for name in names})
