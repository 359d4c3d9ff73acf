"""Named checkpoints of a firing, where tests stop it or kill its process, and long runs are located.

| checkpoint | what is true then |
| --- | --- |
| `planned` | the rows are read, nothing is locked |
| `charged` | the attempt of a suspect is counted and committed |
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

import threading
from collections.abc import Callable

from django_delayq.firing.state import firing_state

CHECKPOINTS = (
    "planned", "charged", "begun", "locked", "checked", "marked",
    "handled", "committed", "settled", "undone", "recorded", "reported",
)  # fmt: skip

_hook: Callable[[str], None] | None = None


def reach(checkpoint: str) -> None:
    """Note that the firing in this thread has reached `checkpoint`, and call the hook of a test."""
    if (running := firing_state.running.get(threading.get_ident())) is not None:
        running.checkpoint = checkpoint
    if _hook is not None:
        _hook(checkpoint)


def set_hook(hook: Callable[[str], None] | None) -> None:
    """Call `hook` with the name of every checkpoint that a firing of this process reaches. None removes it."""
    global _hook  # noqa: PLW0603 - one hook per process, for tests
    _hook = hook
