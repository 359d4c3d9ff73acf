"""Call code of the project, such as a handler: with the context managers of `DELAYQ["AROUND"]` around it."""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from types import TracebackType
from typing import Any

from django_delayq.exceptions import Abandoned
from django_delayq.firing.state import firing_state
from django_delayq.firing.works import Call
from django_delayq.ledger.errors import shown
from django_delayq.ledger.traces import Around, get_around
from django_delayq.models import Timeout
from django_delayq.policy.policies import TimeoutPolicy

logger = logging.getLogger("django_delayq.firing")


def raised_by(act: Callable[[], object]) -> BaseException | None:
    """Call `act`, and return the exception that it raised; None: it raised none.

    Only Abandoned passes, and KeyboardInterrupt in the main thread: elsewhere no key was pressed, but the code itself
    has raised it. SystemExit does not pass: code of the project must not end the worker.
    """
    try:
        act()
    except Abandoned:
        raise
    except BaseException as error:  # see above
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        running = firing_state.current
        if running is not None and running.is_abandoned:  # a connection that was cut replaces the exception
            raise Abandoned from error
        return error
    return None


def around(
    policy: TimeoutPolicy[Any], timeouts: Timeout | Sequence[Timeout], call: Call
) -> AbstractContextManager[object]:
    """Enter the context managers around `call`; return one that leaves them. What the call raises passes all of them.

    What they raise themselves is logged once a minute for each: a timeout must fire although it is not observed.

    Another thread that abandons the call notifies `call.observers`, because this thread may not come back.
    """
    functions = list[Around]()
    _log("DELAYQ['AROUND']", policy, raised_by(lambda: functions.extend(get_around())))
    if not functions:
        return nullcontext()
    listed = [timeouts] if isinstance(timeouts, Timeout) else list(timeouts)
    stack, observers = ExitStack(), [_Observer(each, policy) for each in functions]
    try:
        for each in observers:
            each.enter(listed)
            stack.push(each.leave)
    except BaseException:  # such as KeyboardInterrupt: the caller gets nothing to leave
        stack.close()
        raise
    call.context, call.observers = contextvars.copy_context(), observers
    return stack


class _Observer:
    """A function of `AROUND`, and its context manager while it is entered. Logs what they raise."""

    __slots__ = ("_function", "_manager", "_policy")

    def __init__(self, function: Around, policy: TimeoutPolicy[Any]) -> None:
        self._function, self._policy = function, policy
        self._manager: AbstractContextManager[object] | None = None

    def enter(self, timeouts: list[Timeout]) -> None:
        """Make the context manager and enter it."""

        def enter() -> None:
            manager = self._function(self._policy, timeouts)
            manager.__enter__()
            self._manager = manager

        self._log(raised_by(enter))

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Leave the context manager. It cannot suppress an exception: the timeout would count as fired."""
        if self._manager is not None:
            self._log(raised_by(partial(self._manager.__exit__, kind, error, at)), known=error)

    def abandoned(self, error: BaseException) -> None:
        """Call its method `abandoned`, if there is one, in the thread that has abandoned the call, with the cause."""
        self._log(raised_by(lambda: getattr(self._manager, "abandoned", lambda _: None)(error)))

    def _log(self, error: BaseException | None, known: BaseException | None = None) -> None:
        if error is known:
            return
        name = getattr(self._function, "__qualname__", type(self._function).__qualname__)
        _log(f"{self._function.__module__}.{name} of DELAYQ['AROUND']", self._policy, error)


def _log(name: str, policy: TimeoutPolicy[Any], error: BaseException | None) -> None:
    if error is not None and firing_state.is_time_to_log(("around", name)):
        logger.error(
            "%s failed; the handler of %s is called nevertheless.",
            *(name, policy.label),
            exc_info=shown(error),
            extra={"event": "around_failed", "policy": policy.label},
        )
