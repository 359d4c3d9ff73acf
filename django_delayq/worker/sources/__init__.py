"""Where due timeouts come from: Redis while it works, the ledger while it does not.

`redis.Sources` is both as one. `redis.RedisSource` leases entries, `ledger.LedgerSource` claims rows, and
`redis.Fairness` claims rows of policies that would wait behind the backlog of another policy. `ledger.PacedSource`
claims rows of policies with a rate.

`RedisSource`, `LedgerSource` and `Sources` have the same methods. They belong to the thread of the worker, except
`extend`, which any thread may call. Each may be called again after an error:

take      lease or claim about so many due timeouts for one `LEASE`
resolve   note which of them are settled, and when others are to be delivered again; other ids are ignored
flush     send what was noted, so that the results of many works are sent together
extend    extend what is not resolved to one `LEASE` from now
"""
