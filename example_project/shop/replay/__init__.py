"""Real orders, lived through again: read from CSV files of the public Olist format, or made up.

`records` reads, `steps` applies one event to the shop, `virtual` plays on a virtual clock, `live` in
compressed real time through real workers, `results` counts the ledger and compares it with the orders.
"""
