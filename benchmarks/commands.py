"""Measure the commands for operators with 1,000,000 pending and 300,000 settled rows.

DELAYQ_TEST_DB=postgresql python benchmarks/commands.py [--rows 1000000] [--times 3]

Each figure is a whole command without the start of Python and Django: arguments, queries and output. Commands that
change something run once, for about 8,000 rows (half a day of deadlines) and for one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.admin import fill
from benchmarks.ground import ground, show

RARE, FREQUENT = "testapp.parcel.chase", "testapp.order.remind"
SURE = ("--yes", "--reason", "benchmark")


def reading() -> dict[str, Sequence[str]]:
    """Return the commands that only read."""
    return {
        "status": ("delayq_status",),
        "status --json": ("delayq_status", "--json"),
        "policies": ("delayq_policies",),
        "doctor": ("delayq_doctor",),
        "list": ("delayq_list", "--all"),
        "list of a policy": ("delayq_list", "--policy", FREQUENT),
        "list of a state": ("delayq_list", "--state", "dead", "--all"),
        "list of an object": ("delayq_list", "--model", "testapp.Order", "--object", "777"),
        "list of a key": ("delayq_list", "--key", "part-5007"),
        "list of a rare queue": ("delayq_list", "--queue", "rare"),
        "list of a window": ("delayq_list", *window(20)),
        "cancel --dry-run": ("delayq_cancel", *window(20), "--dry-run"),
        "replan --dry-run": ("delayq_replan", "testapp.order.cancel_unpaid", "--declared", *_mode("recompute")),
        "prune --dry-run": ("delayq_prune", "--dry-run"),
    }


def _mode(mode: str) -> Sequence[str]:
    return ("--mode", mode, "--dry-run")


def changing() -> dict[str, Sequence[str]]:
    """Return the commands that change something."""
    return {
        "postpone one": ("delayq_postpone", "--by", "1h", "--id", "900001", *SURE),
        "postpone 8,000": ("delayq_postpone", "--by", "1h", *window(10), *SURE),
        "fire one": ("delayq_fire", "--id", "900002", *SURE),
        "fire 8,000": ("delayq_fire", *window(12), *SURE),
        "cancel one": ("delayq_cancel", "--id", "900003", *SURE),
        "cancel 8,000": ("delayq_cancel", *window(14), *SURE),
        "retry 3,000 dead": ("delayq_retry", "--state", "dead", "--all", *SURE),
        "pause": ("delayq_pause", RARE, *SURE),
        "resume": ("delayq_resume", RARE, *SURE),
        "hold": ("delayq_hold", RARE, *SURE),
        "resume --no-shift": ("delayq_resume", RARE, "--no-shift", *SURE),
    }


def window(days: int) -> Sequence[str]:
    """Return the options that select half a day of deadlines, `days` ahead."""
    from django.utils import timezone

    begin = timezone.now() + timedelta(days=days)
    return ("--due-after", begin.isoformat(), "--due-before", (begin + timedelta(hours=12)).isoformat())


def run(words: Sequence[str]) -> float:
    """Return the duration of a command in seconds; ignore its exit code, which may be a finding of the doctor."""
    from django.core.management import call_command

    began = time.perf_counter()
    with contextlib.suppress(SystemExit):
        call_command(*words, stdout=io.StringIO(), stderr=io.StringIO())
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    with ground():
        from tests.testapp.models import Order

        Order.objects.bulk_create([Order(pk=pk) for pk in range(1, 50_001)], batch_size=5_000)
        fill(options.rows, options.rows * 3 // 10)
        figures: dict[str, dict[str, object]] = {}
        for name, words in reading().items():
            taken = [run(words) for _ in range(options.times)]
            figures[name] = {"ms p50": round(1000 * statistics.median(taken)), "max": round(1000 * max(taken))}
        for name, words in changing().items():
            figures[name] = {"ms once": round(1000 * run(words))}
        show(f"commands with {options.rows} pending", figures)


if __name__ == "__main__":
    main()
