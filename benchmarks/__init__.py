"""Benchmarks, for example `make bench`. Each also measures the machine itself, for comparison."""
