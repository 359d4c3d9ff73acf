"""Fire timeouts when they are due.

loop        the worker: start, main loop, stop
parts       what its main loop shares with the other threads
lines       policies, stops, rates -> which lines may be asked now, and for how many timeouts each
sources     due entries in Redis or due rows of the ledger -> leased or claimed for this worker
dispatch    ids -> rows -> works -> executor -> reports -> acknowledged or released
servers     whether Redis and the database work, and how far their clocks differ
sweep       what Redis should contain, and processes that died -> restored, settled; old rows deleted
watchdog    threads that hang in the database -> another connection, or the end of the process
supervisor  several workers, each in a process of its own
background  leases, heartbeat, sweep, moves of rows, sync and pruning, in two threads
"""

from __future__ import annotations

from django_delayq.worker.loop import Worker
from django_delayq.worker.supervisor import REFUSED, Supervisor

__all__ = ["REFUSED", "Supervisor", "Worker"]
