"""Where due timeouts come from: Redis while it works, the ledger while it does not.

`redis.Sources` is both as one. `redis.RedisSource` leases entries. `ledger.LedgerSource` claims rows, always those of
policies with a rate.

Both have the same methods. They belong to the thread of the worker, except `extend`, which any thread may call. Each
may be called again after an error:

due           the lines that have due timeouts, of those that may be asked
take          lease or claim at most so many due timeouts of each line for one `LEASE`
seconds_left  how long to wait until lines are due again
resolve       note which timeouts are settled, and when others are to be delivered again; other ids are ignored
flush         send what was noted, so that the results of many works are sent together
extend        extend what is not resolved to one `LEASE` from now
"""
