"""Monitor the statements of handlers: swallowed database errors, and writes that may concern another member of a group.

All members of a group are read before the first handler runs. A handler that writes another member's row, as an UPDATE
of many rows does, leaves that member's object stale: its own `save()` would undo the write, and its condition may have
stopped holding. Such a group is rolled back and fired one by one. In doubt a statement counts as overlapping, which
only costs time. Triggers and functions inside the database are not noticed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from django.db.utils import Error

from django_delayq.ledger import settling
from django_delayq.ledger.locking import LOCKING
from django_delayq.models import Timeout, slot_of
from django_delayq.policies import TimeoutPolicy

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_delayq.arming.receivers import ArmingLater
    from django_delayq.firing.members import Member

_READS = frozenset({"SELECT", "SAVEPOINT", "RELEASE", "ROLLBACK", "SET", "EXPLAIN", "SHOW", "PRAGMA"})
_REPLACES = ("ON CONFLICT", "ON DUPLICATE")


class BrokenTransaction(RuntimeError):
    """A handler returned normally, but its transaction cannot be committed."""


class StatementMonitor:
    """What the handlers of one transaction did to its connection.

    Objects that the handlers of a group have saved are armed before a statement that concerns the ledger.

    Attributes:
        errors: database errors, also those that a handler caught.
        overlaps: a handler wrote, or may have written, the row of another member of the group.
        seconds: the wall time of the statements.
    """

    def __init__(
        self,
        connection: BaseDatabaseWrapper,
        group: OverlapDetector | None = None,
        later: ArmingLater | None = None,
    ) -> None:
        self.errors: list[Error] = []
        self.overlaps = False
        self.seconds = 0.0
        self.group = group
        self._later = later
        self._connection = connection
        self._saw_rollback = False

    def __call__(self, execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: Any) -> Any:
        """Execute one statement, as an `execute_wrapper` of Django."""
        text = sql if isinstance(sql, str) else str(sql)
        if text[:8].upper() == "ROLLBACK" and " TO " not in text[:14].upper():
            self._saw_rollback = True
        is_arming = self._later is not None and self._later.is_arming
        if self._later and not is_arming and Timeout._meta.db_table in text:
            self._later.arm()
        if self.group and not self.overlaps and not is_arming:
            self.overlaps = self.group.overlaps(text, params, many)
        began = time.monotonic()
        try:
            return execute(sql, params, many, context)
        except Error as error:
            self.errors.append(error)
            raise
        finally:
            self.seconds += time.monotonic() - began

    def check_unbroken(self, row_id: int) -> None:
        """Check that the work of the handler can be committed; raise BrokenTransaction if not.

        Without this check Django would roll back silently at the end, and PostgreSQL answers the COMMIT of a failed
        transaction with a rollback: the row would count as fired although nothing was done.
        """
        connection: Any = self._connection
        if connection.closed_in_transaction or connection.connection is None:
            raise BrokenTransaction("The handler closed the database connection, and its work is lost.")
        if connection.needs_rollback:
            raise BrokenTransaction(
                "The handler marked the transaction for rollback: by set_rollback(True), or by catching a database "
                "error outside an atomic() block of its own."
            )
        culprit = self.errors[-1] if self.errors else None
        if (culprit or self._saw_rollback) and not self._is_fired(row_id):
            raise BrokenTransaction(
                "The handler caught a database error that had ended the transaction. Put what may fail into an "
                "atomic() block of its own."
            ) from culprit
        self._saw_rollback = False

    def _is_fired(self, row_id: int) -> bool:
        """Return whether the transaction still works and still contains the mark on the row."""
        try:
            return settling.is_marked(row_id, self._connection.alias)
        except Error:
            return False


def _quoted(name: str) -> str:
    """Return a pattern for a quoted name, in the quotes of any database."""
    return rf"[\"`\[]?{re.escape(name)}[\"`\]]?"


_LEDGER_IDS = re.compile(rf"{_quoted(Timeout._meta.db_table)}\.{_quoted('id')} (?:= %s|IN \([%s, ]+\))")


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
        self._tables = {table: re.compile(rf"(?<!\w){re.escape(table)}(?!\w)") for table in self._keys}
        self._own_key = {
            table: re.compile(rf"(?:^| AND ){_quoted(table)}\.{_quoted(str(key.column))} (?:= %s|IN \(%s\))")
            for table, key in self._keys.items()
        }
        self._slots = {member.row.pk: _slots(policy, member.row) for member in members}
        self._all_slots: set[str] = set().union(*self._slots.values())

    def overlaps(self, sql: str, params: Any, many: bool) -> bool:
        """Return whether the statement may concern a member other than the one whose handler is running."""
        values = list(params.values()) if isinstance(params, dict) else list(params or ())
        if many:
            values = [value for row in values for value in (row.values() if isinstance(row, dict) else row)]
        if self._names_other_slot(values):
            return True  # its row is "fired" in this transaction, although its handler has yet to run
        if sql.startswith(LOCKING):
            return False
        verb = sql.lstrip(" (\n\t")[:12].split(" ", 1)[0].upper()
        if verb in _READS or (verb == "INSERT" and not any(words in sql for words in _REPLACES)):
            return False
        # The part of a writing statement that names what it writes; the whole statement where that is unclear.
        ends = {"UPDATE": " SET ", "DELETE": " WHERE ", "INSERT": "("}
        target = sql.partition(ends[verb])[0] if verb in ends else sql
        if Timeout._meta.db_table in target and self._names_other_row(sql, values):
            return True
        return any(
            pattern.search(target) and not self._is_own(table, sql, values, many)
            for table, pattern in self._tables.items()
        )

    def _names_other_slot(self, values: list[Any]) -> bool:
        own = self._slots[self.member.row.pk]
        return any(value in self._all_slots and value not in own for value in values if isinstance(value, str))

    def _names_other_row(self, sql: str, values: list[Any]) -> bool:
        named = _LEDGER_IDS.search(sql)
        if named is None:
            return False
        place = sql[: named.start()].count("%s")
        ids = values[place : place + named.group().count("%s")]
        return any(value in self._slots and value != self.member.row.pk for value in ids)

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


def _slots(policy: TimeoutPolicy[Any], row: Timeout) -> set[str]:
    others = [label for label in policy.labels if label != row.policy]
    return {row.slot, *(slot_of(label, row.content_type_id, row.object_id, row.key) for label in others)}
