"""What application code calls: schedule, cancel, guard and read timeouts."""
