"""Repair of differences between the ledger and Redis: by every worker, any number at once, without a leader.

| the ledger contains | Redis contains | action | where |
| --- | --- | --- | --- |
| pending, due soon or overdue | no entry | add the entry | `sweep` |
| pending, due soon or overdue | a later entry | move the entry forward | `sweep` |
| pending, due soon or overdue | an entry then, earlier, or leased | none: the row is checked in any case | `sweep` |
| pending, due later than that | anything | none yet; an early entry is checked and released | `worker.dispatch` |
| firing, expired | anything | count the failed attempt: retried, dead, cancelled or superseded | `sweep` |
| firing, not expired | anything | none: its worker is running | |
| settled, or no such row | an entry | check and acknowledge it | `worker.dispatch` |
| pending, due | (unavailable, or no Redis) | claim the row and fire it | `worker.sources.ledger` |
| settled long ago | | delete the row | `sweep.prune` |
| (an object whose policy requires another ledger) | | update the ledger | `django_delayq.arming.sync` |

Every action may be repeated, and stopped anywhere. Turns only save work: a worker without one is never wrong.
"""
