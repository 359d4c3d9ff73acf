"""The commands for operators, each as a whole but for the start of Python and Django: arguments, queries and output.

Commands that change something run once, for about 8,000 rows (half a day of deadlines) and for one.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import time
from collections.abc import Sequence
from datetime import timedelta

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
        "list of a search": ("delayq_list", "--search", "N-777"),
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
    """Return the duration of a command in seconds; ignore its exit code: a finding of the doctor, or a refusal."""
    from django.core.management import CommandError, call_command

    began = time.perf_counter()
    with contextlib.suppress(SystemExit, CommandError):
        call_command(*words, stdout=io.StringIO(), stderr=io.StringIO())
    return time.perf_counter() - began


def figures(times: int) -> dict[str, dict[str, object]]:
    """Return the milliseconds of each command."""
    found: dict[str, dict[str, object]] = {}
    for name, words in reading().items():
        taken = [1000 * run(words) for _ in range(times)]
        found[name] = {"p50": round(statistics.median(taken)), "max": round(max(taken))}
    for name, words in changing().items():
        found[name] = {"once": round(1000 * run(words))}
    return found
