"""Enter the context managers of `DELAYQ["AROUND"]` around a call of project code, such as a handler."""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Any

from django_delayq.conf import ConfigError
from django_delayq.firing.state import firing_state
from django_delayq.firing.works import Call
from django_delayq.ledger.history import shown
from django_delayq.ledger.traces import Around, get_around
from django_delayq.models import Timeout
from django_delayq.policies import TimeoutPolicy

logger = logging.getLogger("django_delayq.firing")


def around(
    policy: TimeoutPolicy[Any], timeouts: Timeout | Sequence[Timeout], call: Call
) -> AbstractContextManager[object]:
    """Enter the context managers around `call`; return one that leaves them. What the call raises passes all of them.

    What they raise themselves is logged once a minute for each: a timeout must fire although it is not observed.

    Another thread that abandons the call notifies `call.observers`, because this thread may not come back.
    """
    try:
        functions = get_around()
    except ConfigError as error:
        _log("DELAYQ['AROUND']", policy, error)
        functions = ()
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
        try:
            manager = self._function(self._policy, timeouts)
            manager.__enter__()
        except Exception as error:  # noqa: BLE001 - code of the project
            self._log(error)
        else:
            self._manager = manager

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Leave the context manager. It cannot suppress an exception: the timeout would count as fired."""
        if self._manager is None:
            return
        try:
            self._manager.__exit__(kind, error, at)
        except Exception as failure:  # noqa: BLE001 - code of the project
            if failure is not error:
                self._log(failure)

    def abandoned(self, error: BaseException) -> None:
        """Call its method `abandoned`, if there is one, in the thread that has abandoned the call, with the cause."""
        try:
            abandoned = getattr(self._manager, "abandoned", None)
            if abandoned is not None:
                abandoned(error)
        except Exception as failure:  # noqa: BLE001 - code of the project
            self._log(failure)

    def _log(self, error: BaseException) -> None:
        name = getattr(self._function, "__qualname__", type(self._function).__qualname__)
        _log(f"{self._function.__module__}.{name} of DELAYQ['AROUND']", self._policy, error)


def _log(name: str, policy: TimeoutPolicy[Any], error: BaseException) -> None:
    if firing_state.is_time_to_log(("around", name)):
        logger.error(
            "%s failed; the handler of %s is called nevertheless.",
            *(name, policy.label),
            exc_info=shown(error),
            extra={"event": "around_failed", "policy": policy.label},
        )
