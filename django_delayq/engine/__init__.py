"""The delay queue on Redis: ids and due times only. Imports no Django; usable and testable alone."""

from django_delayq.engine.engine import Engine
from django_delayq.engine.queue import DelayQueue
from django_delayq.engine.records import Change, Entry, Lease, QueueStats, Reserved
from django_delayq.engine.wakeup import Wakeup

__all__ = ["Change", "DelayQueue", "Engine", "Entry", "Lease", "QueueStats", "Reserved", "Wakeup"]
