"""Template tags of the shop."""
