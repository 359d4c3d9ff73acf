"""The targets for the speed of django-delayq, and their verdicts from the samples of one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from benchmarks.contestants import RIVALS
from benchmarks.figures import number, spread

Samples = Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]
"""Work -> contestant -> column -> samples."""


class NotMeasured(Exception):
    """The run has no samples of that work or contestant."""


class Part(NamedTuple):
    """One comparison of a target: `value` computes the measured figure, which must be at most or at least `limit`."""

    what: str
    value: Callable[[Samples], float]
    bound: Literal["at most", "at least", "below", "shown"]
    limit: float = 0.0
    unit: str = "x"

    def holds(self, value: float) -> bool:
        """Return whether the target is reached; a part that is only shown always holds."""
        met = {"at most": value <= self.limit, "at least": value >= self.limit, "below": value < self.limit}
        return met.get(self.bound, True)


@dataclass(frozen=True)
class Target:
    """One line of the table of targets. It is reached if all its parts hold."""

    work: str
    goal: str
    parts: Sequence[Part]

    def verdict(self, samples: Samples) -> tuple[str, str]:
        """Return the measured figures and "reached", "missed" or "not measured"."""
        words, outcomes = [], []
        for part in self.parts:
            try:
                value = part.value(samples)
            except NotMeasured as error:
                if part.bound != "shown":
                    words.append(f"{part.what}: {error}".lstrip(": "))
                    outcomes.append(None)
                continue
            words.append(f"{part.what} {number(value)}{'x' if part.unit == 'x' else ' ' + part.unit}".strip())
            outcomes.append(part.holds(value))
        if not any(one is not None for one in outcomes):
            return "-", "not measured"
        if False in outcomes:
            return "; ".join(words), "**missed**"
        return "; ".join(words), "not measured" if None in outcomes else "reached"


def median(samples: Samples, work: str, contestant: str, key: str) -> float:
    """Return the median of a column. Raises `NotMeasured`."""
    found = samples.get(work, {}).get(contestant, {}).get(key)
    if not found:
        raise NotMeasured(f"{contestant} not measured")
    return spread(found).median


def ratio(work: str, key: str, of: str, to: str, to_key: str = "") -> Callable[[Samples], float]:
    """Compare the medians of two contestants in one work."""
    return lambda samples: median(samples, work, of, key) / median(samples, work, to, to_key or key)


def plain(work: str, contestant: str, key: str) -> Callable[[Samples], float]:
    return lambda samples: median(samples, work, contestant, key)


def _to_best_rival(samples: Samples) -> float:
    rates = [samples["bulk"][name]["per_second"] for name in RIVALS if samples.get("bulk", {}).get(name)]
    if not rates:
        raise NotMeasured("no rival measured")
    return median(samples, "bulk", "delayq", "per_second") / max(spread(rate).median for rate in rates)


def _slowest_run(samples: Samples) -> float:
    runs = samples.get("steady", {}).get("2 processes of 1 thread", {}).get("nothing_per_second")
    if not runs:
        raise NotMeasured("not measured")
    return min(runs) / spread(runs).median


def _many(samples: Samples) -> str:
    """Return the name of the arrangement with the most pending timeouts."""
    names = [name for name in samples.get("growth", {}) if name.endswith("pending")]
    if len(names) < 2:
        raise NotMeasured("growth not measured")
    return max(names, key=lambda name: int(name.split()[0].replace(",", "")))


def _memory_growth(samples: Samples) -> float:
    many = median(samples, "growth", _many(samples), "memory_mb")
    return 100 * (many / median(samples, "growth", "1,000 pending", "memory_mb") - 1)


def _slowest_page(samples: Samples) -> float:
    pages = [columns["p50"][0] for name, columns in samples.get("pages", {}).items() if not name.startswith("command")]
    if not pages:
        raise NotMeasured("pages not measured")
    return max(pages)


TARGETS = (
    Target(
        "schedule one outside a transaction, client CPU",
        "at most 0.8x procrastinate, below celery",
        (
            Part("procrastinate", ratio("schedule", "cpu_us", "delayq", "procrastinate"), "at most", 0.8),
            Part("celery", ratio("schedule", "cpu_us", "delayq", "celery"), "below", 1.0),
            Part(
                "procrastinate with its own pool of connections",
                ratio("schedule", "cpu_us", "delayq", "procrastinate_pool"),
                "shown",
            ),
            Part(
                "procrastinate, both with psycopg in pure Python",
                ratio("schedule", "cpu_us", "delayq@pure", "procrastinate@pure"),
                "shown",
            ),
        ),
    ),
    Target(
        "schedule one inside the caller's transaction, additional CPU",
        "at most 0.5x procrastinate's call",
        (
            Part(
                "of its call outside a transaction",
                ratio("schedule", "inside_us", "delayq", "procrastinate", "cpu_us"),
                "at most",
                0.5,
            ),
            Part(
                "of its call with its own pool",
                ratio("schedule", "inside_us", "delayq", "procrastinate_pool", "cpu_us"),
                "shown",
            ),
        ),
    ),
    Target(
        "schedule 50,000 in bulk",
        "at least 1.5x the rate of the best rival",
        (Part("rate", _to_best_rival, "at least", 1.5),),
    ),
    Target(
        "save with one automatic policy, nothing changed",
        "at most 300 us of CPU more than without, where `BEGIN; SELECT 1; COMMIT` costs 390",
        (
            Part("additional", plain("save", "delayq", "more_us"), "at most", 300, "us"),
            Part("the unit here", plain("save", "delayq", "unit_us"), "shown", unit="us"),
            Part("additional with psycopg in pure Python", plain("save", "delayq@pure", "more_us"), "shown", unit="us"),
            Part("the unit with it", plain("save", "delayq@pure", "unit_us"), "shown", unit="us"),
        ),
    ),
    Target(
        "one timeout alone, plan to commit",
        "at most 3.2x `BEGIN; SELECT 1; COMMIT`",
        (
            Part("handler does nothing", plain("firing", "delayq", "nothing_units"), "at most", 3.2),
            Part("which is", plain("firing", "delayq", "nothing_us"), "shown", unit="us"),
            Part("with psycopg in pure Python", plain("firing", "delayq@pure", "nothing_units"), "shown"),
        ),
    ),
    Target(
        "lag, 1,000 random deadlines over 20 s, one worker; behind 1,000,000 pending; at 200 /s",
        "ahead of celery at p50 and p99 of the same run",
        (
            *(
                Part(f"{title} p{part}", ratio("lag", f"{key}p{part}", "delayq", "celery"), "below", 1.0)
                for key, title in (("", "50 /s"), ("fast_", "200 /s"))
                for part in (50, 99)
            ),
            *(
                Part(f"behind p{part}", ratio("behind", f"p{part}", "delayq", "celery"), "below", 1.0)
                for part in (50, 99)
            ),
        ),
    ),
    Target(
        "drain 10,000 no-ops, one call per object, two processes",
        "at least 1.5x huey; slowest of ten runs at least 0.6x the median; 4 threads not slower than 1; 2 processes at "
        "least 1.6x one",
        (
            Part("huey", ratio("drain", "nothing_per_second", "delayq", "huey"), "at least", 1.5),
            Part("slowest run", _slowest_run, "at least", 0.6),
            Part("4 threads", ratio("steady", "nothing_per_second", "4 threads", "1 thread"), "at least", 1.0),
            Part(
                "2 processes",
                ratio("steady", "nothing_per_second", "2 processes of 1 thread", "1 thread"),
                "at least",
                1.6,
            ),
        ),
    ),
    Target(
        "drain with lock, check and ORM save, one call per object",
        "at least 3x huey",
        (Part("huey", ratio("drain", "settle_per_second", "delayq", "huey"), "at least", 3.0),),
    ),
    Target(
        "the same with `batch=`",
        "at least 20x huey",
        (Part("huey", ratio("drain", "batch_per_second", "delayq", "huey", "settle_per_second"), "at least", 20.0),),
    ),
    Target(
        "Redis bytes per pending; worker memory from 1,000 to 1,000,000 pending",
        "at most 110; within 5 %",
        (
            Part(
                "Redis",
                lambda samples: median(samples, "growth", _many(samples), "redis_bytes"),
                "at most",
                110,
                "bytes",
            ),
            Part("memory", _memory_growth, "at most", 5, "% more"),
        ),
    ),
    Target(
        "ledger bytes per row, heap and indexes",
        "at most 400",
        (Part("", plain("stored", "delayq", "database_bytes"), "at most", 400, "bytes"),),
    ),
    Target(
        "idle worker with 1,000,000 pending, a minute",
        "at most 0.1 CPU s, 60 transactions",
        (
            Part("", plain("idle", "delayq", "cpu_s"), "at most", 0.1, "CPU s"),
            Part("", plain("idle", "delayq", "transactions"), "at most", 60, "transactions"),
        ),
    ),
    Target(
        "slowest page of admin and REST with 1,000,000 pending rows",
        "at most 150 ms each",
        (Part("", _slowest_page, "at most", 150, "ms"),),
    ),
    Target(
        "virtual replay of recorded orders",
        "at least 4x the first release (about 170 steps /s)",
        (
            Part("", plain("replay", "delayq", "per_second"), "at least", 4 * 170, "steps /s"),
            Part("of the earlier release in this run", ratio("replay", "per_second", "delayq", "earlier"), "shown"),
        ),
    ),
)


def judged(samples: Samples) -> list[dict[str, Any]]:
    """Return every target with its measured figures and its verdict."""
    found = [(target, target.verdict(samples)) for target in TARGETS]
    return [
        {"work": target.work, "goal": target.goal, "measured": words, "verdict": say} for target, (words, say) in found
    ]
