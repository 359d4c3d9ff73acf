"""Works of the calling process: schedule, cancel, bulk, save, and one firing in the same process."""

from __future__ import annotations

from benchmarks.contestants import RIVALS, Contestant
from benchmarks.harness import Column, Run, Samples, Work

ALL = ("delayq", "earlier", *RIVALS)
OURS = ("delayq", "earlier")
FILES = ("delayq@sqlite", "earlier@sqlite", "delayq@mariadb", "earlier@mariadb")
PURE = ("delayq@pure", "earlier@pure")
UNSYNCED = ("delayq@unsynced", "celery@unsynced", "procrastinate@unsynced")
"""Contestants that are measured without `fsync`, too: django-delayq, and those of its rivals that targets name."""
WARM_UP = 20
SOON_SECONDS = 240.0
"""Within the default `HORIZON` of django-delayq, so that Redis has the timeout."""


def _schedule(run: Run, contestant: Contestant) -> Samples:
    count = run.sizes.calls
    contestant.call("clear")
    contestant.call("prepare", count)
    contestant.call("schedule_one", WARM_UP)
    contestant.call("cancel_one", WARM_UP)
    one = contestant.call("schedule_one", count)
    cancelled = contestant.call("cancel_one", count)
    contestant.call("clear")
    contestant.call("prepare", count)
    soon = contestant.call("schedule_one", count, SOON_SECONDS)
    contestant.call("clear")
    contestant.call("prepare", count)
    contestant.call("schedule_inside", WARM_UP)
    contestant.call("clear")
    contestant.call("prepare", count)
    inside = contestant.call("schedule_inside", count)
    contestant.call("clear")
    return {
        "cpu_us": one["cpu_us"],
        "per_second": one["per_second"],
        "soon_us": soon["cpu_us"],
        **({"inside_us": inside["cpu_us"]} if inside else {}),
        **({"cancel_us": cancelled["cpu_us"]} if cancelled else {}),
    }


def _bulk(run: Run, contestant: Contestant) -> Samples:
    count = run.sizes.bulk // (5 if "@" in contestant.name else 1)
    contestant.call("clear")
    contestant.call("prepare", count)
    figures = contestant.call("bulk", count)
    contestant.call("clear")
    return dict(figures) if figures else {}


def _save(run: Run, contestant: Contestant) -> Samples:
    contestant.call("clear")
    contestant.call("prepare", run.sizes.calls, "Plain")
    contestant.call("save_unchanged", WARM_UP)
    figures: Samples = contestant.call("save_unchanged", run.sizes.calls)
    contestant.call("save_new", WARM_UP)
    figures |= contestant.call("save_new", run.sizes.calls)
    unit = contestant.call("unit", run.sizes.calls)["cpu_us"]
    contestant.call("clear")
    return {**figures, "unit_us": unit}


def _firing(run: Run, contestant: Contestant) -> Samples:
    figures: Samples = {}
    for job, key in (("note", "nothing"), ("settle", "settle")):
        contestant.call("clear")
        contestant.call("enqueue", job, run.sizes.calls + WARM_UP)
        contestant.call("fire", WARM_UP)
        unit = contestant.call("unit", run.sizes.calls)["cpu_us"]
        used = contestant.call("fire", run.sizes.calls)["cpu_us"]
        figures |= {f"{key}_us": used, f"{key}_units": used / unit, "unit_us": unit}
    contestant.call("clear")
    return figures


WORKS = (
    Work(
        "schedule",
        "Schedule and cancel one",
        "CPU time of the calling process for one call, outside a transaction and inside a transaction of the caller"
        " that updates one row. Contestants that store jobs in Redis are called in `transaction.on_commit` there. "
        "Due in half an hour; in one column in four minutes, for which django-delayq also calls Redis.",
        (
            Column("cpu_us", "schedule, CPU us"),
            Column("per_second", "calls per second", "more"),
            Column("soon_us", "due in four minutes, CPU us"),
            Column("inside_us", "in the caller's transaction, additional CPU us"),
            Column("cancel_us", "cancel, CPU us"),
        ),
        (*ALL, "procrastinate_pool", *UNSYNCED, *PURE, "procrastinate@pure", *FILES),
        _schedule,
        plot="cpu_us",
        minutes=1.5,
    ),
    Work(
        "bulk",
        "Schedule in bulk",
        "One call of the bulk function for many objects, or one pipeline for each 1,000 jobs. Celery, huey and "
        "dramatiq have no such function.",
        (Column("per_second", "timeouts per second", "more"), Column("cpu_us", "CPU us each")),
        ("delayq", "earlier", "rq", "procrastinate", "django_q2", "bullmq", "delayq@unsynced", *FILES),
        _bulk,
        plot="per_second",
        minutes=2,
    ),
    Work(
        "save",
        "Save an object with one automatic policy",
        "`save()` of an object that has a pending timeout, with a change that does not matter to the policy, "
        "against the same table without a policy. New objects are armed a day ahead, by a timedelta and by working "
        "hours. The unit is `BEGIN; SELECT 1; COMMIT` through Django.",
        (
            Column("with_us", "with the policy, CPU us"),
            Column("without_us", "without, CPU us", ""),
            Column("more_us", "additional CPU us"),
            Column("statements", "statements"),
            Column("armed_us", "save and arm a new one, CPU us"),
            Column("span_us", "in working hours, additional CPU us"),
            Column("unit_us", "unit, CPU us", ""),
        ),
        (*OURS, *PURE, *FILES),
        _save,
        minutes=0.5,
    ),
    Work(
        "firing",
        "One timeout alone, from plan to commit",
        "CPU time of one process that fires due timeouts one at a time, without Redis: plan, lock, check, mark, "
        "handler, commit. The unit is `BEGIN; SELECT 1; COMMIT` through Django in the same round.",
        (
            Column("nothing_us", "handler does nothing, CPU us"),
            Column("nothing_units", "in units"),
            Column("settle_us", "condition, and the handler saves the object, CPU us"),
            Column("settle_units", "in units"),
            Column("unit_us", "unit, CPU us", ""),
        ),
        (*OURS, *PURE, *FILES),
        _firing,
        minutes=0.8,
    ),
)
