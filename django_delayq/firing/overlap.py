"""Monitor the statements of handlers: swallowed database errors, and writes that may concern another member of a group.

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
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from django.db.transaction import TransactionManagementError
from django.db.utils import Error

from django_delayq.firing.leftovers import BEFORE, BrokenTransaction, is_changed
from django_delayq.ledger import settling
from django_delayq.ledger.left_open import transaction_status
from django_delayq.ledger.locking import LOCKING
from django_delayq.ledger.subjects import slots_of_row
from django_delayq.models import Timeout
from django_delayq.policies import TimeoutPolicy
from django_delayq.policy_rules import tables_of_other_rows

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_delayq.arming.later import ArmingLater
    from django_delayq.firing.members import Member

_REPLACES = re.compile(r"O(?:N\s+(?:CONFLICT|DUPLICATE)|R\s+REPLACE)", re.IGNORECASE)
_FLAGS = re.IGNORECASE | re.DOTALL
_ROLLBACK = re.compile(rf"{BEFORE}(?:ROLLBACK|ABORT)\b(?:\s+(?:WORK|TRANSACTION)\b)?(\s+TO\b)?", _FLAGS)
"""The group matches a rollback to a savepoint."""
_COMMIT = re.compile(rf"{BEFORE}(COMMIT|BEGIN|START\s+TRANSACTION|END)\b", _FLAGS)
_IMPLICIT_COMMIT = re.compile(
    rf"{BEFORE}((?:CREATE|DROP)(?!\s+(?:OR\s+REPLACE\s+)?TEMPORARY)|ALTER|ANALYZE|CACHE|CHANGE|CHECK|FLUSH|GRANT|INSTALL"
    r"|LOAD\s+INDEX|LOCK|OPTIMIZE|RENAME|REPAIR|RESET|REVOKE|SET\s+PASSWORD|SET(?!\s+STATEMENT)\b[^'\"]*\bAUTOCOMMIT"
    r"|START|STOP|TRUNCATE|UNINSTALL|UNLOCK)\b",
    _FLAGS,
)
"""What commits where DDL cannot be rolled back. https://dev.mysql.com/doc/refman/8.4/en/implicit-commit.html"""


@dataclass(slots=True, eq=False)
class StatementMonitor:
    """What the handlers of one transaction did to its connection.

    Objects that the handlers of a group have saved are armed before a statement that concerns the ledger.

    Attributes:
        errors: database errors, also those that a handler caught.
        overlaps: a handler wrote, or may have written, the row of another member of the group.
        seconds: the wall time of the statements.
    """

    _connection: BaseDatabaseWrapper
    group: OverlapDetector | None = None
    _later: ArmingLater | None = None
    errors: list[Error] = field(default_factory=list)
    overlaps: bool = False
    seconds: float = 0.0
    _saw_rollback: bool = False
    _is_ended: bool = False

    def __call__(self, execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: Any) -> Any:
        """Execute one statement, as an `execute_wrapper` of Django."""
        # The `str` of a statement that psycopg composes is not its SQL.
        text = sql.as_string(self._connection.connection) if hasattr(sql, "as_string") else str(sql)
        rollback = _ROLLBACK.match(text)
        self._saw_rollback = self._saw_rollback or (rollback is not None and not rollback[1])
        self._refuse_commit(text)
        self._check_open(TransactionManagementError)
        is_arming = self._later is not None and self._later.is_arming
        if self._later and not is_arming and _LEDGER in text:
            self._later.arm()
        if self.group and not self.overlaps and not is_arming:
            self.overlaps = self.group.overlaps(text, params, many)
        began = time.monotonic()
        try:
            result = execute(sql, params, many, context)
            if rollback and rollback[1] and self._later:
                self._later.arm_again()
            return result
        except Error as error:
            self.errors.append(error)
            raise
        finally:
            self.seconds += time.monotonic() - began

    def _refuse_commit(self, sql: str) -> None:
        """Raise BrokenTransaction for a statement that would commit the mark on the row: the handler may fail later."""
        commits = _COMMIT.match(sql)
        if commits is None and not self._connection.features.can_rollback_ddl:
            commits = _IMPLICIT_COMMIT.match(sql)
        if commits:
            raise BrokenTransaction(
                f"{commits[1]} would commit the transaction of the handler before its end: the timeout "
                "would count as fired even if the handler fails after that. Use transaction.on_commit(), or declare "
                "the policy with atomic=False."
            )

    @contextmanager
    def noticing_end(self) -> Iterator[None]:
        """Notice methods of the driver that end the transaction, where its status does not show that: mysqlclient's."""
        names = () if self._connection.features.can_rollback_ddl else ("autocommit", "commit", "rollback")
        driver: Any = self._connection.connection

        def noticed(method: Callable[..., Any]) -> Callable[..., Any]:
            def end(*args: Any) -> Any:
                self._is_ended = True
                return method(*args)

            return end

        for name in names:
            vars(driver)[name] = noticed(getattr(driver, name))
        try:
            yield
        finally:
            for name in names:
                vars(driver).pop(name, None)

    def _check_open(self, kind: type[Exception]) -> None:
        """Raise an error of this kind if the driver, of whose own methods no wrapper knows, has ended the transaction.

        SQLite does that by itself after some errors. What follows would be committed without the mark on the row.
        """
        if self._is_ended or transaction_status(self._connection) == "idle":
            raise kind(
                "The transaction of the handler was committed or rolled back before its end. Use "
                "transaction.on_commit(), or declare the policy with atomic=False."
            )

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
        self._check_open(BrokenTransaction)
        culprit = self.errors[-1] if self.errors else None
        has_failed = self._saw_rollback or transaction_status(connection) == "failed"
        if (culprit or has_failed) and not settling.is_marked(row_id, connection.alias):
            raise BrokenTransaction(
                "The handler caught a database error that had ended the transaction. Put what may fail into an "
                "atomic() block of its own."
            ) from culprit
        self._saw_rollback = False
        self.overlaps = self.overlaps or is_changed(connection)  # the next member would inherit the settings


def _quoted(name: str) -> str:
    """Return a pattern for a quoted name, in the quotes of any database."""
    return rf"[\"`\[]?{re.escape(name)}[\"`\]]?"


def _table(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(name)}(?!\w)", re.IGNORECASE)


_LEDGER = Timeout._meta.db_table
_GIVEN = r"(?:= \(?%s|IN \([%s, ]+\))"
_LEDGER_IDS = re.compile(rf"{_quoted(_LEDGER)}\.{_quoted('id')} {_GIVEN}")
_LEDGER_SLOTS = re.compile(rf"INSERT INTO {_quoted(_LEDGER)}|{_quoted('slot')} {_GIVEN}|{_quoted('id')} = given\.id")
"""What names the rows of the ledger by slots, or by the ids that a statement before has read."""
_LEDGER_OBJECTS = re.compile(rf"{_quoted(_LEDGER)}\.{_quoted('object_id')} {_GIVEN}")


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

    @cached_property
    def _slots(self) -> dict[int, set[str]]:
        """The slots of each member's row. Most handlers never touch the ledger, so they are hashed when one does."""
        return {row.pk: slots_of_row(row) for row in self._rows.values()}

    def overlaps(self, sql: str, params: Any, many: bool) -> bool:
        """Return whether the statement may concern a member other than the one whose handler is running."""
        values = list(params.values()) if isinstance(params, dict) else list(params or ())
        if many:
            values = [value for row in values for value in (row.values() if isinstance(row, dict) else row)]
        if _LEDGER in sql and self._reaches_other_round(sql, values):
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
        slots = set[str]().union(*(self._slots[row.pk] for row in others))
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
