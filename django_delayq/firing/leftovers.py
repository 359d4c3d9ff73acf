"""Undo what user code leaves behind in its thread, before it reaches other timeouts.

A worker keeps its threads and their connections. If a handler ends with autocommit off, in an open transaction or in
an `atomic()` block, the transactions of later firings would commit nothing, without an error. If it changes a setting
of the session, such as the time zone or the search path, later firings would read other times or tables.

So all user code runs in a `SessionCheck`: handlers, callbacks and signal receivers. It compares every connection of the
thread before and after, without a query, and sees the statements between. A connection that was left otherwise is
closed. Context variables, and with them the language and the time zone of Django, end with the code that set them.

A `StatementMonitor` ensures that the transaction of a firing commits all of the work of its handlers or nothing.
"""

from __future__ import annotations

import contextvars
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from django.db import connections
from django.db.transaction import TransactionManagementError
from django.db.utils import Error

from django_delayq.firing.state import firing_state
from django_delayq.ledger.left_open import reset, session_state, transaction_status
from django_delayq.sql.dialects import dialect_of

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

logger = logging.getLogger("django_delayq.firing")

BEFORE = r"(?:\s|/\*.*?\*/|--[^\n]*\n)*+"
"""White space and comments. Possessive: otherwise each comment more would double the time of a statement."""
_BEFORE = re.compile(BEFORE, re.DOTALL)
_FLAGS = re.IGNORECASE | re.DOTALL
_ROLLBACK = re.compile(rf"{BEFORE}(?:ROLLBACK|ABORT)\b(?:\s+(?:WORK|TRANSACTION)\b)?(\s+TO\b)?", _FLAGS)
"""The group matches a rollback to a savepoint."""
_COMMIT = re.compile(rf"{BEFORE}(COMMIT|BEGIN|START\s+TRANSACTION|END)\b", _FLAGS)
_WRITE = re.compile(rf"{BEFORE}(?:INSERT|UPDATE|DELETE|REPLACE|MERGE)\b", _FLAGS)
_IMPLICIT_COMMIT = re.compile(
    rf"{BEFORE}((?:CREATE|DROP)(?!\s+(?:OR\s+REPLACE\s+)?TEMPORARY)|ALTER|ANALYZE|CACHE|CHANGE|CHECK|FLUSH|GRANT|INSTALL"
    r"|LOAD\s+INDEX|LOCK|OPTIMIZE|RENAME|REPAIR|RESET|REVOKE|SET\s+PASSWORD|SET(?!\s+STATEMENT)\b[^'\"]*\bAUTOCOMMIT"
    r"|START|STOP|TRUNCATE|UNINSTALL|UNLOCK)\b",
    _FLAGS,
)
"""What commits where DDL cannot be rolled back. https://dev.mysql.com/doc/refman/8.4/en/implicit-commit.html"""
_BEGIN_OR_END = re.compile(r"(BEGIN|START\s+TRANSACTION|XA\s+(?:START|BEGIN))\b|(?:COMMIT|ROLLBACK)\b", re.IGNORECASE)


class BrokenTransaction(RuntimeError):
    """A handler returned normally, but its transaction cannot be committed."""


@dataclass(slots=True)
class Leftovers:
    """What user code has left behind, as phrases such as "left a transaction open on database 'default'"."""

    lost: list[str] = field(default_factory=list)
    """Transactions that nothing will commit: what was written in them is rolled back."""
    changed: list[str] = field(default_factory=list)
    """Settings of sessions, which are ended with the connection."""

    def log(self, whose: str, policy: str) -> None:
        """Log the leftovers: lost writes each time, settings once a minute for each policy."""
        if self.lost:
            words = "%s %s: what it wrote there and did not commit is rolled back."
            logger.error(words, whose, " and ".join(self.lost), extra={"event": "connection_left", "policy": policy})
        elif self.changed and firing_state.is_time_to_log(("changed", policy)):
            words = "%s %s. The connection is closed, so that later timeouts do not inherit that."
            changed = " and ".join(self.changed)
            logger.warning(words, whose, changed, extra={"event": "session_changed", "policy": policy})


