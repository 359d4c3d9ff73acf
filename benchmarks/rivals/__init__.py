"""One adapter per contestant: how it schedules, cancels and runs, with which documented settings."""
