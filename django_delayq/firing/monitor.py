"""Monitor what handlers do to the connection of their transaction, so that it commits all of their work or nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from django.db.transaction import TransactionManagementError
from django.db.utils import Error

from django_delayq.firing.leftovers import BEFORE, BrokenTransaction
from django_delayq.ledger import settling
from django_delayq.ledger.left_open import transaction_status

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_delayq.models import Timeout

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

    def check_unbroken(self, row_id: int, before: Timeout | None = None) -> None:
        """Check that the work of the handler can be committed; raise BrokenTransaction if not.

        Without this check Django would roll back silently at the end, and PostgreSQL answers the COMMIT of a failed
        transaction with a rollback: the row would count as fired although nothing was done. `before`: see `is_marked`.
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
        if (culprit or has_failed) and not settling.is_marked(row_id, connection.alias, before):
            raise BrokenTransaction(
                "The handler caught a database error that had ended the transaction. Put what may fail into an "
                "atomic() block of its own."
            ) from culprit
        self._saw_rollback = False
