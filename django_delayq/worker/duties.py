"""Background work beside the firing, each kind in a thread of its own: a slow sync must not hold up a sweep."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from typing import Final

from django.db import Error as DatabaseError
from django.db import connections

from django_delayq.db_connections import check_connections
from django_delayq.exceptions import EngineError
from django_delayq.scrubbing import message_of, shown

logger = logging.getLogger("django_delayq.worker")

LONGEST_PAUSE_SECONDS: Final = 30.0


class Duty(threading.Thread):
    """Does `work` at once and then every `seconds` (a number, or a callable that is asked each time), until stopped.

    A failure never ends it: it is logged, once while the same kind goes on, and tried again, ever more rarely up to
    half a minute.

    Args:
        is_immediate: False: the first time is after `seconds` too.
    """

    def __init__(
        self, name: str, work: Callable[[], object], seconds: float | Callable[[], float], *, is_immediate: bool = True
    ) -> None:
        super().__init__(name=f"delayq-{name}", daemon=True)
        self._work = work
        self._seconds = seconds
        self._is_immediate = is_immediate
        self._stopping = threading.Event()
        self._failure: type[BaseException] | None = None
        self._failures = 0

    def stop(self) -> None:
        """It ends after what it is doing now."""
        self._stopping.set()

    def run(self) -> None:
        try:
            if not self._is_immediate:
                self._stopping.wait(self._pause())
            while not self._stopping.is_set():
                self._do()
                self._stopping.wait(self._pause())
        finally:
            connections.close_all()

    def _do(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - whatever it is, tomorrow's timeouts need this thread
            self._failures += 1
            self._tell(error)
        else:
            if self._failures:
                logger.info("%s works again", self.name, extra={"event": "duty_back", "duty": self.name})
            self._failure, self._failures = None, 0
        check_connections()

    def _pause(self) -> float:
        seconds = self._seconds() if callable(self._seconds) else self._seconds
        if self._failures:
            longest = max(seconds, LONGEST_PAUSE_SECONDS)
            seconds = min(longest, max(seconds, 1.0) * 2 ** min(self._failures - 1, 10)) * random.uniform(0.5, 1.0)
        return seconds

    def _tell(self, error: Exception) -> None:
        if isinstance(error, EngineError):
            return  # the link has told
        is_known, self._failure = self._failure is type(error), type(error)
        logger.log(
            logging.DEBUG if is_known else logging.WARNING,
            "%s failed and is tried again: %s",
            self.name,
            message_of(error),
            exc_info=None if isinstance(error, DatabaseError) else shown(error),
            extra={"event": "duty_failed", "duty": self.name},
        )
