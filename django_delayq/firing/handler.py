"""Run the code of the project in a firing: a handler, or an `on_commit` callback.

A handler has the context managers of `DELAYQ["AROUND"]` around it.

A firing passes checkpoints, where tests stop it or kill its process, and long runs are located:

| checkpoint | what is true then |
| --- | --- |
| `planned` | the rows are read, nothing is locked |
| `asked` | `confirm` has answered about one of them, nothing is locked |
| `noted` | it is committed that a suspect runs |
| `begun` | the transaction has begun |
| `locked` | the objects are locked |
| `checked` | the rows are locked too, and the conditions are known |
| `marked` | the rows are `fired` in the transaction (with `atomic=False`: `firing`) |
| `handled` | the handler has returned (with `atomic=False`: after `committed`) |
| `committed` | the transaction is committed |
| `settled` | with `atomic=False`: `fired` is committed |
| `undone` | the handler raised, and its transaction is rolled back |
| `recorded` | the failed attempt is committed |
| `reported` | only the acknowledgement in Redis is missing |
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any

from asgiref.sync import async_to_sync
from django.db import connections, transaction

from django_delayq.exceptions import Abandoned
from django_delayq.firing.leftovers import BrokenTransaction, SessionCheck, close_changed, ending_changed
from django_delayq.firing.state import firing_state
from django_delayq.firing.works import Call, RunningWork
from django_delayq.ledger.error_texts import shown
from django_delayq.ledger.left_open import refuse_without_autocommit
from django_delayq.ledger.locking import begin_write
from django_delayq.ledger.traces import Around, get_around
from django_delayq.models import Timeout
from django_delayq.policy.policies import TimeoutPolicy
from django_delayq.times.clock import plural

logger = logging.getLogger("django_delayq.firing")

CHECKPOINTS = (
    "planned", "asked", "noted", "begun", "locked", "checked", "marked",
    "handled", "committed", "settled", "undone", "recorded", "reported",
)  # fmt: skip

_checkpoint_hook: Callable[[str], None] | None = None


@contextmanager
def tracked(running: RunningWork) -> Iterator[None]:
    """Register `running` as what this thread runs, until the block ends. May be nested: a handler may fire others."""
    thread = threading.get_ident()
    outer, firing_state.running[thread] = firing_state.running.get(thread), running
    try:
        with running.run_by_this_thread():
            yield
    finally:
        if outer is None:
            firing_state.running.pop(thread, None)
        else:
            firing_state.running[thread] = outer


def checkpoint(name: str) -> None:
    """Note that the firing in this thread has reached the checkpoint `name`, and call the hook of a test."""
    if (running := firing_state.current) is not None:
        running.checkpoint = name
    if _checkpoint_hook is not None:
        _checkpoint_hook(name)


def set_checkpoint_hook(hook: Callable[[str], None] | None) -> None:
    """Call `hook` with the name of every checkpoint that a firing of this process reaches. None removes it."""
    global _checkpoint_hook  # noqa: PLW0603 - one hook per process, for tests
    _checkpoint_hook = hook


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
    _log_around("DELAYQ['AROUND']", policy, raised_by(lambda: functions.extend(get_around())))
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
        _log_around(f"{self._function.__module__}.{name} of DELAYQ['AROUND']", self._policy, error)


def _log_around(name: str, policy: TimeoutPolicy[Any], error: BaseException | None) -> None:
    if error is not None and firing_state.is_time_to_log(("around", name)):
        logger.error(
            "%s failed; the handler of %s is called nevertheless.",
            *(name, policy.label),
            exc_info=shown(error),
            extra={"event": "around_failed", "policy": policy.label},
        )


def call_handler(
    running: RunningWork,
    target: Any,
    timeouts: Timeout | list[Timeout],
    call: Call,
    function: Callable[..., Any] | None = None,
) -> Any:
    """Call the handler of the policy, or its other `function`, and await the result if it is awaitable; return it.

    What is raised passes. The ORM calls of an async handler come back to this thread, and so to this connection and
    transaction.
    """
    policy, results = running.policy, list[Any]()

    def act() -> None:
        result = (function or policy.handler)(target, timeouts)
        if result is not None and inspect.isawaitable(result):
            running.awaited = result
            result = async_to_sync(_awaited)(result, running, policy.label)
        results.append(result)

    try:
        with around(policy, timeouts, call):
            _call(running, call, act)
    finally:
        running.awaited = running.cancel = None
    return results[0]


async def _awaited(result: Awaitable[Any], running: RunningWork, label: str) -> Any:
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    running.cancel = None if task is None else partial(loop.call_soon_threadsafe, task.cancel)
    with running.run_by_this_thread():
        returned = await result
    if unfinished := len(asyncio.all_tasks()) - 1:  # they are cancelled with this loop
        logger.warning(
            "The async handler of %s has returned before %s that it has started, and that will not be completed. Await "
            "it, or use asyncio.TaskGroup.",
            *(label, plural(unfinished, "task")),
            extra={"event": "tasks_unfinished", "policy": label},
        )
    return returned


@contextmanager
def firing_transaction(using: str) -> Iterator[None]:
    """Open a transaction that takes the write lock first, and whose `on_commit` callbacks cannot fail the firing.

    Raises ConfigError if Django would not commit it.
    """
    connection: Any = connections[using]
    is_outermost = not connection.in_atomic_block
    if is_outermost:
        refuse_without_autocommit(using)
    callbacks = deque[Callable[[], object]]()
    try:
        with ending_changed(connection) if is_outermost else nullcontext(), transaction.atomic(using=using):
            begin_write(using)
            yield
            if is_outermost and connection.run_on_commit:
                # A callback that raises would prevent those behind it, which may belong to 49 other timeouts, and would
                # look like a handler that failed.
                callbacks.extend(callback for _, callback, *_ in connection.run_on_commit)
                running = firing_state.running[threading.get_ident()]
                running.callbacks = callbacks
                connection.run_on_commit = [(set(), partial(run_callbacks, running, callbacks), True)]
    except Exception:
        callbacks.clear()  # of a COMMIT that failed: as long as they exist, the next one would send their changes
        raise


def _call(running: RunningWork, call: Call, act: Callable[[], object]) -> None:
    """Run the user code `act`, note that `call` runs meanwhile, and undo what it leaves behind.

    Raise Abandoned if it was abandoned, in place of what `act` raises: a connection that was cut makes handlers raise
    errors of the database. Raise BrokenTransaction if it returns, but has left writes behind that nothing will commit.
    """
    check, has_returned = SessionCheck(), False
    outer = running.enter(call)
    try:
        check.run(act)
        has_returned = True
    finally:
        if call.observers:
            call.context = check.context
            running.contexts.append(check.context)
        running.leave(call, outer)
        left, policy = check.end(), running.work.policy
        if left.lost and has_returned:
            lost = " and ".join(left.lost)
            raise BrokenTransaction(f"It {lost}: what it wrote there and did not commit is rolled back.")
        left.log(f"{'The handler' if call.timeout_ids else 'An on_commit() callback'} of {policy}", policy)


def run_callbacks(running: RunningWork, callbacks: deque[Callable[[], object]]) -> None:
    """Run `callbacks`, each of which is removed before it begins, for a running work. Log what one raises.

    If one call of a handler alone has registered them, they run in its context, so that tracing knows what they are of.
    """
    context = running.contexts[0] if len(running.contexts) == 1 else None
    close_changed()
    while callbacks:
        act = callbacks.popleft() if context is None else partial(context.run, callbacks.popleft())
        error = raised_by(partial(_call, running, Call(), act))
        if error is not None:
            words = "An on_commit() callback raised; its transaction is committed."
            Call(context=context).log(logger.error, words, exc_info=shown(error))
        del error  # its traceback refers to this frame
