"""The database is away: the worker lives on, asks for it ever more rarely, and says so once."""

from __future__ import annotations

import logging
import random
import time
from typing import Final

from django.db import Error, connections

from django_delayq.db_connections import check_connections
from django_delayq.scrubbing import message_of, shown

logger = logging.getLogger("django_delayq.worker")

FIRST_PAUSE_SECONDS: Final = 0.25
LONGEST_PAUSE_SECONDS: Final = 5.0


class Outage:
    """Whether the database answers this thread. For one thread."""

    def __init__(self, using: str) -> None:
        self._using = using
        self._pause = 0.0
        self._ask_again_at = 0.0

    @property
    def seconds_left(self) -> float:
        """How long nothing is to be asked of the database; 0: it may be."""
        return max(0.0, self._ask_again_at - time.monotonic()) if self._pause else 0.0

    def failed(self, error: Exception) -> None:
        """It failed: it is left alone for a while, each time for longer, up to some seconds, with jitter."""
        if not self._pause:
            logger.warning(
                "The database failed, and is asked again soon: %s",
                message_of(error),
                exc_info=None if isinstance(error, Error) else shown(error),
                extra={"event": "database_away"},
            )
        self._pause = min(max(2 * self._pause, FIRST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)
        self._ask_again_at = time.monotonic() + self._pause * random.uniform(0.5, 1.0)
        check_connections()

    def check(self) -> None:
        """Returns at once while all is well, and after a failure if the database answers again; else raises its error.

        One small question is better asked with empty hands than a thousand leased timeouts put back again.
        """
        if not self._pause:
            return
        with connections[self._using].cursor() as cursor:
            cursor.execute("SELECT 1")
        self._pause = 0.0
        logger.warning("The database is back", extra={"event": "database_back"})
