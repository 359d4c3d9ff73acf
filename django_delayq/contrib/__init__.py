"""What needs an optional package; nothing else of the library imports it."""
