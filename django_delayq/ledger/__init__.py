"""The only writer of `Timeout` rows: each transition is one compare-and-set that says whether it won.

`subjects` names the slot of a row, `locking` fixes the order of locks, `writing` holds what schedulers may
do with a row (insert, move, cancel), `settling` what a firing may do with it.
"""
