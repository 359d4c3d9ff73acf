"""Replay orders from CSV files in the public Olist format, or generated orders.

`records` reads the files, `steps` applies one event to the shop, `virtual` plays on a virtual clock, `live` in
compressed real time with real workers, `results` counts the timeouts, and `checking` compares them with the orders.
"""
