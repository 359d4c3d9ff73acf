"""Sends commands, and clears what lies in their way, so that foreign data never stops a worker."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Final

from django_delayq.engine.faults import Client, is_wrong_type, translated
from django_delayq.engine.keys import QueueKeys
from django_delayq.engine.scripts import Call, Scripts, packaged_scripts

logger = logging.getLogger("django_delayq.engine")

_CLEARINGS: Final = 3
"""How often a call clears its way: somebody who writes his own type there all the time gets an error, not a loop."""


class Caller:
    """One client, one set of scripts, and the memory of which queues have been complained about."""

    def __init__(self, client: Client, scripts: Scripts | None = None) -> None:
        self.client = client
        self._scripts = scripts or packaged_scripts()
        self._told: set[tuple[str, str]] = set()
        self._label = 0

    def send(self, calls: Sequence[Call]) -> list[Any]:
        """The replies in order; many calls make one round trip.

        Raises EngineUnavailable or EngineError for the first call that failed, after all others have run.
        """
        if not calls:
            return []
        with translated(self.client):
            replies = self._scripts.run(self.client, calls)
            for _ in range(_CLEARINGS):
                blocked = [i for i, reply in enumerate(replies) if is_wrong_type(reply)]
                if not blocked:
                    break
                again = [calls[i] for i in blocked]
                self._clear(again)
                for i, reply in zip(blocked, self._scripts.run(self.client, again), strict=True):
                    replies[i] = reply
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply
        return replies

    def log_once(self, event: str, queue: str, message: str, *args: object) -> None:
        """Logs a warning the first time that this happens to this queue: an attacker must not fill the log."""
        if (event, queue) not in self._told:
            self._told.add((event, queue))
            logger.warning(message, *args, extra={"event": event, "queue": queue})

    def _clear(self, blocked: Sequence[Call]) -> None:
        for keys in dict.fromkeys(call.keys for call in blocked):
            if isinstance(keys, QueueKeys):
                # Never the same name twice: it may exist by now, and nothing is renamed over what exists.
                self._label = max(self._label + 1, time.time_ns() // 1_000_000)
                aside = keys.aside(self._label)
                (renamed,) = self._scripts.run(self.client, [Call("set_aside", aside)])
                if isinstance(renamed, Exception):
                    raise renamed
                if renamed:
                    names = ", ".join(name.decode() if isinstance(name, bytes) else name for name in renamed)
                    self.log_once("foreign_key", keys.entries, "Somebody else's data was moved aside as %s", names)
