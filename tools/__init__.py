"""Small standard-library helpers for working on the project; none of this is in the wheel."""
