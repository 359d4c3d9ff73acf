"""Tests of the example shop: its pages, its replay of recorded orders, and the oracle that the replay must equal."""
