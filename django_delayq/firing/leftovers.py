"""Undo what user code leaves behind in its thread, before it reaches other timeouts.

A worker keeps its threads and their connections. If a handler ends with autocommit off, in an open transaction or in
an `atomic()` block, the transactions of later firings would commit nothing, without an error. If it changes a setting
of the session, such as the time zone or the search path, later firings would read other times or tables.

So all user code runs in a `SessionCheck`: handlers, callbacks and signal receivers. It compares every connection of the
thread before and after, without a query. A connection that was left otherwise is closed. Context variables, and with
them the language and the time zone of Django, end with the code that set them.

The driver knows the state of a transaction, and few settings. So the beginnings of statements are read, too, for what
it does not show: which of them change a setting, and which would commit and are refused before that (`effects_of`).

A `StatementMonitor` ensures that the transaction of a firing commits all of the work of its handlers or nothing.
"""

from __future__ import annotations

import contextvars
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

from django.db import connections
from django.db.transaction import TransactionManagementError
from django.db.utils import Error

from django_delayq.firing.state import firing_state
from django_delayq.ledger.left_open import reset, session_state, transaction_status
from django_delayq.sql.dialects import Dialect, dialect_of

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

logger = logging.getLogger("django_delayq.firing")


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


@cache
def effects_of(dialect: Dialect) -> re.Pattern[str]:
    """Return a pattern that matches the beginning of each statement, with a group for each effect beside reading.

    The quantifier of white space and comments is possessive: otherwise each comment more would double the time of a
    statement.
    """
    return re.compile(
        rf"(?:\s|/\*.*?\*/|--[^\n]*\n)*+(?=(?P<sets>{dialect.sets})\b|)(?:(?:"
        r"(?P<begins>BEGIN|START\s+TRANSACTION|XA\s+(?:START|BEGIN))"
        rf"|(?P<commits>(?:XA\s+)?COMMIT|END|{dialect.commits})"
        r"|(?P<rolls_back>(?:XA\s+)?(?:ROLLBACK|ABORT)(?!(?:\s+(?:WORK|TRANSACTION))?\s+TO\b))"  # not to a savepoint
        r"|(?P<writes>INSERT|UPDATE|DELETE|REPLACE|MERGE))\b|)",
        re.IGNORECASE | re.DOTALL,
    )


def _effect_of(connection: Any, sql: Any) -> re.Match[str]:
    # The `str` of a statement that psycopg composes is not its SQL.
    text = sql.as_string(connection.connection) if hasattr(sql, "as_string") else str(sql)
    return cast("re.Match[str]", effects_of(dialect_of(connection)).match(text))


class _Before:
    """A connection as it was before the user code. While that runs, it is an `execute_wrapper` of the connection."""

    def __init__(self, connection: Any) -> None:
        self.connection, self.driver = connection, connection.connection
        self.session = () if self.driver is None else session_state(connection)
        self.savepoints, self.blocks = [*connection.savepoint_ids], [*connection.atomic_blocks]
        self.wrappers, self.is_inside = [*connection.execute_wrappers], connection.in_atomic_block
        self.has_begun, self.set_by = False, ""

    def __call__(self, execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: Any) -> Any:
        """Execute one statement, and note whether it outlives the transaction."""
        effect, call = _effect_of(self.connection, sql), dialect_of(self.connection).sets_by_call
        if found := effect if effect["sets"] else call and call.search(effect.string):
            self.set_by = " ".join(found.string[found.start("sets") :].partition("=")[0].split()[:3])
        if any(effect.group("begins", "commits", "rolls_back")):
            self.has_begun = bool(effect["begins"])
        return execute(sql, params, many, context)

    @property
    def change(self) -> str | None:
        """Describe how the session was changed; None: it was not. A new one is as Django configures it."""
        alias, driver = self.connection.alias, self.connection.connection
        if self.set_by:
            return f"changed the session of database {alias!r} by {self.set_by}"
        if driver is self.driver and self.session and session_state(self.connection) not in (self.session, ()):
            return f"changed the settings of the connection to database {alias!r}"
        return None

    def end(self, found: Leftovers) -> None:
        """Undo what the code has left behind, and add it to `found`. Settings stay in a transaction that continues."""
        connection, alias = self.connection, self.connection.alias
        if (other := connections[alias]) is not connection:
            connections[alias] = connection
            reset(other)
            found.lost.append(f"replaced the connection to database {alias!r}")
        if self.is_inside:
            self._end_inside(found)
        elif connection.connection is not None:
            self._end_outside(found)

    def _end_inside(self, found: Leftovers) -> None:
        """Return to the `atomic()` blocks in which the user code was called. What others wrote in them stays."""
        connection, alias = self.connection, self.connection.alias
        if connection.closed_in_transaction or connection.connection is None:
            return  # there is nothing to return to, and the commit is refused
        if connection.connection is not self.driver:
            found.lost.append(f"opened another connection to database {alias!r} inside a transaction")
            if getattr(connection, "pool", None) is None:  # a pool may have lent it again
                with suppress(Exception):
                    self.driver.close()
        elif (
            not connection.in_atomic_block
            or connection.savepoint_ids != self.savepoints
            or connection.atomic_blocks != self.blocks
        ):
            found.lost.append(f"did not leave atomic() blocks of database {alias!r} as it found them")
            entered = [sid for sid in connection.savepoint_ids[len(self.savepoints) :] if sid]
            if entered and connection.in_atomic_block:
                with suppress(Exception):
                    connection.savepoint_rollback(entered[0])
        if change := self.change:
            connection.delayq_changed = change
            found.changed.append(change)
        connection.in_atomic_block = True
        connection.savepoint_ids, connection.atomic_blocks = [*self.savepoints], [*self.blocks]

    def _end_outside(self, found: Leftovers) -> None:
        """Close the connection unless it is as it was, and in no transaction."""
        connection, alias = self.connection, self.connection.alias
        status = transaction_status(connection)
        if connection.in_atomic_block:
            found.lost.append(f"entered atomic() on database {alias!r} and did not leave it")
        elif status in {"open", "failed"} or (status is None and self.has_begun):
            found.lost.append(f"left a transaction open on database {alias!r}")
        elif connection.autocommit != connection.settings_dict["AUTOCOMMIT"]:
            found.changed.append(f"left autocommit of database {alias!r} switched")
        elif change := self.change:
            found.changed.append(change)
        elif status != "closed":
            return
        reset(connection)


