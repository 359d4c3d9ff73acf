"""Write `benchmarks/results.json`, `docs/benchmarks.md` and its plots from the results of the works."""

from __future__ import annotations

import contextlib
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.contestants import RIVALS
from benchmarks.figures import Spread, number, spread
from benchmarks.harness import Work
from benchmarks.plots import bars
from benchmarks.targets import MISSED, NotMeasured, Samples, judged, median

OWN = "django-delayq"
GROUPS = {
    "": "",
    "unsynced": "PostgreSQL with `fsync` off",
    "ledger": "PostgreSQL without Redis",
    "pure": "PostgreSQL with psycopg in pure Python",
}
"""The tables of a work by the suffix of contestants; SQLite and MariaDB share one."""
TOLERANCE = 1.1
INTRODUCTION = """\
`make bench` writes this page. It runs django-delayq and seven task queues on the same works, on this machine and in
the same minutes: in each round every contestant does the work once, and each round begins with another contestant. A
figure is the median of the rounds, with the smallest and the largest one in brackets. Compare the figures of one table
with each other: absolute figures depend on the machine and on other processes.

The *ledger* is the table of timeouts in your database. All contestants use the same PostgreSQL server, with a database
each, and a Redis each. PostgreSQL has the default settings of its configuration, so a commit waits for the disk
(`fsync` on). Works that depend on the disk are repeated with `fsync` off, in rows of their own. Redis does not
persist, as docs/worker.md recommends. All use the same versions of Python, Django, psycopg and redis-py. CPU time is
that of the process that makes the calls, or of the workers, without that of the servers.

A contestant that fails is listed with the reason. `-` means that the contestant has no such function.
"""
NOTES = Path(__file__).parent / "notes.md"
"""What the page explains below the targets, written by hand."""
BEGIN, END = "<!-- bench -->", "<!-- /bench -->"
FIGURES = {
    "schedule one, CPU us": ("schedule", "cpu_us"),
    "schedule in bulk, per second": ("bulk", "per_second"),
    "lag of one worker, p50, ms": ("lag", "p50"),
    "p99, ms": ("lag", "p99"),
    "handlers that do nothing, per second": ("drain", "nothing_per_second"),
    "lock, check and save an object, per second": ("drain", "settle_per_second"),
    "the same with `batch=500`": ("drain", "batch_per_second"),
}
"""The rows of the table in the pages `WITH_FIGURES`: work and column."""
WITH_FIGURES = ("README.md", "docs/speed.md")
SETTINGS = """\
Each rival runs with the settings for two cores that its own documentation describes, django-delayq with its defaults.
All of them use PostgreSQL with the default `OPTIONS` of Django, and keep their connections (`CONN_MAX_AGE = None`).
django-delayq then [prepares statements itself](databases.md#prepared-statements). Where a work is about one worker,
that of django-delayq runs with `--processes 1`: the lag, the CPU of a worker process, the idle worker, and memory.
"""


def samples_of(results: Mapping[str, Any]) -> Samples:
    """Return the samples of all works, by work, contestant and column."""
    return {key: found["samples"] for key, found in results["works"].items()}


