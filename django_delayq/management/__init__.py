"""The commands: arguments in, one call out. What several of them need stands beside them."""