class _Before:
    """A connection as it was before the user code."""

    __slots__ = ("blocks", "connection", "driver", "savepoints", "session", "wrappers")

    def __init__(self, connection: Any) -> None:
        self.connection, self.driver = connection, connection.connection
        self.session = () if self.driver is None else session_state(connection)
        self.savepoints, self.blocks = [*connection.savepoint_ids], [*connection.atomic_blocks]
        self.wrappers = [*connection.execute_wrappers]

    @property
    def has_other_settings(self) -> bool:
        """Whether the driver now has other settings. A new connection has those that Django gives it."""
        is_same = self.connection.connection is self.driver and bool(self.session)
        return is_same and session_state(self.connection) not in (self.session, ())


class SessionCheck:
    """Run user code of this thread, and end what it leaves behind on the connections. Make one for each call."""

    __slots__ = ("_before", "_begun", "_changed", "_inside", "context")

    def __init__(self) -> None:
        self._before = [_Before(connection) for connection in connections.all()]
        self._inside = {each.connection.alias for each in self._before if each.connection.in_atomic_block}
        self._changed: dict[str, str] = {}
        self._begun: set[str] = set()
        self.context = contextvars.copy_context()

    def run(self, act: Callable[[], object]) -> None:
        """Call `act`, with a copy of the context of this thread. What it raises passes."""
        for each in self._before:
            each.connection.execute_wrappers.append(self)
        try:
            self.context.run(act)
        finally:
            for each in self._before:
                each.connection.execute_wrappers[:] = each.wrappers

    def __call__(self, execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: Any) -> Any:
        """Execute one statement, as an `execute_wrapper` of Django, and note whether it outlives the transaction."""
        connection = context["connection"]
        # The `str` of a statement that psycopg composes is not its SQL.
        text = sql.as_string(connection.connection) if hasattr(sql, "as_string") else str(sql)
        before = _BEFORE.match(text)
        begin = before.end() if before else 0
        if dialect_of(connection).changes_session(text, begin):
            self._changed[connection.alias] = " ".join(text[begin:].partition("=")[0].split()[:3])
        if transaction := _BEGIN_OR_END.match(text, begin):
            (self._begun.add if transaction[1] else self._begun.discard)(connection.alias)
        return execute(sql, params, many, context)

    def end(self) -> Leftovers:
        """Return the leftovers. All are undone, except settings of a session whose transaction continues."""
        found = Leftovers()
        for before in self._before:
            connection, alias = before.connection, before.connection.alias
            if (other := connections[alias]) is not connection:
                connections[alias] = connection
                reset(other)
                found.lost.append(f"replaced the connection to database {alias!r}")
            if alias in self._inside:
                self._end_inside(before, found)
            elif connection.connection is not None:
                self._end_outside(before, found)
        return found

    def _end_inside(self, before: _Before, found: Leftovers) -> None:
        """Return to the `atomic()` blocks in which the user code was called. What others wrote in them stays."""
        connection, alias = before.connection, before.connection.alias
        if connection.closed_in_transaction or connection.connection is None:
            return  # there is nothing to return to, and the commit is refused
        if connection.connection is not before.driver:
            found.lost.append(f"opened another connection to database {alias!r} inside a transaction")
            if getattr(connection, "pool", None) is None:  # a pool may have lent it again
                with suppress(Exception):
                    before.driver.close()
        elif (
            not connection.in_atomic_block
            or connection.savepoint_ids != before.savepoints
            or connection.atomic_blocks != before.blocks
        ):
            found.lost.append(f"did not leave atomic() blocks of database {alias!r} as it found them")
            entered = [sid for sid in connection.savepoint_ids[len(before.savepoints) :] if sid]
            if entered and connection.in_atomic_block:
                with suppress(Exception):
                    connection.savepoint_rollback(entered[0])
        if change := self._change(before):
            connection.delayq_changed = change
            found.changed.append(change)
        connection.in_atomic_block = True
        connection.savepoint_ids, connection.atomic_blocks = [*before.savepoints], [*before.blocks]

    def _end_outside(self, before: _Before, found: Leftovers) -> None:
        """Close the connection unless it is as it was, and in no transaction."""
        connection, alias = before.connection, before.connection.alias
        status, has_autocommit = transaction_status(connection), connection.autocommit
        if connection.in_atomic_block:
            found.lost.append(f"entered atomic() on database {alias!r} and did not leave it")
        elif status in {"open", "failed"} or (status is None and alias in self._begun):
            found.lost.append(f"left a transaction open on database {alias!r}")
        elif has_autocommit != connection.settings_dict["AUTOCOMMIT"]:
            found.changed.append(f"left autocommit of database {alias!r} switched")
        elif change := self._change(before):
            found.changed.append(change)
        elif status != "closed":
            return
        reset(connection)

    def _change(self, before: _Before) -> str | None:
        """Describe how the session was changed; return None if it was not."""
        alias = before.connection.alias
        if statement := self._changed.get(alias):
            return f"changed the session of database {alias!r} by {statement}"
        if before.has_other_settings:
            return f"changed the settings of the connection to database {alias!r}"
        return None


