"""Steps before the handler of a policy acts, and its grace."""
