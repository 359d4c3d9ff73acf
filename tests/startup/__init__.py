"""A small project, started as a web process starts it: what that loads, and what it costs."""
