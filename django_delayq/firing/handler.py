"""Run the code of the project in a firing: a handler, or an `on_commit` callback.

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
import inspect
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from asgiref.sync import async_to_sync
from django.db import connections, transaction

from django_delayq.firing.around import around, raised_by
from django_delayq.firing.leftovers import BrokenTransaction, SessionCheck, close_changed, ending_changed
from django_delayq.firing.state import firing_state
from django_delayq.firing.works import Call, RunningWork
from django_delayq.ledger.errors import shown
from django_delayq.ledger.left_open import refuse_without_autocommit
from django_delayq.ledger.locking import begin_write
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


def call_handler(
    policy: TimeoutPolicy[Any],
    target: Any,
    timeouts: Timeout | list[Timeout],
    call: Call,
    function: Callable[..., Any] | None = None,
) -> Any:
    """Call the handler of the policy, or its other `function`, and await the result if it is awaitable; return it.

    What is raised passes. The ORM calls of an async handler come back to this thread, and so to this connection and
    transaction.
    """
    running, results = firing_state.running[threading.get_ident()], list[Any]()

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
                firing_state.running[threading.get_ident()].callbacks = callbacks
                connection.run_on_commit = [(set(), partial(run_callbacks, callbacks), True)]
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


def run_callbacks(callbacks: deque[Callable[[], object]]) -> None:
    """Run `callbacks`, each of which is removed before it begins, in a thread that runs a work. Log what one raises.

    If one call of a handler alone has registered them, they run in its context, so that tracing knows what they are of.
    """
    running = firing_state.running[threading.get_ident()]
    context = running.contexts[0] if len(running.contexts) == 1 else None
    close_changed()
    while callbacks:
        act = callbacks.popleft() if context is None else partial(context.run, callbacks.popleft())
        error = raised_by(partial(_call, running, Call(), act))
        if error is not None:
            words = "An on_commit() callback raised; its transaction is committed."
            Call(context=context).log(logger.error, words, exc_info=shown(error))
        del error  # its traceback refers to this frame
