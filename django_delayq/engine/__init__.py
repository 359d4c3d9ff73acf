"""The delay queue on Redis. It holds only ids and due times, and imports no Django.

Names are resolved at their first use: a process that only describes changes (`Change`) does not load redis-py.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from django_delayq.engine.engine import DelayQueue, Engine
    from django_delayq.engine.records import Change, Entry, Lease, QueueStats, Reserved
    from django_delayq.engine.wakeup import Wakeup

__all__ = ["Change", "DelayQueue", "Engine", "Entry", "Lease", "QueueStats", "Reserved", "Wakeup"]

_HOMES = {"DelayQueue": "engine", "Engine": "engine", "Wakeup": "wakeup"}


if not TYPE_CHECKING:  # to a type checker, a module with __getattr__ has every name there is

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'records')}"), name)
        globals()[name] = value
        return value
