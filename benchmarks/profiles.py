"""Where the time goes: each work of django-delayq on PostgreSQL beside its floor, and its profile by module."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from cProfile import Profile
from typing import Any, NamedTuple

from benchmarks.figures import quantile, spread
from benchmarks.floor import TOGETHER
from benchmarks.harness import Column, Run, Work
from benchmarks.rivals.base import Meter
from benchmarks.targets import CPU, FLOOR, FLOOR_SERVER, FLOOR_WALL, SERVER, WAKE_UP, WALL

LEAST_PART = 0.02
"""A module below this part of the time of every work is not listed on its own."""
OTHER, JSON = "other Python", "json, datetime"
PLACES = (
    ("/benchmarks/", "handlers and loop of the benchmark"),
    ("/django/db/", "django.db"),
    ("/site-packages/django/", "other Django"),
    ("psycopg", "psycopg"),
    ("/redis/", "redis-py"),
    ("hiredis", "redis-py"),
    ("json", JSON),
    ("datetime", JSON),
)


def place_of(name: str, otherwise: str = OTHER) -> str:
    """Return the package, or the module of django-delayq, of a file or of the name of a built-in function."""
    _, found, module = name.rpartition("/django_delayq/")
    if found:
        return "django_delayq." + module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return next((place for part, place in PLACES if part in name), otherwise)


def profiled(operation: Callable[[], Any]) -> dict[str, float]:
    """Return the CPU seconds of the metered blocks of an operation by package or module, less their baselines.

    Runs in the client process. A built-in function counts for the module that calls it, unless it belongs to a driver.
    """
    Meter.profiles = measured, baseline = Profile(time.thread_time), Profile(time.thread_time)
    try:
        operation()
    finally:
        Meter.profiles = None
    seconds: dict[str, float] = defaultdict(float)
    for profile, sign in ((measured, 1), (baseline, -1)):
        for entry in profile.getstats():
            if isinstance(entry.code, str):
                continue
            place = place_of(entry.code.co_filename)
            seconds[place] += sign * entry.inlinetime
            for inner in entry.calls or ():
                if isinstance(inner.code, str):
                    seconds[place_of(inner.code, place)] += sign * inner.inlinetime
    return dict(seconds)


class Case(NamedTuple):
    """A work that is measured, profiled and compared with its floor. COUNT stands for the number of calls."""

    key: str
    title: str
    prepare: Sequence[Sequence[Any]]
    operation: Sequence[Any]
    figure: str = "cpu_us"
    is_recorded: bool = True
    """Whether the statements of the operation are its floor."""


COUNT = "COUNT"
TASKS = (("prepare", COUNT),)
CASES = (
    Case("schedule", "schedule one", TASKS, ("schedule_one", COUNT)),
    Case("inside", "in the caller's transaction", TASKS, ("schedule_inside", COUNT)),
    Case("save", "save, additional", (("prepare", COUNT, "Plain"),), ("save_unchanged", COUNT), "more_us", False),
    Case("alone", "fire one alone", (("enqueue", "note", COUNT),), ("fire", COUNT)),
    Case("settle", "with condition and save", (("enqueue", "settle", COUNT),), ("fire", COUNT)),
    Case(
        "together",
        f"fire {TOGETHER} in one transaction, each",
        (("enqueue", "note_together", COUNT),),
        ("fire", COUNT, TOGETHER),
    ),
    Case("bulk", "schedule in bulk, each", TASKS, ("bulk", COUNT), is_recorded=False),
)


def _measured(run: Run, case: Case, samples: dict[str, dict[str, list[float]]]) -> None:
    """Add the samples of one work. The first run only loads code, opens connections and prepares statements."""
    contestant = run.contestant("delayq")
    count = {"bulk": max(2_000, run.sizes.bulk // 5), "together": run.sizes.calls * 5}.get(case.key, run.sizes.calls)

    def call(request: Sequence[Any], operation: str = "") -> Any:
        return contestant.call(*filter(None, [operation]), *(count if one == COUNT else one for one in request))

    def prepare() -> None:
        contestant.call("clear")
        for request in case.prepare:
            call(request)

    prepare()
    call(case.operation)
    if case.is_recorded:
        prepare()
        call(case.operation, "record")
    for _ in range(run.sizes.rounds):
        prepare()
        found = call(case.operation)
        if case.is_recorded:
            prepare()
        floor = contestant.call("floor", case.key, count)
        figures = {CPU: found[case.figure], FLOOR: floor["cpu_us"]}
        if "per_second" in found:
            figures |= {WALL: 1e6 / found["per_second"], FLOOR_WALL: 1e6 / floor["per_second"]}
            figures |= {SERVER: found["server_us"], FLOOR_SERVER: floor["server_us"]}
        for row, value in figures.items():
            samples.setdefault(row, {}).setdefault(case.key, []).append(value)
    prepare()
    seconds = call(case.operation, "profile")
    scale = spread(samples[CPU][case.key]).median / sum(seconds.values())
    for place, used in seconds.items():
        samples.setdefault(place, {})[case.key] = [used * scale]


def _profile(run: Run) -> dict[str, dict[str, list[float]]]:
    rows = (CPU, FLOOR, SERVER, FLOOR_SERVER, WALL, FLOOR_WALL)
    samples: dict[str, dict[str, list[float]]] = {row: {} for row in rows}
    late = []
    for _ in range(50):
        began = time.perf_counter()
        time.sleep(0.005)
        late.append((time.perf_counter() - began) * 1e6 - 5000)
    samples[WAKE_UP] = {"alone": [quantile(late, 0.5)]}
    heads = list(samples)
    for case in CASES:
        _measured(run, case, samples)
    run.contestant("delayq").call("clear")
    totals = {key: spread(values).median for key, values in samples[CPU].items()}
    parts = {row: max(one[key][0] / totals[key] for key in one) for row, one in samples.items() if row not in heads}
    rest: dict[str, list[float]] = defaultdict(lambda: [0.0])
    for row in [row for row, part in parts.items() if part < LEAST_PART]:
        for key, (value,) in samples.pop(row).items():
            rest[key][0] += value
        del parts[row]
    listed = sorted(parts, key=lambda row: (row.startswith("django_delayq"), -parts[row]))
    return {row: samples[row] for row in (*heads, *listed)} | {"all other modules": dict(rest)}


WORKS = (
    Work(
        "profile",
        "Where the time goes",
        "The *floor* is what the same statements cost without the library, in the same minutes: those that a call has "
        "sent are recorded, and sent again by Django's cursor for the same rows, with the handler's own save by the "
        "ORM. Two floors differ: for a save, one SELECT of the object with its pending row; in bulk, one INSERT ... "
        "SELECT of such rows. *Server* is the process of PostgreSQL that serves the connection. Below the floors: the "
        "CPU us of one call by package, and for django-delayq by module, measured with cProfile and scaled to the time "
        "without it. A built-in function counts for its caller.",
        [Column(case.key, case.title) for case in CASES],
        whole=_profile,
        minutes=1,
    ),
)
