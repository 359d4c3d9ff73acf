"""What a save, a delete or a sync does to the timeouts of automatic policies."""
