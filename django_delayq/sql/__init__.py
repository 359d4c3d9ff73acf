"""What each database needs: dialects, statements, locks, connections, a clock. Nothing here knows the states."""
