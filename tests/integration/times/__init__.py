"""Deadlines in spans: working hours, wall time, dates, quiet hours."""
