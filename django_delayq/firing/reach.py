"""How far a handler's statement reaches: its own object only, or perhaps another one of its group.

All members of a group are read before the first handler runs. A handler that writes another member's row, as
one UPDATE over many rows does, leaves that member's object stale: its own save would then undo the write, and
its condition may have stopped holding. Such a group is undone and fired one by one. In doubt a statement
reaches beyond; that only costs time. Not seen are triggers and functions inside the database.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from django.db import connections

from django_delayq.models import Timeout, slot_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django_delayq.firing.taking import Member
    from django_delayq.policies import TimeoutPolicy

_READS = frozenset({"SELECT", "SAVEPOINT", "RELEASE", "ROLLBACK", "SET", "EXPLAIN", "SHOW", "PRAGMA"})
_REPLACES = ("ON CONFLICT", "ON DUPLICATE")


def _quoted(name: str) -> str:
    """A quoted name in a regular expression, however the database quotes."""
    return rf"[\"`\[]?{re.escape(name)}[\"`\]]?"


_LEDGER_IDS = re.compile(rf"{_quoted(Timeout._meta.db_table)}\.{_quoted('id')} (?:= %s|IN \([%s, ]+\))")


class Reach:
    """The tables of the members, and who of them has the turn."""

    def __init__(self, policy: TimeoutPolicy[Any], members: Sequence[Member], using: str) -> None:
        self._connection = connections[using]
        self._keys = {model._meta.db_table: model._meta.pk for model in _tables(policy)}
        self._tables = {table: re.compile(rf"(?<!\w){re.escape(table)}(?!\w)") for table in self._keys}
        self._own_key = {
            table: re.compile(rf"(?:^| AND ){_quoted(table)}\.{_quoted(str(key.column))} (?:= %s|IN \(%s\))")
            for table, key in self._keys.items()
        }
        self._slots = {member.row.pk: _slots(policy, member.row) for member in members}
        self._all_slots: set[str] = set().union(*self._slots.values())
        self._member = members[0]

    def turn_of(self, member: Member) -> None:
        """From here on the statements are those of `member`."""
        self._member = member

    def goes_beyond(self, sql: str, params: Any, many: bool) -> bool:
        """Whether this statement may concern another member than the one whose turn it is."""
        values = list(params.values()) if isinstance(params, dict) else list(params or ())
        if many:
            values = [value for row in values for value in (row.values() if isinstance(row, dict) else row)]
        if self._names_other_slot(values):
            return True  # what the ledger says of it is "fired", although its handler has yet to run
        verb = sql.lstrip(" (\n\t")[:12].split(" ", 1)[0].upper()
        if verb in _READS or (verb == "INSERT" and not any(words in sql for words in _REPLACES)):
            return False
        target = _target(verb, sql)
        if Timeout._meta.db_table in target and self._names_other_row(sql, values):
            return True
        return any(
            pattern.search(target) and not self._is_own(table, sql, values, many)
            for table, pattern in self._tables.items()
        )

    def _names_other_slot(self, values: list[Any]) -> bool:
        own = self._slots[self._member.row.pk]
        return any(value in self._all_slots and value not in own for value in values if isinstance(value, str))

    def _names_other_row(self, sql: str, values: list[Any]) -> bool:
        named = _LEDGER_IDS.search(sql)
        if named is None:
            return False
        place = sql[: named.start()].count("%s")
        ids = values[place : place + named.group().count("%s")]
        return any(value in self._slots and value != self._member.row.pk for value in ids)

    def _is_own(self, table: str, sql: str, values: list[Any], many: bool) -> bool:
        """Whether the statement finds its rows by the key of the member's object and nothing wider."""
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
        own = key.get_db_prep_value(getattr(self._member.obj, key.attname), self._connection)
        return place < len(values) and bool(values[place] == own)


def _target(verb: str, sql: str) -> str:
    """The part of a writing statement that names what it writes; all of it where that is hard to tell."""
    ends = {"UPDATE": " SET ", "DELETE": " WHERE ", "INSERT": "("}
    return sql.partition(ends[verb])[0] if verb in ends else sql


def _tables(policy: TimeoutPolicy[Any]) -> list[Any]:
    """The models whose tables a member's row consists of: the policy's, and those it inherits from."""
    concrete = policy.concrete_model
    return [concrete, *(parent for parent in concrete._meta.all_parents if not parent._meta.proxy)]


def _slots(policy: TimeoutPolicy[Any], row: Timeout) -> set[str]:
    return {slot_of(label, row.content_type_id, row.object_id, row.key) for label in policy.labels} | {row.slot}
