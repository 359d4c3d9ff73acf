"""What `make bench` measures, in this order."""

from __future__ import annotations

from benchmarks import profiles
from benchmarks.works import calls, pages, pending, workers

WORKS = (*calls.WORKS, *profiles.WORKS, *workers.WORKS, *pending.WORKS, *pages.WORKS)