class SessionCheck:
    """Run user code of this thread, and end what it leaves behind on the connections. Make one for each call."""

    __slots__ = ("_before", "context")

    def __init__(self) -> None:
        self._before = [_Before(connection) for connection in connections.all()]
        self.context = contextvars.copy_context()

    def run(self, act: Callable[[], object]) -> None:
        """Call `act`, with a copy of the context of this thread. What it raises passes."""
        for each in self._before:
            each.connection.execute_wrappers.append(each)
        try:
            self.context.run(act)
        finally:
            for each in self._before:
                each.connection.execute_wrappers[:] = each.wrappers

    def end(self) -> Leftovers:
        """Return the leftovers. All are undone, except settings of a session whose transaction continues."""
        found = Leftovers()
        for each in self._before:
            each.end(found)
        return found


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
        if not is_changed(connection) and (change := before.change):  # by a function in the database, or the driver
            connection.delayq_changed = change
            policy = "" if firing_state.current is None else firing_state.current.work.policy
            Leftovers(changed=[change]).log(f"The handler of {policy}", policy)
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
    _is_ended: bool = False

    def __call__(self, execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: Any) -> Any:
        """Execute one statement, as an `execute_wrapper` of Django."""
        effect = _effect_of(self._connection, sql)
        if commits := effect["begins"] or effect["commits"]:
            raise BrokenTransaction(  # before it commits the mark on the row: the handler may fail later
                f"{commits} would commit the transaction of the handler before its end: the timeout "
                "would count as fired even if the handler fails after that. Use transaction.on_commit(), or declare "
                "the policy with atomic=False."
            )
        self._check_open(TransactionManagementError)
        self.has_written = self.has_written or bool(effect["writes"])
        try:
            result = execute(sql, params, many, context)
        except Error as error:
            self.errors.append(error)
            raise
        self._is_ended = self._is_ended or bool(effect["rolls_back"])
        return result

    @contextmanager
    def noticing_end(self) -> Iterator[None]:
        """Notice methods of the driver that end the transaction, where its status does not show that: mysqlclient's."""
        names = () if self._connection.features.can_rollback_ddl else ("autocommit", "commit", "rollback")
        driver: Any = self._connection.connection
        for name in names:
            vars(driver)[name] = partial(self._end, getattr(driver, name))
        try:
            yield
        finally:
            for name in names:
                vars(driver).pop(name, None)

    def _end(self, method: Callable[..., Any], *args: Any) -> Any:
        self._is_ended = True
        return method(*args)

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
        if (culprit or transaction_status(connection) == "failed") and not is_marked():
            raise BrokenTransaction(
                "The handler caught a database error that had ended the transaction. Put what may fail into an "
                "atomic() block of its own."
            ) from culprit
