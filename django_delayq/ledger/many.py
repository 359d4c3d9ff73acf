"""Write many rows by one statement: their values travel as one JSON parameter, which the database unfolds into rows.

Through the ORM each row costs an instance, the preparation of its 24 values and as many placeholders, together several
times the work of the database. JSON is encoded and decoded in C.
"""

from __future__ import annotations

import functools
import json
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db import connections

from django_delayq import clock
from django_delayq.dialects import dialect_of
from django_delayq.ledger.history import clipped
from django_delayq.ledger.locking import as_it_is
from django_delayq.ledger.outbox import push_due
from django_delayq.ledger.paging import chunks
from django_delayq.ledger.subjects import kind_of
from django_delayq.ledger.writing import ROUND_FIELDS
from django_delayq.models import Timeout

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime

    from django_delayq.policies import TimeoutPolicy

SLOT = ("slot", "slot_taken")
"""The columns of the unique index that allows one pending row for each slot."""


class Round(NamedTuple):
    """A round that begins: the values that differ between the rows of one call."""

    slot: str
    object_id: str
    since_at: datetime | None
    due_at: datetime


def insert_rounds(
    policy: TimeoutPolicy[Any],
    rounds: Iterable[Round],
    using: str,
    *,
    key: str = "",
    payload: Any = None,
    reason: str = "",
    replace: bool = False,
) -> None:
    """Insert a pending row for each of `rounds`, one statement a page. The objects are locked.

    A slot that was taken keeps its row as it is, or with `replace` begins a new round with the new values.
    """
    common = {"policy": policy.label, "content_type_id": kind_of(policy.concrete_model, using), "key": key}
    common |= {"queue": policy.queue, "state": "pending", "cause": "", "extensions": 0, "attempts": 0}
    common |= {"payload": payload, "history": [], "reason": clipped(reason), "created_at": clock.now()}
    common |= {"settled_at": None, "slot_taken": 1, "final_attempt": False, "claims": 0, "claimed_until": None}
    overwritten = ROUND_FIELDS if replace else ("slot",)
    for page in chunks(sorted(rounds)):
        keys = os.urandom(16 * len(page)).hex()  # one call of the system for all
        rows = [
            {
                "slot": slot,
                "object_id": object_id,
                "since_at": since_at,
                "due_at": due_at,
                "run_at": due_at,
                "first_due_at": due_at,
                "idempotency_key": keys[32 * number : 32 * number + 32],
            }
            for number, (slot, object_id, since_at, due_at) in enumerate(page)
        ]
        due = {each.slot: each.due_at for each in page}
        written = upsert(rows, common, overwritten, using)
        push_due(policy.queue, ((row_id, due[slot]) for slot, row_id in written), using, earlier_only=not replace)


def upsert(
    rows: Sequence[Mapping[str, Any]], common: Mapping[str, Any], update: Sequence[str], using: str
) -> list[tuple[str, int]]:
    """Insert `rows` with the values that they have in `common`; return the slots and ids of the rows in their slots.

    Args:
        rows: each with the same columns, among them `slot`; for strings, numbers and datetimes.
        common: the values of the other columns, by the names of the model's attributes.
        update: the columns that are written over a row whose slot is taken.
        using: the database.
    """
    connection = connections[using]
    fields = {field.attname: field for field in Timeout._meta.concrete_fields}
    fixed = {name: fields[name].get_db_prep_save(value, connection) for name, value in common.items()}
    # A NULL among the parameters would have no type.
    absent = tuple(name for name, value in fixed.items() if value is None)
    sql = _upsert_statement(tuple(rows[0]), tuple(common), absent, tuple(update), using)
    values = [value for value in fixed.values() if value is not None]
    with connection.cursor() as cursor:
        cursor.execute(sql, [*values, _as_json(rows, fields, connection)])
        if connection.features.can_return_rows_from_bulk_insert:
            return list(cursor.fetchall())
    slots = [row["slot"] for row in rows]  # MySQL returns nothing
    taken = as_it_is(Timeout.objects.using(using).filter(slot__in=slots, slot_taken=1), using)
    return list(taken.values_list("slot", "id"))


def _as_json(rows: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], connection: Any) -> str:
    """Return `rows` as JSON, with datetimes as the database writes them."""
    adapted = functools.cache(connection.ops.adapt_datetimefield_value)
    return json.dumps(rows, default=lambda moment: str(adapted(moment)))


@functools.cache
def _upsert_statement(
    given: tuple[str, ...], common: tuple[str, ...], absent: tuple[str, ...], update: tuple[str, ...], using: str
) -> str:
    """Return the statement that inserts rows with the columns `given` from JSON, and the columns `common` alike."""
    connection = connections[using]
    dialect, quoted = dialect_of(connection), connection.ops.quote_name
    fields: dict[str, Any] = {field.attname: field for field in Timeout._meta.concrete_fields}
    columns = ", ".join(quoted(fields[name].column) for name in (*common, *given))
    values = ", ".join("NULL" if name in absent else "%s" for name in common)
    rows = dialect.rows_of_json({name: fields[name].cast_db_type(connection) for name in given}, "given")
    names = ", ".join(f"given.{name}" for name in given)
    conflict = dialect.on_conflict([quoted(name) for name in SLOT], [quoted(fields[name].column) for name in update])
    sql = f"INSERT INTO {quoted(Timeout._meta.db_table)} ({columns}) SELECT {values}, {names} FROM {rows} {conflict}"
    if connection.features.can_return_rows_from_bulk_insert:
        sql += f" RETURNING {quoted('slot')}, {quoted('id')}"
    return sql
