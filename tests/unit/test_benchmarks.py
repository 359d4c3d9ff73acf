"""The harness of `make bench`: statistics, rounds in turn, verdicts, and the page."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from benchmarks import harness, report
from benchmarks.contestants import Failed
from benchmarks.harness import QUICK, Column, Run, Work
from benchmarks.works import WORKS
from tests.docs.pages import ROOT


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


RESULTS = json.loads((ROOT / "benchmarks" / "results.json").read_text())


def test_the_pages_with_figures_are_those_of_the_results() -> None:
    """After a change of the text: `python -m benchmarks --report`."""
    measured = [work for work in WORKS if work.key in RESULTS["works"]]
    assert (ROOT / "docs" / "benchmarks.md").read_text() == "\n".join(report.page(RESULTS, measured)) + "\n"
    for page in report.WITH_FIGURES:
        text = (ROOT / page).read_text()
        assert report.BEGIN in text and report.with_figures(text, RESULTS) == text
