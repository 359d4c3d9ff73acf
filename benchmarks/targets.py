"""The targets for the speed of django-delayq, their verdicts from the samples of one run, and why one is missed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from benchmarks.contestants import RIVALS
from benchmarks.figures import number, spread

Samples = Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]
"""Work -> contestant -> column -> samples."""
MISSED = "**missed**"


class NotMeasured(Exception):
    """The run has no samples of that work or contestant."""


def median(samples: Samples, place: str) -> float:
    """Return the median of a column, at "work/contestant/column". Raises `NotMeasured`."""
    work, contestant, column = place.split("/")
    found = samples.get(work, {}).get(contestant, {}).get(column)
    if not found:
        raise NotMeasured(f"{contestant} not measured")
    return spread(found).median


class Part(NamedTuple):
    """One comparison of a target.

    `value` is a column, see `median`, or a function of the samples; with `per` it is divided by that column. It must be
    at most, at least or below `limit`, or is only shown.
    """

    what: str
    value: str | Callable[[Samples], float]
    bound: Literal["at most", "at least", "below", "shown"] = "shown"
    limit: float = 0.0
    unit: str = "x"
    per: str = ""

    def measured(self, samples: Samples) -> float:
        """Return the figure. Raises `NotMeasured`."""
        value = median(samples, self.value) if isinstance(self.value, str) else self.value(samples)
        return value / median(samples, self.per) if self.per else value

    def holds(self, value: float) -> bool:
        """Return whether the target is reached; a part that is only shown always holds."""
        met = {"at most": value <= self.limit, "at least": value >= self.limit, "below": value < self.limit}
        return met.get(self.bound, True)


@dataclass(frozen=True)
class Target:
    """One line of the table of targets. It is reached if all its parts hold.

    `why` explains, without figures, what the limit is where the target is missed.
    """

    work: str
    goal: str
    parts: Sequence[Part]
    why: str = ""

    def verdict(self, samples: Samples) -> tuple[str, str]:
        """Return the measured figures and "reached", "missed" or "not measured"."""
        words, outcomes = [], []
        for part in self.parts:
            try:
                value = part.measured(samples)
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
            return "; ".join(words), MISSED
        return "; ".join(words), "not measured" if None in outcomes else "reached"


def _floor_of_lag(samples: Samples) -> float:
    late = median(samples, f"profile/{WAKE_UP}/alone") + median(samples, f"profile/{FLOOR_WALL}/alone")
    return late / 1000


def _to_best_rival(rate: float, samples: Samples) -> float:
    rates = [samples["bulk"][name]["per_second"] for name in RIVALS if samples.get("bulk", {}).get(name)]
    if not rates:
        raise NotMeasured("no rival measured")
    return rate / max(spread(rate).median for rate in rates)


def _slowest_run(samples: Samples) -> float:
    typical = median(samples, "steady/2 processes of 1 thread/nothing_per_second")
    return min(samples["steady"]["2 processes of 1 thread"]["nothing_per_second"]) / typical


def _many(column: str) -> Callable[[Samples], float]:
    """Return a function for a column of the arrangement with the most pending timeouts."""

    def value(samples: Samples) -> float:
        names = [name for name in samples.get("growth", {}) if name.endswith("pending")]
        if len(names) < 2:
            raise NotMeasured("growth not measured")
        return median(samples, f"growth/{max(names, key=lambda name: int(name.split()[0].replace(',', '')))}/{column}")

    return value


def _memory_growth(samples: Samples) -> float:
    return 100 * (_many("memory_mb")(samples) / median(samples, "growth/1,000 pending/memory_mb") - 1)


def _slowest_page(samples: Samples) -> float:
    pages = [columns["p50"][0] for name, columns in samples.get("pages", {}).items() if not name.startswith("command")]
    if not pages:
        raise NotMeasured("pages not measured")
    return max(pages)


CPU, FLOOR, WALL, FLOOR_WALL, WAKE_UP = (
    "measured, CPU us",
    "floor, CPU us",
    "measured, us until the end",
    "floor, us until the end",
    "late wake-up from a sleep, us",
)
"""The rows of `benchmarks.profiles` that are not modules."""
PROCRASTINATE, CELERY = "schedule/procrastinate/cpu_us", "schedule/celery/cpu_us"
OWN_POOL, PURE = "schedule/procrastinate_pool/cpu_us", "schedule/procrastinate@pure/cpu_us"
HUEY, HUEY_SAVES = "drain/huey/nothing_per_second", "drain/huey/settle_per_second"
ONE_THREAD = "steady/1 thread/nothing_per_second"
TARGETS = (
    Target(
        "schedule one outside a transaction, client CPU",
        "at most 1.25x its floor, at most 1.1x procrastinate, below celery",
        (
            Part("floor", "schedule/delayq/cpu_us", "at most", 1.25, per=f"profile/{FLOOR}/schedule"),
            Part("procrastinate", "schedule/delayq/cpu_us", "at most", 1.1, per=PROCRASTINATE),
            Part("celery", "schedule/delayq/cpu_us", "below", 1.0, per=CELERY),
            Part("procrastinate with its own pool of connections", "schedule/delayq/cpu_us", per=OWN_POOL),
            Part("procrastinate, both with psycopg in pure Python", "schedule/delayq@pure/cpu_us", per=PURE),
            Part("floor: procrastinate", f"profile/{FLOOR}/schedule", per=PROCRASTINATE),
        ),
        "A call makes two round trips: an INSERT that also locks the object, and a script in Redis, so that no worker "
        "has to poll. procrastinate makes only the first, celery only the second. Above the floor are the check of the "
        "arguments, the conversion of the values of a row, and the row that the function returns.",
    ),
    Target(
        "schedule one inside the caller's transaction, additional CPU",
        "at most 0.5x procrastinate's call",
        (
            Part("of its call outside a transaction", "schedule/delayq/inside_us", "at most", 0.5, per=PROCRASTINATE),
            Part("of its call with its own pool", "schedule/delayq/inside_us", per=OWN_POOL),
            Part("floor: procrastinate", f"profile/{FLOOR}/inside", per=PROCRASTINATE),
        ),
        "A transaction saves none of the two round trips, because outside one the INSERT commits by itself. The script "
        "of Redis runs after the commit.",
    ),
    Target(
        "schedule 50,000 in bulk",
        "at least 1.5x the rate of the best rival",
        (
            Part("rate", lambda s: _to_best_rival(median(s, "bulk/delayq/per_second"), s), "at least", 1.5),
            Part("floor", lambda s: _to_best_rival(1e6 / median(s, f"profile/{FLOOR_WALL}/bulk"), s)),
        ),
        "PostgreSQL checks the constraints of each row and adds it to every index, which the floor also costs. The "
        "rivals have fewer indexes and no rule of one pending row for each object, or write to Redis only.",
    ),
    Target(
        "save with one automatic policy, nothing changed",
        "at most 300 us of CPU more than without, where `BEGIN; SELECT 1; COMMIT` costs 390",
        (
            Part("additional", "save/delayq/more_us", "at most", 300, "us"),
            Part("the unit here", "save/delayq/unit_us", unit="us"),
            Part("additional with psycopg in pure Python", "save/delayq@pure/more_us", unit="us"),
            Part("the unit with it", "save/delayq@pure/unit_us", unit="us"),
            Part("floor", f"profile/{FLOOR}/save", unit="us"),
        ),
        "Outside a transaction the row is unlocked when the check begins. The check then locks it in a transaction of "
        "its own. The floor, one SELECT of the object with its pending row, has no lock, no BEGIN and no COMMIT.",
    ),
    Target(
        "save and arm a new object, with a deadline in working hours",
        "at most 60 us of CPU more than with a timedelta",
        (Part("additional", "save/delayq/span_us", "at most", 60, "us"),),
        "The span itself is computed in Python for each round.",
    ),
    Target(
        "one timeout alone, plan to commit",
        "at most 1.3x its floor",
        (
            Part("floor", "firing/delayq/nothing_us", "at most", 1.3, per=f"profile/{FLOOR}/alone"),
            Part("`BEGIN; SELECT 1; COMMIT`", "firing/delayq/nothing_units"),
            Part("which is", "firing/delayq/nothing_us", unit="us"),
            Part("with psycopg in pure Python", "firing/delayq@pure/nothing_units"),
            Part("floor", f"profile/{FLOOR}/alone", per="firing/delayq/unit_us"),
        ),
        "The unit has three round trips, and returns a constant. Firing has more: the plan, BEGIN, a lock on the "
        "object, a lock on the row, the mark and COMMIT, and it reads both rows. The floor locks and marks the row in "
        "one statement, and has no plan.",
    ),
    Target(
        "lag, 1,000 random deadlines over 20 s, one worker; behind 1,000,000 pending; at 200 /s",
        "at most celery's, at p50 and p99 of the same run",
        (
            *(
                Part(f"{title} p{part}", f"{work}/delayq/{key}{part}", "at most", 1.0, per=f"{work}/celery/{key}{part}")
                for title, work, key in (("50 /s", "lag", "p"), ("200 /s", "lag", "fast_p"), ("behind", "behind", "p"))
                for part in (50, 99)
            ),
            Part("floor of p50", _floor_of_lag, unit="ms"),
            Part("p50 of celery", "lag/celery/p50", unit="ms"),
        ),
        "After the deadline the worker wakes up, locks, checks and marks, and only then calls the handler, so that a "
        "change just before the deadline counts. celery calls the task when its timer ends; the lock and the check of "
        "its tasks are not in its lag. The floor is a wake-up and those statements.",
    ),
    Target(
        "drain with lock, check and ORM save, default settings, one transaction each",
        "at least 1.2x huey, 2x each rival that stores jobs in the database",
        (
            Part("huey", "drain/delayq/settle_per_second", "at least", 1.2, per=HUEY_SAVES),
            *(
                Part(name, "drain/delayq/settle_per_second", "at least", 2.0, per=f"drain/{key}/settle_per_second")
                for name, key in (("procrastinate", "procrastinate"), ("django-q2", "django_q2"))
            ),
            Part("huey, in best settings", "drain/delayq/best_settle_per_second", per=HUEY_SAVES),
            Part("huey, if all cores were always busy", "drain/delayq/settle_most_per_second", per=HUEY_SAVES),
        ),
        "huey removes an entry from a list in Redis. django-delayq locks the object, checks and marks the row, and "
        "PostgreSQL writes it and its indexes, on the same cores: see *servers* in the table of the drain.",
    ),
    Target(
        "the same with `together=50`",
        "at least 3x huey",
        (
            Part("huey", "drain/delayq/together_per_second", "at least", 3.0, per=HUEY_SAVES),
            Part("huey, in best settings", "drain/delayq/best_together_per_second", "at least", 3.0, per=HUEY_SAVES),
        ),
        "The save of the handler by the ORM, and its UPDATE in PostgreSQL, cost the same for all contestants, and are "
        "a large part of a job.",
    ),
    Target(
        "the same with `batch=500`",
        "at least 8x huey",
        (
            Part("huey", "drain/delayq/batch_per_second", "at least", 8.0, per=HUEY_SAVES),
            Part("huey, in best settings", "drain/delayq/best_batch_per_second", "at least", 8.0, per=HUEY_SAVES),
        ),
        "PostgreSQL writes two rows for each job, the object and the timeout, with the indexes of both.",
    ),
    Target(
        "steadiness: drain of handlers that do nothing",
        "slowest of ten runs at least 0.7x the median; 4 threads never below 0.95x one; 2 processes 1.8x one",
        (
            Part("slowest run", _slowest_run, "at least", 0.7),
            Part("4 threads", "steady/4 threads/nothing_per_second", "at least", 0.95, per=ONE_THREAD),
            Part("2 processes", "steady/2 processes of 1 thread/nothing_per_second", "at least", 1.8, per=ONE_THREAD),
            Part("huey", "drain/delayq/nothing_per_second", per=HUEY),
        ),
        "Threads of one process share the interpreter, and PostgreSQL needs a part of the same cores.",
    ),
    Target(
        "Redis bytes per pending; worker memory from 1,000 to 1,000,000 pending",
        "at most 120; within 5 %",
        (
            Part("Redis", _many("redis_bytes"), "at most", 120, "bytes"),
            Part("memory", _memory_growth, "at most", 5, "% more"),
        ),
        "With few pending timeouts the fixed structures of Redis count for each of them: see the table of growth.",
    ),
    Target(
        "ledger bytes per row, heap and indexes",
        "at most 400",
        (Part("", "stored/delayq/database_bytes", "at most", 400, "bytes"),),
        "The table of growth has the bytes of the heap and of each index.",
    ),
    Target(
        "idle worker with 1,000,000 pending, a minute",
        "at most 0.1 CPU s, 60 transactions",
        (
            Part("", "idle/delayq/cpu_s", "at most", 0.1, "CPU s"),
            Part("", "idle/delayq/transactions", "at most", 60, "transactions"),
        ),
        "The table of the idle worker has the transactions by the function that begins them. Each bounds the time until"
        " the worker notices something that Redis does not announce.",
    ),
    Target(
        "slowest page of admin and REST with 1,000,000 pending rows",
        "at most 150 ms each",
        (Part("", _slowest_page, "at most", 150, "ms"),),
        "The table of pages has each of them.",
    ),
    Target(
        "virtual replay of recorded orders",
        "at least 4x the first release (about 170 steps /s)",
        (
            Part("", "replay/delayq/per_second", "at least", 4 * 170, "steps /s"),
            Part("of the earlier release in this run", "replay/delayq/per_second", per="replay/earlier/per_second"),
        ),
        "A step is a transaction of the shop with its own reads and saves by the ORM, which the library leaves alone.",
    ),
)


def judged(samples: Samples) -> list[dict[str, Any]]:
    """Return every target with its measured figures, its verdict, and the reason for a missed one."""
    found = [(target, target.verdict(samples)) for target in TARGETS]
    return [
        {"work": target.work, "goal": target.goal, "measured": words, "verdict": say, "why": target.why}
        for target, (words, say) in found
    ]
