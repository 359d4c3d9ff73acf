"""Write many rows by one statement: their values travel as one JSON parameter, which the database unfolds into rows.

Through the ORM each row costs an instance, the preparation of its 24 values and as many placeholders, together several
times the work of the database. JSON is encoded and decoded in C.
"""

from __future__ import annotations

import functools
import json
import os
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from django.db import connections
from django.db.models import TextField

from django_delayq import clock
from django_delayq.dialects import dialect_of
from django_delayq.ledger.history import clipped
from django_delayq.ledger.locking import as_it_is
from django_delayq.ledger.outbox import push_due
from django_delayq.ledger.paging import chunks
from django_delayq.ledger.statements import Param, Raw, compiled, param, selected, update
from django_delayq.ledger.subjects import kind_of
from django_delayq.models import Timeout

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime

    from django.db.models.sql import UpdateQuery

    from django_delayq.policies import TimeoutPolicy

State = Timeout.State

# The columns that replacing a pending row overwrites. Not `first_due_at` and `extensions`: else a caller that may
# extend a cart three times could keep it indefinitely by replacing its timeout.
ROUND_FIELDS: tuple[str, ...] = ("policy", "queue", "due_at", "run_at", "since_at", "attempts", "payload", "history")
ROUND_FIELDS += ("reason", "created_at", "idempotency_key", "slot", "claims", "claimed_until")
# Columns of which every new row has the same value, as SQL: fewer parameters take less time.
NEW = {
    "state": "'pending'",
    "cause": "''",
    "extensions": "0",
    "attempts": "0",
    "settled_at": "NULL",
    "slot_taken": "1",
    "claims": "0",
    "claimed_until": "NULL",
}
GIVEN = ("slot", "object_id", "idempotency_key", "since_at", "due_at")
"""The columns of which each row has its own value. If all rows of a page have the same times, these are parameters."""
TIMES = ("due_at", "run_at", "first_due_at")
"""The columns that are equal in a new row."""

Round: TypeAlias = "tuple[str, str, datetime | None, datetime]"
"""A round that begins: `slot`, `object_id`, `since_at` and `due_at`. A plain tuple, which takes a third of the time."""


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
    reports_inserted = connections[using].features.supports_update_conflicts_with_target  # not MySQL
    count = 0
    for page in chunks(sorted(rounds)):
        written = []
        if reports_inserted or not replace:
            written = _write(page, common, using)
            push_due(policy.queue, written, using, earlier_only=True)
        if replace and len(written) < len(page):
            written = _write(page, common, using, replace=True)
            push_due(policy.queue, written, using, earlier_only=False)
        count += len(written)
    return count


def _write(
    page: Sequence[Round], common: dict[str, Any], using: str, *, replace: bool = False
) -> list[tuple[int, datetime]]:
    """Insert the rounds whose slots are free, with `replace` all; return id and `run_at` of the rows written."""
    connection = connections[using]
    digits = os.urandom(16 * len(page)).hex()  # one call of the system for all
    keys = [digits[start : start + 32] for start in range(0, len(digits), 32)]
    slots, object_ids, since, due = zip(*page, strict=True)
    given: tuple[Sequence[Any], ...] = (slots, object_ids, keys)
    shared = len({*since}) == len({*due}) == 1
    if shared:
        common = {**common, "since_at": since[0], **dict.fromkeys(TIMES, due[0])}
    else:
        written_as = functools.cache(lambda at: at and str(connection.ops.adapt_datetimefield_value(at)))
        given += [*map(written_as, since)], [*map(written_as, due)]
    rows = json.dumps([dict(zip(GIVEN, row, strict=False)) for row in zip(*given, strict=True)])
    empty = tuple(name for name in ("payload", "since_at") if common.get(name, given) is None)
    shape = (using, GIVEN[: len(given)], empty, replace)
    if connection.features.supports_update_conflicts_with_target:
        written = _inserted.rows(*shape, rows=rows, **common)
        return [(*row, due[0]) for row in written] if shared else cast("list[tuple[int, datetime]]", written)
    _inserted.execute(*shape, rows=rows, **common)
    found = Timeout.objects.using(using).filter(slot__in=slots, slot_taken=1)
    return list(as_it_is(found.filter(idempotency_key__in=keys), using).values_list("id", "run_at"))


@compiled
def _inserted(using: str, given: Sequence[str], empty: Sequence[str], replace: bool) -> Raw:
    connection = connections[using]
    dialect, quoted = dialect_of(connection), connection.ops.quote_name
    fields: dict[str, Any] = {field.name: field for field in Timeout._meta.concrete_fields if not field.primary_key}
    known = NEW | {name: f"given.{name}" for name in given} | {"history": "'[]'", "final_attempt": "false"}
    known |= dict.fromkeys(empty, "NULL")  # among the parameters it would have no type
    if "due_at" in given:
        known |= dict.fromkeys(TIMES, "given.due_at")
    values = ", ".join(known.get(name, "%s") for name in fields)
    columns = ", ".join(quoted(field.column) for field in fields.values())
    rows = dialect.rows_of_json({name: fields[name].cast_db_type(connection) for name in given}, "given")
    unique = [quoted("slot"), quoted("slot_taken")]
    end = (
        dialect.on_conflict(unique, [quoted(fields[name].column) for name in ROUND_FIELDS])
        if replace
        else dialect.on_conflict_keep
    )
    sql = f"INSERT INTO {quoted(Timeout._meta.db_table)} ({columns}) SELECT {values} FROM {rows} {end}"
    parameters = [*(param(name) for name in fields if name not in known), Param(TextField(), "rows")]
    if not connection.features.supports_update_conflicts_with_target:  # MariaDB would return kept rows, too
        return Raw(sql, parameters)
    # Drivers take long to read datetimes: only where they differ.
    returning: Any = [Timeout._meta.get_field(name) for name in ("id", "run_at") if name == "id" or "due_at" in given]
    returned = ", ".join(selected(quoted(field.column), field, connection) for field in returning)
    return Raw(f"{sql} RETURNING {returned}", parameters, returning)


def update_each(
    rows: Sequence[Timeout],
    names: Sequence[str],
    using: str,
    states: Sequence[Timeout.State] = (State.PENDING,),
) -> None:
    """Write the columns `names` of each of `rows`, as the instance has them, if the row is still in one of `states`.

    PostgreSQL gets one JSON parameter; the others one statement, sent for all rows. Not `bulk_update`: for 500 rows it
    builds thousands of expressions, and takes more time in Python than the database takes to write them.
    """
    each = [{name: getattr(row, name) for name in ("id", *names)} for row in rows]
    if len(rows) > 1 and dialect_of(connections[using]).updates_from_rows:
        _updated.execute(using, tuple(names), tuple(states), rows=json.dumps(each, default=str))
    elif rows:
        _written.execute_many(using, tuple(names), tuple(states), each=each)


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
