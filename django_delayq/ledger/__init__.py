"""The only code that writes `Timeout` rows. Each transition is a compare-and-set or holds the lock of its row.

`routing` chooses the database, `subjects` identifies what a row is about, `locking` fixes the order of locks, and
`paging` applies it to many rows. `writing` has the statements of schedulers and operators, `marking` and `claiming`
those of workers, `controls` what operators have put in force for policies. `outbox` notifies Redis and sends signals
after the commit. What an event changes is in `rounds`, which has no database.
"""