def is_changed(connection: Any) -> bool:
    """Return whether user code has changed the session of `connection`, whose transaction has not ended yet."""
    return bool(vars(connection).get("delayq_changed"))


@contextmanager
def ending_changed(connection: Any) -> Iterator[None]:
    """Run a transaction in the block, and then close the connections whose session user code has changed in it."""
    before = _Before(connection)
    try:
        yield
    finally:
        if not is_changed(connection) and before.has_other_settings:  # by a function in the database, or the driver
            connection.delayq_changed = f"changed the settings of the connection to database {connection.alias!r}"
            policy = "" if firing_state.current is None else firing_state.current.work.policy
            Leftovers(changed=[connection.delayq_changed]).log(f"The handler of {policy}", policy)
        close_changed()


def close_changed() -> None:
    """Close the connections of this thread whose session was changed in a transaction that has ended."""
    for connection in connections.all(initialized_only=True):
        if is_changed(connection) and not connection.in_atomic_block:
            reset(connection)


@dataclass(slots=True, eq=False)
class StatementMonitor:
    """What the handlers of one transaction did to its connection.

    Attributes:
        errors: database errors, also those that a handler caught.
        has_written: a statement has changed rows.
    """

    _connection: BaseDatabaseWrapper
    errors: list[Error] = field(default_factory=list)
    has_written: bool = False
    _saw_rollback: bool = False
    _is_ended: bool = False

    def __call__(self, execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: Any) -> Any:
        """Execute one statement, as an `execute_wrapper` of Django."""
        # The `str` of a statement that psycopg composes is not its SQL.
        text = sql.as_string(self._connection.connection) if hasattr(sql, "as_string") else str(sql)
        rollback = _ROLLBACK.match(text)
        self._saw_rollback = self._saw_rollback or (rollback is not None and not rollback[1])
        self.has_written = self.has_written or _WRITE.match(text) is not None
        self._refuse_commit(text)
        self._check_open(TransactionManagementError)
        try:
            return execute(sql, params, many, context)
        except Error as error:
            self.errors.append(error)
            raise

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

    def check_unbroken(self, is_marked: Callable[[], bool]) -> None:
        """Check that the work of the handler can be committed; raise BrokenTransaction if not.

        Without this check Django would roll back silently at the end, and PostgreSQL answers the COMMIT of a failed
        transaction with a rollback: the row would count as fired although nothing was done. `is_marked`: whether the
        transaction still works, and still sees the mark on the row.
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
        if (culprit or has_failed) and not is_marked():
            raise BrokenTransaction(
                "The handler caught a database error that had ended the transaction. Put what may fail into an "
                "atomic() block of its own."
            ) from culprit
        self._saw_rollback = False
