"""What the main loop does after a failed pass: wait ever longer, and log the failure once."""

from __future__ import annotations

import logging
import random
import time
from typing import Final

from django.db import Error as DatabaseError

from django_delayq.ledger.db_connections import check_connections
from django_delayq.ledger.scrubbing import message_of, shown
from django_delayq.models import WorkerSeen

logger = logging.getLogger("django_delayq.worker")

FIRST_PAUSE_SECONDS: Final = 0.25
LONGEST_PAUSE_SECONDS: Final = 5.0


class Outage:
    """Whether passes of the main loop succeed. For one thread."""

    def __init__(self, using: str) -> None:
        self._using = using
        self._pause = 0.0
        self._try_again_at = 0.0
        self._failure: type[Exception] | None = None
        """Of the last pass: `DatabaseError` for all errors of the database, else the error's own type."""

    @property
    def seconds_left(self) -> float:
        """Return how long to wait before the next pass; 0: it may begin."""
        return max(0.0, self._try_again_at - time.monotonic()) if self._pause else 0.0

    def failed(self, error: Exception) -> None:
        """Wait before the next pass, each time for longer, up to some seconds, with jitter; log the first failure."""
        before, self._failure = self._failure, DatabaseError if isinstance(error, DatabaseError) else type(error)
        if self._failure is not before:
            self._log(error)
        self._pause = min(max(2 * self._pause, FIRST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)
        self._try_again_at = time.monotonic() + self._pause * random.uniform(0.5, 1.0)
        check_connections(error=error)

    def check(self) -> None:
        """After an error of the database: raise its error unless it takes writes again.

        A statement that changes nothing fails early, before a thousand leased timeouts would have to be released. A
        primary that was demoted answers reads as if all were well, hence a write.
        """
        if self._failure is DatabaseError:
            WorkerSeen.objects.using(self._using).filter(pk="").update(held=0)

    def over(self, *, was_idle: bool) -> None:
        """A pass succeeded: log that once after failures.

        After an error of another kind than the database's, a pass that found nothing due proves nothing.
        """
        if self._failure is None or (was_idle and self._failure is not DatabaseError):
            return
        if self._failure is DatabaseError:
            logger.warning("The database is back", extra={"event": "database_back"})
        else:
            logger.warning("The worker's passes succeed again", extra={"event": "pass_succeeded"})
        self._pause, self._failure = 0.0, None

    def _log(self, error: Exception) -> None:
        if isinstance(error, DatabaseError):
            logger.warning(
                "The database failed, and is asked again soon: %s", message_of(error), extra={"event": "database_away"}
            )
            return
        logger.error(
            "A pass of the worker failed with %s, and is repeated soon: %s",
            type(error).__name__,
            message_of(error),
            exc_info=shown(error),
            extra={"event": "pass_failed"},
        )
