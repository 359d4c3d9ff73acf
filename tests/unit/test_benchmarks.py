"""The harness of `make bench`: statistics, rounds in turn, verdicts, and the page."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import harness, report
from benchmarks.contestants import VARIANTS, Failed
from benchmarks.figures import number, quantile, spread
from benchmarks.harness import QUICK, Column, Run, Work
from benchmarks.profiles import place_of, profiled
from benchmarks.rivals.base import Meter
from benchmarks.targets import TARGETS, Part, Target, judged
from benchmarks.works import WORKS
from django_delayq.times.lengths import parse_delay
from tests.docs.pages import ROOT, read


def test_figures_are_medians_with_their_spread_nearest_ranks_and_numbers_of_three_digits() -> None:
    assert spread([3.0, 1.0, 8.0]) == (3.0, 1.0, 8.0, 3)
    assert spread([1.0, 2.0]).median == 1.5
    with pytest.raises(ValueError, match="no samples"):
        spread([])
    ranks = [quantile(list(range(100, 0, -1)), part) for part in (0.0, 0.5, 0.99, 0.991, 1.0)]
    assert ranks == [1, 50, 99, 100, 100]
    shown = [number(value) for value in (1234.5, 100, 12.34, 1.234, 0.1234, -86)]
    assert shown == ["1,234", "100", "12.3", "1.23", "0.123", "-86.0"]


class Names:
    """An arena whose contestants are names, of which "earlier" does not exist."""

    def exists(self, name: str) -> bool:
        return not name.startswith("earlier")

    def contestant(self, name: str) -> Any:
        return SimpleNamespace(name=name, title=name.upper())


def run_of() -> Run:
    arena: Any = Names()
    return Run(arena, QUICK, False, {})


def test_each_round_begins_with_another_contestant_and_a_failure_ends_only_its_own() -> None:
    order: list[str] = []

    def step(run: Run, contestant: Any) -> dict[str, float]:
        order.append(contestant.name)
        if contestant.name == "b" and len(order) > 3:
            raise Failed("it broke")
        return {"us": float(len(order))}

    work = Work("w", "Work", "About.", (Column("us", "us"),), ("a", "earlier", "b", "c"), step, rounds=lambda sizes: 3)
    found = harness.measure(work, run_of())
    assert order == ["a", "b", "c", "b", "c", "a", "c", "a"]
    assert found["samples"] == {"a": {"us": [1, 6, 8]}, "b": {"us": [2]}, "c": {"us": [3, 5, 7]}}
    assert found["failed"] == {"b": "it broke"}
    assert found["titles"] == {"a": "A", "b": "B", "c": "C"}


def test_a_target_is_reached_missed_or_not_measured() -> None:
    parts = Part("one", lambda s: s["w"]["a"]["x"][0], "at most", 2), Part("two", lambda s: 5.0, "shown", unit="us")
    target = Target("w", "g", parts)
    assert target.verdict({"w": {"a": {"x": [2.0]}}}) == ("one 2.00x; two 5.00 us", "reached")
    assert target.verdict({"w": {"a": {"x": [2.1]}}}) == ("one 2.10x; two 5.00 us", "**missed**")
    assert {one["verdict"] for one in judged({})} == {"not measured"}


def results_of(work: Work, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "command": "make bench",
        "machine": {"cpu": "A CPU", "cores": 2, "memory_gb": 4},
        "versions": {"Python": "3.11"},
        "contestants": [{"title": "rq", "version": "2.12.0", "settings": [["`x=1`", "https://example.org/"]]}],
        "works": {work.key: found},
        "capacity": {"worker_memory_mb": 67.0},
    }


def test_the_page_shows_medians_spreads_failures_and_every_target(tmp_path: Path) -> None:
    work = Work("drain", "Drain", "About it.", (Column("x", "per second", "more"),), plot="x")
    found = {
        "date": "2026-01-01",
        "quick": True,
        "seconds": 3.0,
        "noise_ms": {"p50": 0.1, "p99": 7.0},
        "samples": {"delayq": {"x": [1.0, 3.0, 2.0]}, "delayq@sqlite": {"x": [5.0]}},
        "failed": {"rq": "no `worker`"},
        "titles": {"delayq": "django-delayq", "delayq@sqlite": "django-delayq on sqlite", "rq": "rq"},
    }
    (tmp_path / "benchmarks").mkdir()
    report.write(results_of(work, found), [work], tmp_path)
    page = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert "| django-delayq | 2.00 (1.00 to 3.00) |" in page
    assert "| django-delayq on sqlite | 5.00 |" in page
    assert "* failed: `rq: no worker`" in page
    assert "quick run" in page
    assert "0.100 / 7.00 ms" in page
    assert all(target.work in page for target in TARGETS)
    assert "django-delayq" in (tmp_path / "docs" / "images" / "bench-drain.svg").read_text()
    assert json.loads((tmp_path / "benchmarks" / "results.json").read_text())["works"]["drain"] == found


def test_a_missed_target_has_its_reason_on_the_page() -> None:
    page = "\n".join(report.targets({"idle": {"delayq": {"cpu_s": [0.1], "transactions": [500.0]}}}))
    assert "0.100 CPU s; 500 transactions | **missed** |" in page
    assert "* **idle worker process with 1,000,000 pending, a minute**: The table of the idle worker" in page
    assert "**missed**" not in "\n".join(report.targets({"idle": {"delayq": {"cpu_s": [0.1], "transactions": [50.0]}}}))


def test_a_verdict_is_that_with_fsync_and_the_ratio_without_it_is_shown_behind_it() -> None:
    on = {"delayq": {"cpu_us": [85.0]}, "procrastinate": {"cpu_us": [100.0]}, "celery": {"cpu_us": [170.0]}}
    off = {"delayq@unsynced": {"cpu_us": [95.0]}, "procrastinate@unsynced": {"cpu_us": [100.0]}}
    target = next(one for one in TARGETS if one.work == "schedule one, client CPU")
    shown = "procrastinate 0.850x; celery 0.500x; with `fsync` off: procrastinate 0.950x"
    assert target.verdict({"schedule": on | off}) == (shown, "reached")


def test_contestants_with_other_settings_have_tables_of_their_own() -> None:
    suffixes = {name.partition("@")[2] for work in WORKS for name in work.contestants}
    assert suffixes <= VARIANTS.keys()
    found = {"samples": dict.fromkeys([f"a@{suffix}" if suffix else "a" for suffix in VARIANTS])}
    groups = {title: names for title, names in report._groups(found) if names}
    assert groups["PostgreSQL with `fsync` off"] == ["a@unsynced"]
    assert sorted(name for names in groups.values() for name in names) == sorted(found["samples"])


def compared(now: dict[str, list[float]], earlier: dict[str, list[float]]) -> str:
    work = Work("w", "Work", "About.", (Column("us", "CPU us"), Column("rate", "rate", "more"), Column("n", "n", "")))
    samples = {"delayq@sqlite": now, "earlier@sqlite": earlier}
    found = {"samples": samples, "titles": {"earlier@sqlite": "an earlier one"}}
    return "\n".join(report._compared({"works": {"w": found}}, [work]))


def test_a_work_is_slower_than_before_only_beyond_the_spread_of_the_rounds() -> None:
    before = {"us": [10.0, 12.0], "rate": [100.0], "n": [1.0]}
    assert "No work is slower than in an earlier one." in compared(
        {"us": [11.9, 14.0], "rate": [95.0], "n": [9.0]}, before
    )
    slower = compared({"us": [20.0, 24.0], "rate": [50.0]}, before)
    assert "2 of 2 figures are slower" in slower
    assert "| Work | CPU us | sqlite | 2.00x |" in slower
    assert "| Work | rate | sqlite | 2.00x |" in slower


def test_a_profile_has_modules_of_the_library_and_is_without_its_baseline() -> None:
    def work() -> None:
        for is_baseline in (False, True):
            with Meter(is_baseline=is_baseline):
                for _ in range(300):
                    parse_delay({"minutes": 5})
                    if not is_baseline:
                        json.dumps(list(range(100)))

    seconds = profiled(work)
    assert max(seconds, key=lambda place: seconds[place]) == "json, datetime"
    assert abs(seconds["django_delayq.times.lengths"]) < seconds["json, datetime"]
    assert Meter.profiles is None


def test_a_built_in_function_counts_for_its_driver_or_its_caller() -> None:
    assert place_of("/lib/site-packages/django/db/models/query.py") == "django.db"
    assert place_of("/x/django_delayq/firing/__init__.py") == "django_delayq.firing"
    assert place_of("<built-in method psycopg_binary._psycopg.wait_c>", "django.db") == "psycopg"
    assert place_of("<built-in method builtins.len>", "django.db") == "django.db"


def test_the_readme_has_the_figures_of_the_run_between_its_marks() -> None:
    samples = {"lag": {"celery": {"p50": [1.5]}, "delayq": {"p50": [1.0, 3.0, 2.0]}}}
    results = {"works": {work: {"samples": found} for work, found in samples.items()}}
    readme = report.with_figures("a\n<!-- bench -->\nold\n<!-- /bench -->\nb\n", results)
    assert readme.startswith("a\n<!-- bench -->\n|  | **django-delayq** | celery |\n")
    assert "| lag of one worker, p50, ms | 2.00 | 1.50 |" in readme
    assert readme.endswith("<!-- /bench -->\nb\n")
    assert "old" not in readme
    assert report.with_figures("no marks", results) == "no marks"


RESULTS = json.loads((ROOT / "benchmarks" / "results.json").read_text())


def test_the_pages_with_figures_are_those_of_the_results() -> None:
    """After a change of the text: `python -m benchmarks --report`."""
    measured = [work for work in WORKS if work.key in RESULTS["works"]]
    assert (ROOT / "docs" / "benchmarks.md").read_text() == "\n".join(report.page(RESULTS, measured)) + "\n"
    for page in report.WITH_FIGURES:
        text = (ROOT / page).read_text()
        assert report.BEGIN in text and report.with_figures(text, RESULTS) == text


def test_the_page_lists_every_target_with_its_verdict() -> None:
    rows = list(read(ROOT / "docs" / "benchmarks.md").table("work", "target"))
    assert [row[:2] for row in rows] == [[target.work, target.goal] for target in TARGETS]
    assert {row[3] for row in rows} <= {"reached", "**missed**", "not measured"}
