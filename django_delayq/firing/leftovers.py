"""Undo what user code leaves behind in its thread, before it reaches other timeouts.

A worker keeps its threads and their connections. If a handler ends with autocommit off, in an open transaction or in
an `atomic()` block, the transactions of later firings would commit nothing, without an error. If it changes a setting
of the session, such as the time zone or the search path, later firings would read other times or tables.

So all user code runs in a `SessionCheck`: handlers, callbacks and signal receivers. It compares every connection of the
thread before and after, without a query, and sees the statements between. A connection that was left otherwise is
closed. Context variables, and with them the language and the time zone of Django, end with the code that set them.
"""

from __future__ import annotations

import contextvars
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from django.db import connections

from django_delayq.firing.state import firing_state
from django_delayq.ledger.left_open import reset, session_state, transaction_status
from django_delayq.sql.dialects import dialect_of

logger = logging.getLogger("django_delayq.firing")

BEFORE = r"(?:\s|/\*.*?\*/|--[^\n]*\n)*+"
"""White space and comments. Possessive: otherwise each comment more would double the time of a statement."""
_BEFORE = re.compile(BEFORE, re.DOTALL)
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
