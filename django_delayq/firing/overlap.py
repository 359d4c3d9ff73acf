"""Recognize statements of handlers that may concern another member of their group.

All members of a group are read, checked and marked as fired before the first handler runs. So a handler must not

* write another member's object, as an UPDATE of many rows does: that object would be stale, and its `save()` would undo
  the write;
* write rows that the condition of another member reads: it may have stopped holding;
* read or write the timeouts of another member, as bulk functions do: they are not pending any more, although their
  handlers have yet to run.

A group in which one does is rolled back and fired one by one. In doubt a statement counts as overlapping, which only
costs time. Triggers and functions inside the database, and tables that only raw SQL in a condition names, are not
noticed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django_delayq.ledger.locking import LOCKING
from django_delayq.models import Timeout
from django_delayq.policies import TimeoutPolicy
from django_delayq.policy_rules import tables_of_other_rows

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_delayq.firing.members import Member

_REPLACES = re.compile(r"O(?:N\s+(?:CONFLICT|DUPLICATE)|R\s+REPLACE)", re.IGNORECASE)


def _quoted(name: str) -> str:
    """Return a pattern for a quoted name, in the quotes of any database."""
    return rf"[\"`\[]?{re.escape(name)}[\"`\]]?"


def _table(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(name)}(?!\w)", re.IGNORECASE)


LEDGER = Timeout._meta.db_table
_GIVEN = r"(?:= \(?%s|IN \([%s, ]+\))"
_LEDGER_IDS = re.compile(rf"{_quoted(LEDGER)}\.{_quoted('id')} {_GIVEN}")
_LEDGER_SLOTS = re.compile(rf"INSERT INTO {_quoted(LEDGER)}|{_quoted('slot')} {_GIVEN}|{_quoted('id')} = given\.id")
"""What names the rows of the ledger by slots, or by the ids that a statement before has read."""
_LEDGER_OBJECTS = re.compile(rf"{_quoted(LEDGER)}\.{_quoted('object_id')} {_GIVEN}")


class OverlapDetector:
    """Recognize statements of one member's handler that may concern another member of its group.

    Attributes:
        member: the member whose handler is running.
    """

    def __init__(self, policy: TimeoutPolicy[Any], members: Sequence[Member], connection: BaseDatabaseWrapper) -> None:
        self.member = members[0]
        self._connection = connection
        # The tables of which a member's row consists: the policy's model and those that it inherits from.
        concrete = policy.concrete_model
        models = [concrete, *(parent for parent in concrete._meta.all_parents if not parent._meta.proxy)]
        self._keys = {model._meta.db_table: model._meta.pk for model in models}
        self._tables = {table: _table(table) for table in self._keys}
        self._own_key = {
            table: re.compile(rf"(?:^| AND ){_quoted(table)}\.{_quoted(str(key.column))} (?:= %s|IN \(%s\))")
            for table, key in self._keys.items()
        }
        self._read = [_table(name) for name in tables_of_other_rows(policy)]
        self._rows = {member.row.pk: member.row for member in members}

    def overlaps(self, sql: str, params: Any, many: bool) -> bool:
        """Return whether the statement may concern a member other than the one whose handler is running."""
        values = list(params.values()) if isinstance(params, dict) else list(params or ())
        if many:
            values = [value for row in values for value in (row.values() if isinstance(row, dict) else row)]
        if LEDGER in sql and self._reaches_other_round(sql, values):
            return True
        if sql.startswith(LOCKING):
            return False
        verb = sql.lstrip(" (\n\t")[:12].split(" ", 1)[0].upper()
        if verb == "SELECT":
            return False
        # The part of a writing statement that names what it writes; the whole statement where that is unclear.
        ends = {"UPDATE": " SET ", "DELETE": " WHERE ", "INSERT": "("}
        target = sql.partition(ends[verb])[0] if verb in ends else sql
        if any(pattern.search(target) for pattern in self._read):
            return True
        tables = [table for table, pattern in self._tables.items() if pattern.search(target)]
        if not tables or (verb == "INSERT" and not _REPLACES.search(sql)):
            return False
        return not all(self._is_own(table, sql, values, many) for table in tables)

    def _reaches_other_round(self, sql: str, values: Sequence[Any]) -> bool:
        """Return whether the statement, which is on the ledger, may find the row of another member, or miss it."""
        turn = self.member.row
        others = [row for row in self._rows.values() if row is not turn]
        slots = {row.slot for row in others}
        texts = {value for value in values if isinstance(value, str)}
        # The bulk functions pass many slots in one text.
        if slots & texts or any(slot in text for text in texts if text[:1] == "[" for slot in slots):
            return True
        if named := _LEDGER_IDS.search(sql):
            place = sql[: named.start()].count("%s")
            ids = values[place : place + named.group().count("%s")]
            return any(value in self._rows and value != turn.pk for value in ids)
        if _LEDGER_SLOTS.search(sql):
            return False
        return not _LEDGER_OBJECTS.search(sql) or any(row.object_id in texts for row in others)

    def _is_own(self, table: str, sql: str, values: list[Any], many: bool) -> bool:
        """Return whether the statement finds its rows by the key of the member's object, and by nothing wider."""
        before, _, where = sql.rpartition(" WHERE ")
        where = where.removeprefix("(")
        match = self._own_key[table].search(where)
        if many or match is None or " WHERE " in before or " OR " in where or "SELECT" in where:
            return False
        narrowing = where[: match.start()]
        if "NOT " in narrowing:
            return False
        place = before.count("%s") + narrowing.count("%s")
        key = self._keys[table]
        own = key.get_db_prep_value(getattr(self.member.obj, key.attname), self._connection)
        return place < len(values) and bool(values[place] == own)
