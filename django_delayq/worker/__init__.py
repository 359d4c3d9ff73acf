"""Wait until something is due, and fire it.

loop       the worker: start, wait, stop, and the order of stopping
transfer   due entries in Redis -> leased to this worker (without Redis: recovery.poll -> claimed)
dispatch   leased ids -> rows -> works -> executor -> reports -> acknowledged or put back
appetite   how much to hold at once
shares     and of whom, when there is more than that: no policy waits behind another one's crowd
leases     what runs long keeps its lease
link       whether Redis is there
periodic   leases, heartbeat, sweep, sync and pruning, in two threads
shutdown   signals of the operating system
"""

from __future__ import annotations

from django_delayq.worker.loop import Worker

__all__ = ["Worker"]
