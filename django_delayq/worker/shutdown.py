"""Signals of the operating system: the first SIGTERM or SIGINT stops the worker in order, a second one at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from django_delayq.worker.loop import Worker

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stopping_on_signals(worker: Worker) -> Iterator[None]:
    """Inside the block SIGTERM and SIGINT stop the worker; outside the main thread, where none arrive, nothing.

    A handler of its own for each, because as process 1 of a container nothing happens by default.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received = 0

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        worker.stop(hard=received > 1)

    former: dict[int, Any] = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
