"""Work that its caller does not wait for longer than he wants to."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class NotBack(Exception):
    """The errand is still under way; it ends by itself, and nobody hears how."""


class Errand(Generic[T]):
    """`work`, begun in a thread of its own; at once, in the caller's, where no thread can be had any more.

    For what has no timeout: a look-up of a host name may take half a minute, whatever the sockets are told.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._outcome: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()
        run = contextvars.copy_context().run
        try:
            # A daemon: a process that ends does not wait for a name server either.
            threading.Thread(target=run, args=(self._run, work), name="delayq-errand", daemon=True).start()
        except RuntimeError:  # the machine has no thread left, or the interpreter is on its way out
            self._run(work)

    def wait(self, seconds: float) -> T:
        """What `work` returned, or raises what it raised; NotBack after `seconds`. Once."""
        try:
            result, error = self._outcome.get(timeout=seconds)
        except Empty:
            raise NotBack from None
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._outcome.put((work(), None))
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            self._outcome.put((None, error))
