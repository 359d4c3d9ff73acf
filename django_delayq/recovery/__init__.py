"""What makes good whatever went wrong: in every worker, any number at once, without a leader.

| the ledger says | Redis says | we do | where |
| --- | --- | --- | --- |
| pending, due soon or overdue | nothing | add the entry | `sweep` |
| pending, due soon or overdue | due later | move the entry forward | `sweep` |
| pending, due soon or overdue | due then, or earlier, or leased | nothing: it is looked at in any case | `sweep` |
| pending, due later than that | anything | nothing yet; an early entry is looked at and put back | `worker.transfer` |
| firing, expired | anything | count the attempt that died: retried, dead, cancelled or superseded | `sweep` |
| firing, not expired | anything | nothing: its worker lives | |
| settled, or no such row | an entry | looked at, acknowledged | `worker.dispatch` |
| pending, due | (Redis is away, or there is none) | claim the row and fire it | `poll` |
| settled long ago | | delete the row | `prune` |
| (an object whose policy wants another ledger) | | write the ledger | `django_delayq.arming.sync` |

Everything may be repeated, and stopped anywhere. Locks only save work: who has none may be slow, never wrong.
"""
