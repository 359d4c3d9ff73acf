"""Arm, move and cancel the timeouts of automatic policies after a save, a delete or a sync."""
