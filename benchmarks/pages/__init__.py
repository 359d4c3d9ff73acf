"""What operators wait for, with 1,000,000 pending and 300,000 settled rows: `python -m benchmarks.pages`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


def timed(request: Callable[[], Any], times: int) -> tuple[Any, dict[str, Any]]:
    """Make a request `times` + 1 times; return the last answer, and the milliseconds of wall and CPU time of one."""
    took, cpu = [], time.process_time()
    for _ in range(times + 1):
        began = time.perf_counter()
        answer = request()
        took.append((time.perf_counter() - began) * 1000)
    assert answer.status_code == 200, (answer.status_code, answer.request)
    return answer, summary(took) | {"cpu": round((time.process_time() - cpu) * 1000 / (times + 1), 1)}


def summary(took: list[float]) -> dict[str, Any]:
    """Return the first of these milliseconds, and median and maximum of the others."""
    first, *others = took
    return {"first": round(first, 1), "p50": round(statistics.median(others), 1), "max": round(max(others), 1)}
