"""See the statements of the handlers: errors that one swallows, and writes that reach another member of its group."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from django.db import connections
from django.db.utils import Error

from django_delayq.ledger import settling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from django_delayq.firing.reach import Reach
    from django_delayq.firing.taking import Member


class BrokenTransaction(RuntimeError):
    """A handler returned as if all were well, but its transaction cannot be committed."""


class Watch:
    """What the handlers of one transaction did to its connection.

    Attributes:
        errors: database errors, also those that a handler caught.
        overlaps: a handler wrote, or may have written, what another member of the group had read before.
    """

    def __init__(self, using: str, reach: Reach | None = None) -> None:
        self.errors: list[Error] = []
        self.overlaps = False
        self._using = using
        self._reach = reach
        self._doubtful = False

    @contextmanager
    def looking(self) -> Iterator[None]:
        """See every statement on the connection, until the block ends."""
        with connections[self._using].execute_wrapper(self._see):
            yield

    def turn_of(self, member: Member) -> None:
        """From here on the statements are those of the handler of `member`."""
        if self._reach:
            self._reach.turn_of(member)

    def check_unbroken(self, row_id: int) -> None:
        """The work of the handler can be committed.

        Without this check, Django would roll back at the end without a word, and PostgreSQL answers the COMMIT
        of a failed transaction with a rollback: the row would count as fired although nothing was done.

        Raises:
            BrokenTransaction: it cannot.
        """
        connection = connections[self._using]
        if connection.closed_in_transaction or connection.connection is None:
            raise BrokenTransaction("The handler closed the database connection, and its work is lost.")
        if connection.needs_rollback:
            raise BrokenTransaction(
                "The handler marked the transaction for rollback: by set_rollback(True), or by catching a database "
                "error outside an atomic() block of its own."
            )
        culprit = self.errors[-1] if self.errors else None
        if (culprit or self._doubtful) and not self._is_fired(row_id):
            raise BrokenTransaction(
                "The handler caught a database error that had ended the transaction. Put what may fail into an "
                "atomic() block of its own."
            ) from culprit
        self._doubtful = False

    def _is_fired(self, row_id: int) -> bool:
        """Whether the transaction still works and still knows that the row is marked."""
        try:
            return settling.is_marked(row_id, self._using)
        except Error:
            return False

    def _see(self, execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: Any) -> Any:
        text = sql if isinstance(sql, str) else str(sql)
        if text[:8].upper() == "ROLLBACK" and " TO " not in text[:14].upper():
            self._doubtful = True
        if self._reach and not self.overlaps:
            self.overlaps = self._reach.goes_beyond(text, params, many)
        try:
            return execute(sql, params, many, context)
        except Error as error:
            self.errors.append(error)
            raise
