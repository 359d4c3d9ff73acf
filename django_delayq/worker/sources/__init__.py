"""Where due timeouts come from: Redis while it answers, the ledger while it does not."""