def write(results: Mapping[str, Any], works: Sequence[Work], root: Path) -> None:
    """Write the JSON, the page and the plots below `root`, replacing those of the last run."""
    (root / "benchmarks" / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    images = root / "docs" / "images"
    images.mkdir(parents=True, exist_ok=True)
    measured = [work for work in works if work.key in results["works"]]
    for work in measured:
        if chart := plot(work, results["works"][work.key]):
            (images / f"bench-{work.key}.svg").write_text(chart)
    (root / "docs" / "benchmarks.md").write_text("\n".join(page(results, measured)) + "\n")
    for path in (root / name for name in WITH_FIGURES):
        if path.exists():
            path.write_text(with_figures(path.read_text(), results))


def with_figures(text: str, results: Mapping[str, Any]) -> str:
    """Return the text of a page with the table of this run between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join([before + BEGIN, *_figures(samples_of(results)), END]) + after if rest else text


def _figures(samples: Samples) -> Iterator[str]:
    """Yield the table of the pages `WITH_FIGURES`: contestants in columns, without those that no work has measured."""
    names = {name for work, _ in FIGURES.values() for name in samples.get(work, {})}
    shown = [name for name in ("delayq", *RIVALS) if name in names]
    rows = []
    for title, (work, key) in FIGURES.items():
        columns = (samples.get(work, {}).get(name, {}) for name in shown)
        rows.append([title, *(number(spread(found[key]).median) if key in found else "-" for found in columns)])
    yield from table(
        ["", *("**django-delayq**" if name == "delayq" else name.replace("_", "-") for name in shown)], rows
    )


def page(results: Mapping[str, Any], works: Sequence[Work]) -> Iterator[str]:
    """Yield the lines of the page."""
    yield from ("# Benchmarks", "", INTRODUCTION)
    yield from _machine(results)
    yield from ("## Targets", "", *targets(samples_of(results)), "", *NOTES.read_text().splitlines(), "")
    yield from _compared(results, works)
    for work in works:
        yield from _work(work, results["works"][work.key])
    yield from ("## Capacity", "", *_capacity(results), "")
    yield from ("## Settings of the contestants", "", SETTINGS)
    yield from table(("contestant", "version", "settings"), list(_settings(results)))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield "| " + " | ".join(header) + " |"
    yield "|" + " --- |" * len(header)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "/") for cell in row) + " |"


def plot(work: Work, found: Mapping[str, Any]) -> str:
    """Return the chart of a work, or "" if it has none."""
    titles = {column.key: column.title for column in work.columns}
    values: dict[str, Spread] = {}
    for name, columns in found["samples"].items():
        if work.plot in columns and "@" not in name:
            values[found["titles"].get(name, name)] = spread(columns[work.plot])
    return bars(f"{work.title}: {titles[work.plot]}", values, OWN) if values else ""


def _machine(results: Mapping[str, Any]) -> Iterator[str]:
    machine, versions = results["machine"], results["versions"]
    quick = [key for key, found in results["works"].items() if found["quick"]]
    yield from table(
        ("", ""),
        [
            ("command", f"`{results['command']}`"),
            ("machine", f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB"),
            *([("disk", f"fdatasync after 8 kB: {number(disk)} ms")] if (disk := machine.get("fsync_ms")) else []),
            ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
            *([("quick run, with small sizes", ", ".join(quick))] if quick else []),
        ],
    )
    yield ""


def targets(samples: Samples) -> Iterator[str]:
    """Yield the lines of the table of targets, and why some are missed."""
    found = judged(samples)
    yield from table(
        ("work", "target", "measured", ""),
        [(one["work"], one["goal"], one["measured"], one["verdict"]) for one in found],
    )
    if missed := [one for one in found if one["verdict"] == MISSED and one["why"]]:
        yield from (
            "",
            "Why a target is missed; the section *Where the time goes* has the floors and the profiles:",
            "",
        )
        for one in missed:
            yield from textwrap.wrap(f"* **{one['work']}**: {one['why']}", 120, subsequent_indent="  ")


def _compared(results: Mapping[str, Any], works: Sequence[Work]) -> Iterator[str]:
    """Yield the verdict on the contestant "earlier": whether a work is slower now, by more than noise explains."""
    measured, slower, title = [], [], ""
    for work in works:
        found = results["works"][work.key]
        samples = found["samples"]
        for name in [name for name in samples if name.startswith("earlier")]:
            title, now = found["titles"][name], samples.get(name.replace("earlier", "delayq"), {})
            database = GROUPS.get(suffix := name.partition("@")[2], suffix) or "PostgreSQL"
            for column in work.columns:
                if column.better and column.key in samples[name] and column.key in now:
                    measured.append(work.title)
                    factor = times_slower(spread(now[column.key]), spread(samples[name][column.key]), column.better)
                    if factor > TOLERANCE:
                        slower.append((work.title, column.title, database, f"{number(factor)}x"))
    if measured:
        verdict = f"{len(slower)} of {len(measured)} figures are slower" if slower else "No work is slower"
        about = (
            f"{verdict} than in {title.partition(' on ')[0]}. Slower means: by more than {TOLERANCE - 1:.0%}, and by "
            f"more than the spread of the rounds. Compared: {', '.join(dict.fromkeys(measured))}, "
            f"{len(measured)} figures. The tables below have both, on PostgreSQL, SQLite and MariaDB."
        )
        yield from ("## Compared with the earlier release", "", *textwrap.wrap(about, 120), "")
    if slower:
        yield from (*table(("work", "figure", "database", "slower"), slower), "")


def times_slower(now: Spread, earlier: Spread, better: str) -> float:
    """Return how many times slower the median is now; 1 if the samples overlap, or are not positive."""
    if better == "more":
        now, earlier = earlier, now
    least, most = min(now.least, now.most), max(earlier.least, earlier.most)
    return now.median / earlier.median if least > most > 0 else 1.0


def _work(work: Work, found: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"## {work.title}", "", *textwrap.wrap(work.about, 120), "")
    for heading, names in _groups(found):
        columns = [column for column in work.columns if any(column.key in found["samples"].get(n, ()) for n in names)]
        if not columns:
            continue
        if heading:
            yield from (f"### {work.title}: {heading}", "")
        rows = [
            [found["titles"].get(name, name), *(_cell(found["samples"][name], c.key) for c in columns)]
            for name in names
        ]
        yield from table(["", *(column.title for column in columns)], rows)
        yield ""
    if found["failed"]:
        failures = (f"{found['titles'].get(name, name)}: {reason}" for name, reason in found["failed"].items())
        yield from (*(f"* failed: `{line.replace('`', '')}`" for line in failures), "")
    if plot(work, found):
        yield from (f"![{work.title}: a bar for each contestant](images/bench-{work.key}.svg)", "")
    noise = found["noise_ms"]
    late = (
        f"; a sleep of 20 ms ended late by {number(noise['p50'])} / {number(noise['p99'])} ms (p50 / p99)"
        if noise
        else ""
    )
    rounds = max((len(values) for one in found["samples"].values() for values in one.values()), default=0)
    yield from (f"Measured on {found['date']}, up to {rounds} times, in {number(found['seconds'])} s{late}.", "")


def _groups(found: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield the contestants on PostgreSQL, and then those with other settings, drivers and databases."""
    names = list(found["samples"])
    for suffix, title in GROUPS.items():
        yield title, [name for name in names if name.partition("@")[2] == suffix]
    yield "SQLite and MariaDB", [name for name in names if name.endswith(("@sqlite", "@mariadb"))]


def _cell(columns: Mapping[str, Sequence[float]], key: str) -> str:
    if key not in columns:
        return "-"
    one = spread(columns[key])
    return number(one.median) if one.count == 1 else f"{number(one.median)} ({number(one.least)} to {number(one.most)})"


CAPACITY = {
    "cpu_us_per_firing": (
        "drain/delayq/settle_us",
        "CPU us of a worker for a timeout with a condition whose handler saves the object",
    ),
    "firings_per_second_two_processes": (
        "drain/delayq/settle_per_second",
        "such timeouts per second with default settings: a worker process for each of two cores",
    ),
    "cpu_us_per_schedule": (
        "schedule/delayq/cpu_us",
        "CPU us of the calling process for `schedule_timeout` outside a transaction",
    ),
    "ledger_bytes_per_row": (
        "stored/delayq/database_bytes",
        "bytes of the ledger per row in PostgreSQL, heap and indexes",
    ),
    "redis_bytes_per_pending": ("stored/delayq/redis_bytes", "bytes of Redis for a timeout due within `HORIZON`"),
    "connections_per_worker": (
        "growth/1,000 pending/connections",
        "database connections of an idle worker process with four threads",
    ),
    "worker_memory_mb": ("growth/1,000 pending/memory_mb", "resident memory of a worker process, MB"),
}
"""The constants of a capacity estimate: column and meaning. `delayq_doctor` has copies of some."""


def capacity(samples: Samples) -> dict[str, float]:
    """Return the constants from which a capacity estimate can be made; those that were not measured are absent."""
    found = {}
    for name, (place, _) in CAPACITY.items():
        with contextlib.suppress(NotMeasured):
            found[name] = round(median(samples, place), 1)
    return found


def _capacity(results: Mapping[str, Any]) -> Iterator[str]:
    yield "For an estimate of your own. `benchmarks/results.json` has them under `capacity`."
    yield ""
    rows = [(CAPACITY[name][1], number(value)) for name, value in results["capacity"].items()]
    yield from table(("", "measured"), rows)


def _settings(results: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for one in results["contestants"]:
        linked = "; ".join(f"{what} ([source]({source.removeprefix('docs/')}))" for what, source in one["settings"])
        yield one["title"], one["version"], linked
