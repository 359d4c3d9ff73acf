"""The only code that writes `Timeout` rows. Each transition is a compare-and-set or holds the lock of its row.

`routing` chooses the database, `subjects` identifies what a row is about, `locking` fixes the order of locks, `rounds`
applies it to one subject and `paging` to many rows. `writing` has the statements of schedulers and operators,
`settling` and `claiming` those of workers, `columns` what they write, `stops` what stops a policy. `outbox` notifies
Redis and sends signals after the commit.
"""
