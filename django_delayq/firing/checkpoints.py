"""The named steps of a firing, in order, where a test may stop it or kill its process.

| step | what is true then |
| --- | --- |
| `planned` | the rows are read, nothing is locked |
| `charged` | a suspect's attempt is counted and committed |
| `begun` | the transaction has begun |
| `locked` | the objects are locked |
| `checked` | the rows are locked too, and the conditions known |
| `marked` | the rows are `fired` in the transaction (with `atomic=False`: `firing`) |
| `handled` | the handler has returned (with `atomic=False`: after `committed`) |
| `committed` | the transaction is committed |
| `settled` | with `atomic=False`: `fired` is committed |
| `undone` | the handler raised, and its work is undone |
| `recorded` | the failed attempt is committed |
| `reported` | all is done, only the acknowledgement in Redis is missing |
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = (
    "planned",
    "charged",
    "begun",
    "locked",
    "checked",
    "marked",
    "handled",
    "committed",
    "settled",
    "undone",
    "recorded",
    "reported",
)

_hook: Callable[[str], None] | None = None
_last: dict[int, str] = {}


def reach(step: str) -> None:
    """A firing in this thread has come to `step`."""
    _last[threading.get_ident()] = step
    if _hook is not None:
        _hook(step)


def step_of(thread: int) -> str:
    """The step that the firing in `thread` reached last; "planned" if it has only begun."""
    return _last.get(thread, STEPS[0])


def forget_step() -> None:
    """The firing in this thread has ended."""
    _last.pop(threading.get_ident(), None)


def set_hook(hook: Callable[[str], None] | None) -> None:
    """Have `hook` called with the name of every step of every firing in this process; None: no longer."""
    global _hook  # noqa: PLW0603 - one hook per process, for tests
    _hook = hook
