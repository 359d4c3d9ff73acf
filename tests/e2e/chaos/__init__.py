"""Chaos: real workers, producers and servers under seeded faults, and an oracle that knows none of the product's code.

In reading order: `run` (the whole of it), `stage` (servers, proxies, processes), `producing` (what applications
do), `faults` (what breaks), `audit` and `evidence` (what is known afterwards), `oracle` (the verdict).
"""
