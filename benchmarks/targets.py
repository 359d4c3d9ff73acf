"""The targets for the speed of django-delayq, their verdicts from the samples of one run, and why one is missed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """Return a wake-up and the CPU of the statements in ms. Not their time: the commit is after the call."""
    return sum(median(samples, f"profile/{row}/alone") for row in (WAKE_UP, *FLOOR_ROWS)) / 1000


def _best_rival(samples: Samples) -> float:
    """Return the highest median rate at which a rival schedules in bulk."""
    rates = [samples["bulk"][name]["per_second"] for name in RIVALS if samples.get("bulk", {}).get(name)]
    if not rates:
        raise NotMeasured("no rival measured")
    return max(spread(rate).median for rate in rates)


def _floor_of_firing(case: str) -> Callable[[Samples], float]:
    """Return a function for the CPU of a firing, client and server, divided by that of its statements alone."""

    def value(samples: Samples) -> float:
        sums = [[median(samples, f"profile/{row}/{case}") for row in rows] for rows in (OWN_ROWS, FLOOR_ROWS)]
        return sum(sums[0]) / sum(sums[1])

    return value


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
    timed = {name: columns["p50"][0] for name, columns in samples.get("pages", {}).items() if "p50" in columns}
    pages = [took for name, took in timed.items() if not name.startswith("command")]
    if not pages:
        raise NotMeasured("pages not measured")
    return max(pages)


CPU, FLOOR, SERVER, FLOOR_SERVER, WALL, FLOOR_WALL, WAKE_UP = (
    "measured, CPU us",
    "floor, CPU us",
    "measured, CPU us of the server",
    "floor, CPU us of the server",
    "measured, us until the end",
    "floor, us until the end",
    "late wake-up from a sleep, us",
)
"""The rows of `benchmarks.profiles` that are not modules."""
OWN_ROWS, FLOOR_ROWS = (CPU, SERVER), (FLOOR, FLOOR_SERVER)
HUEY, HUEY_SAVES = "drain/huey/nothing_per_second", "drain/huey/settle_per_second"
ONE_THREAD = "steady/1 thread/nothing_per_second"
IN_DATABASE = (("procrastinate", "procrastinate"), ("django-q2 with its ORM broker", "django_q2_orm"))
"""The rivals that store jobs in the database, with titles."""
IDLE_SECONDS = 0.14
UNSYNCED = "with `fsync` off: "


def _against(work: str, column: str, bounds: Sequence[Part]) -> Iterator[Part]:
    """Yield parts that compare a column of django-delayq with that of rivals, and then the same without `fsync`.

    Args:
        work: its key.
        column: the key of the column.
        bounds: `value` is the rival.
    """
    for bound in bounds:
        yield bound._replace(value=f"{work}/delayq/{column}", per=f"{work}/{bound.value}/{column}")
    for at, bound in enumerate(bounds):
        own, rival = f"{work}/delayq@unsynced/{column}", f"{work}/{bound.value}@unsynced/{column}"
        yield Part(UNSYNCED * (not at) + bound.what, own, per=rival)


def _drains(column: str, of_huey: float, of_others: float) -> Sequence[Part]:
    huey = Part("huey", "huey", "at least", of_huey)
    others = [Part(title, key, "at least", of_others) for title, key in IN_DATABASE]
    return [*_against("drain", f"{column}_per_second", [huey, *others])]


def _times_huey(column: str, least: float) -> Sequence[Part]:
    own = f"{column}_per_second"
    return [
        Part("huey", f"drain/delayq/{own}", "at least", least, per=HUEY_SAVES),
        Part(f"{UNSYNCED}huey", f"drain/delayq@unsynced/{own}", per="drain/huey@unsynced/settle_per_second"),
    ]


def _lags(title: str, work: str, prefix: str) -> Iterator[Part]:
    for part in (50, 99):
        own, rival = f"{work}/delayq/{prefix}p{part}", f"{work}/celery/{prefix}p{part}"
        yield Part(f"{title} p{part}", own, "at most", 1.0, per=rival)


TARGETS = (
    Target(
        "schedule one, client CPU",
        "at most 0.9x procrastinate with its Django connector, below celery",
        (
            *_against(
                "schedule",
                "cpu_us",
                [Part("procrastinate", "procrastinate", "at most", 0.9), Part("celery", "celery", "below", 1.0)],
            ),
            Part("due in four minutes: procrastinate", "schedule/delayq/soon_us", per="schedule/procrastinate/soon_us"),
            Part("floor", "schedule/delayq/cpu_us", per=f"profile/{FLOOR}/schedule"),
        ),
        "A call sends one statement, an INSERT that also locks the object. Above the floor are the check of the "
        "arguments, the conversion of the values of a row, and the row that the function returns.",
    ),
    Target(
        "cancel one, client CPU",
        "at most 0.9x procrastinate with its Django connector, below celery",
        (
            *_against(
                "schedule",
                "cancel_us",
                [Part("procrastinate", "procrastinate", "at most", 0.9), Part("celery", "celery", "below", 1.0)],
            ),
        ),
        "A call sends one statement, an UPDATE that also locks the object. procrastinate cancels a job by its id.",
    ),
    Target(
        "schedule 50,000 in bulk",
        "at least 1.5x the rate of the best rival",
        (
            Part("rate", lambda s: median(s, "bulk/delayq/per_second") / _best_rival(s), "at least", 1.5),
            Part(f"{UNSYNCED}timeouts /s", "bulk/delayq@unsynced/per_second", unit=""),
            Part("floor", lambda s: 1e6 / median(s, f"profile/{FLOOR_WALL}/bulk") / _best_rival(s)),
        ),
        "PostgreSQL checks the constraints of each row and adds it to every index, which the floor also costs. The "
        "rivals have fewer indexes and no rule of one pending row for each object, or write to Redis only.",
    ),
    Target(
        "drain with lock, check and ORM save, one transaction each",
        "at least 1.2x huey, 2x each rival that stores jobs in the database",
        (
            *_drains("settle", 1.2, 2.0),
            Part("if all cores were always busy: huey", "drain/delayq/settle_most_per_second", per=HUEY_SAVES),
            Part("django-q2 with Redis", "drain/delayq/settle_per_second", per="drain/django_q2/settle_per_second"),
        ),
        "huey removes an entry from a list in Redis. django-delayq locks the object, checks and marks the row, and "
        "PostgreSQL writes it and its indexes, on the same cores: see *servers* in the table of the drain.",
    ),
    Target(
        "drain of handlers that do nothing",
        "at least 0.6x huey, 2x each rival that stores jobs in the database",
        (
            *_drains("nothing", 0.6, 2.0),
            Part("if all cores were always busy: huey", "drain/delayq/nothing_most_per_second", per=HUEY),
            Part("django-q2 with Redis", "drain/delayq/nothing_per_second", per="drain/django_q2/nothing_per_second"),
        ),
        "A job of huey does not use the database. A firing commits a transaction in PostgreSQL, as its floor does.",
    ),
    Target(
        "drain with ORM save and `together=50`",
        "at least 3x huey with one transaction each",
        _times_huey("together", 3.0),
        "The save of the handler by the ORM, and its UPDATE in PostgreSQL, cost the same for all contestants, and are "
        "a large part of a job.",
    ),
    Target(
        "drain with `batch=500`",
        "at least 10x huey with one transaction each",
        _times_huey("batch", 10.0),
        "PostgreSQL writes two rows for each job, the object and the timeout, with the indexes of both.",
    ),
    Target(
        "lag at 50 /s, at 200 /s, and at 50 /s behind 1,000,000 pending",
        "at most celery's, at p50 and p99 of the same run",
        (
            *_lags("50 /s", "lag", ""),
            *_lags("200 /s", "lag", "fast_"),
            *_lags("behind", "behind", ""),
            Part(f"{UNSYNCED}50 /s p50", "lag/delayq@unsynced/p50", per="lag/celery@unsynced/p50"),
            Part("p99", "lag/delayq@unsynced/p99", per="lag/celery@unsynced/p99"),
            Part("floor of p50", _floor_of_lag, unit="ms"),
            Part("p50 of celery", "lag/celery/p50", unit="ms"),
        ),
        "After the deadline the worker wakes up, locks, checks and marks, and only then calls the handler, so that a "
        "change just before the deadline counts. celery calls the task when its timer ends; the lock and the check of "
        "its tasks are not in its lag. The floor is a wake-up, and the CPU of those statements.",
    ),
    Target(
        "lag without Redis at 50 /s, scheduled more than 2 s ahead",
        "at most 20 ms at p50, 100 ms at p99; idle CPU as before, at most 0.14 s a minute",
        (
            Part("p50", "lag/delayq@ledger/p50", "at most", 20, "ms"),
            Part("p99", "lag/delayq@ledger/p99", "at most", 100, "ms"),
            Part("idle", "idle/delayq@ledger/cpu_s", "at most", IDLE_SECONDS, "CPU s"),
        ),
        "Without Redis a worker learns of a timeout when it queries the database. More frequent queries cost an idle "
        "worker CPU.",
    ),
    Target(
        "one plain firing, CPU of client and server",
        "at most 1.25x that of the same statements without the library",
        (
            Part("handler does nothing", _floor_of_firing("alone"), "at most", 1.25),
            Part("handler saves", _floor_of_firing("settle")),
            Part("client alone", f"profile/{CPU}/alone", per=f"profile/{FLOOR}/alone"),
            Part("`BEGIN; SELECT 1; COMMIT`", "firing/delayq/nothing_units"),
        ),
        "Around its statements a firing builds the object and the timeout from their rows, calls the handler under "
        "guards, checks the session that it leaves, and reports the outcome.",
    ),
    Target(
        "one worker process, CPU for each handler that does nothing",
        "at most 0.8 ms, at most 1.3x `run()` in a loop",
        (
            Part("worker", lambda s: median(s, "worker/delayq/us") / 1000, "at most", 0.8, "ms"),
            Part("`run()` in a loop", "worker/delayq/us", "at most", 1.3, per="worker/delayq/loop_us"),
        ),
        "A worker also fetches and acknowledges entries of Redis, passes work between threads, extends leases, and "
        "logs each firing.",
    ),
    Target(
        "steadiness: drain of handlers that do nothing",
        "slowest of ten runs at least 0.9x the median; 4 threads 1.2x one; 2 processes 1.8x one",
        (
            Part("slowest run", _slowest_run, "at least", 0.9),
            Part("4 threads", "steady/4 threads/nothing_per_second", "at least", 1.2, per=ONE_THREAD),
            Part("2 processes", "steady/2 processes of 1 thread/nothing_per_second", "at least", 1.8, per=ONE_THREAD),
        ),
        "Threads of one process share the interpreter, and PostgreSQL needs a part of the same cores.",
    ),
    Target(
        "bytes of a pending timeout in Redis; memory of a worker process",
        "at most 114 bytes (many: 110); at most 71 MB, within 1 % from 1,000 to 1,000,000 pending",
        (
            Part("Redis", "stored/delayq/redis_bytes", "at most", 114, "bytes"),
            Part("many", _many("redis_bytes"), "at most", 110, "bytes"),
            Part("memory", "growth/1,000 pending/memory_mb", "at most", 71, "MB"),
            Part("growth", _memory_growth, "at most", 1, "%"),
            Part("PostgreSQL, heap and indexes of a row", "stored/delayq/database_bytes", unit="bytes"),
        ),
        "With few pending timeouts the fixed structures of Redis count for each of them: see the table of growth.",
    ),
    Target(
        "idle worker process with 1,000,000 pending, a minute",
        "at most 0.14 CPU s, 85 transactions",
        (
            Part("", "idle/delayq/cpu_s", "at most", IDLE_SECONDS, "CPU s"),
            Part("", "idle/delayq/transactions", "at most", 85, "transactions"),
        ),
        "The table of the idle worker has the transactions by the function that begins them. Each bounds the time until"
        " the worker notices something that Redis does not announce.",
    ),
    Target(
        "slowest page of admin and REST with 1,000,000 pending rows",
        "at most 140 ms each",
        (Part("", _slowest_page, "at most", 140, "ms"),),
        "The table of pages has each of them.",
    ),
)


def judged(samples: Samples) -> list[dict[str, Any]]:
    """Return every target with its measured figures, its verdict, and the reason for a missed one."""
    found = [(target, target.verdict(samples)) for target in TARGETS]
    return [
        {"work": target.work, "goal": target.goal, "measured": words, "verdict": say, "why": target.why}
        for target, (words, say) in found
    ]
