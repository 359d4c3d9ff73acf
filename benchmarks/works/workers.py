"""Works of worker processes: lag, drain, idle, and the same with many pending timeouts."""

from __future__ import annotations

import os
import random
import signal
import time

from benchmarks.contestants import Contestant, Failed, Tree
from benchmarks.figures import quantile
from benchmarks.harness import LEAST_ROUNDS, Column, Run, Samples, Work, say
from benchmarks.rivals.delayq import WORKERS
from benchmarks.works.calls import ALL, FILES, UNSYNCED

CORES = len(os.sched_getaffinity(0))
CUT_OFF_SECONDS = 3.0
ATTEMPTS = 6
AHEAD_SECONDS = 2.0
"""Without Redis, a worker knows a timeout by then, however it was scheduled."""
LOOP_CALLS, PLANNED = 2_000, 100
DRAIN_SECONDS = 120.0
"""A contestant that needs longer has failed."""
FIRST_JOBS = 500
"""Jobs of the first drain of a contestant. It is not counted: it shows the rate, from which the next ones are sized."""


def lag_of(run: Run, contestant: Contestant, rate: int, seconds: float) -> tuple[float, float, float]:
    """Return p50 and p99 of the lag in ms, and the percentage of timeouts that ran, with one idle worker running.

    A timeout that has not run three seconds after the last deadline counts as that late. All are scheduled before the
    first deadline, without Redis more than two seconds before it: if that takes too long, they are scheduled again,
    with twice the time.
    """
    count, ahead = int(rate * seconds), AHEAD_SECONDS if contestant.name.endswith("@ledger") else 0.0
    for _ in range(ATTEMPTS):
        begin = time.time() + ahead + 0.3 + count * run.rates.get((contestant.name, "seconds a call"), 0.003)
        times = sorted(begin + random.uniform(0, seconds) for _ in range(count))
        contestant.forget()
        contestant.call("at_times", times)
        in_time = time.time() < begin - ahead
        time.sleep(max(0.0, times[-1] - time.time()))
        contestant.wait_for(count, CUT_OFF_SECONDS)
        if in_time:
            break
        run.rates[contestant.name, "seconds a call"] = 2 * run.rates.get((contestant.name, "seconds a call"), 0.003)
    else:
        raise Failed("scheduling took longer than the time until the first deadline")
    late = [(at - due) * 1000 for due, at in contestant.runs() if due >= begin]  # none of an earlier attempt
    ran = 100 * len(late) / count
    late += [CUT_OFF_SECONDS * 1000] * (count - len(late))
    return quantile(late, 0.5), quantile(late, 0.99), ran


def _lag(run: Run, contestant: Contestant) -> Samples:
    if run.rates.get((contestant.name, "ran"), 100.0) < 50:
        return {}  # its scheduler does not run within seconds: one round shows it
    contestant.call("clear")
    with contestant.working("lag"):
        contestant.warm_up("note")
        slow = lag_of(run, contestant, 50, run.sizes.lag_seconds)
        fast = lag_of(run, contestant, 200, run.sizes.lag_seconds / 4) if slow[2] == 100 else None
    contestant.call("clear")
    run.rates[contestant.name, "ran"] = slow[2]
    figures = {"p50": slow[0], "p99": slow[1], "ran": slow[2]}
    return figures | ({"fast_p50": fast[0], "fast_p99": fast[1]} if fast else {})


def drain_once(run: Run, contestant: Contestant, tree: Tree, *, job: str, kind: str, most: int) -> Samples:
    """Make jobs due while the workers are suspended, resume them, and measure until the last one has run.

    There are `most` business rows, whatever the number of jobs. The jobs need about `drain_seconds`.
    """
    contestant.warm_up(job)
    if (contestant.name, job + kind) not in run.rates:
        first = _drained(run, contestant, tree, job=job, count=min(FIRST_JOBS, most), rows=most)
        run.rates[contestant.name, job + kind] = first["per_second"]
    count = max(50, min(most, int(run.rates[contestant.name, job + kind] * run.sizes.drain_seconds)))
    figures = _drained(run, contestant, tree, job=job, count=count, rows=most)
    run.rates[contestant.name, job + kind] = figures["per_second"]
    return figures


def _drained(run: Run, contestant: Contestant, tree: Tree, *, job: str, count: int, rows: int) -> Samples:
    servers = run.arena.servers_of(contestant.name)
    contestant.call("prepare_for", job, max(rows, count))  # the workers may have locked rows: they still run
    contestant.forget()
    tree.signal(signal.SIGSTOP)
    try:
        contestant.call("enqueue", job, count, True)
        cpu, cpu_of_servers = tree.cpu(), servers.cpu()
    finally:
        began = time.time()
        tree.signal(signal.SIGCONT)
    if not contestant.wait_for(count, DRAIN_SECONDS):
        raise Failed(f"{contestant.recorded()} of {count} jobs ran in {DRAIN_SECONDS:.0f} s")
    seconds = max(at for _, at in contestant.runs()) - began
    used, served = (tree.cpu() - cpu) / count, (servers.cpu() - cpu_of_servers) / count
    return {
        "per_second": count / seconds,
        "us": used * 1e6,
        "server_us": served * 1e6,
        "most_per_second": CORES / (used + served),
        "jobs": float(count),
    }


def drains(run: Run, contestant: Contestant, kind: str, jobs: dict[str, tuple[str, int]]) -> Samples:
    """Drain each of `jobs` with the same workers: key -> job and greatest count."""
    figures: Samples = {}
    with contestant.working(kind) as tree:
        for key, (job, most) in jobs.items():
            found = drain_once(run, contestant, tree, job=job, kind=kind, most=most)
            figures |= {f"{key}_{name}": value for name, value in found.items()}
    return figures


def _drain(run: Run, contestant: Contestant) -> Samples:
    most = run.sizes.drain_jobs
    jobs = {"nothing": ("note", most), "settle": ("settle", most * 3 // 10)}
    if contestant.name == "bullmq":
        del jobs["settle"]  # it has no ORM
    if contestant.name.startswith(("delayq", "earlier")):
        jobs |= {"automatic": ("cancel_unpaid", most * 3 // 10)}
        jobs |= {"together": ("settle_together", most), "batch": ("settle_batch", most)}
    contestant.call("clear")
    figures = drains(run, contestant, "drain", jobs)
    contestant.call("clear")
    return figures


def _firings(run: Run, contestant: Contestant) -> Samples:
    """Drain many handlers that do nothing with one process, and fire such timeouts by `run()` in a loop."""
    contestant.call("clear")
    contestant.call("enqueue", "note", LOOP_CALLS + PLANNED)
    contestant.call("fire", PLANNED, PLANNED)
    loop = contestant.call("fire", LOOP_CALLS, PLANNED)
    contestant.call("clear")
    count = run.sizes.worker_jobs
    with contestant.working("lag") as tree:
        contestant.warm_up("note")
        found = _drained(run, contestant, tree, job="note", count=count, rows=count)
    contestant.call("clear")
    return {**found, "loop_us": loop["cpu_us"], "loop_server_us": loop["server_us"]}


def _steady(run: Run) -> dict[str, dict[str, list[float]]]:
    """Drain with three arrangements of the same worker in turn, so that their ratios come from the same minutes."""
    samples: dict[str, dict[str, list[float]]] = {}
    contestant = run.contestant("delayq")
    job = {"nothing": ("note", run.sizes.drain_jobs)}
    for number in range(run.sizes.steady_runs):
        if number >= LEAST_ROUNDS and run.is_over(STEADY):
            break
        for title in [kind for kind, options in WORKERS.items() if options]:
            try:
                contestant.call("clear")
                found = drains(run, contestant, title, job)
            except Failed as error:
                run.note_failure(f"{title}, run {number + 1}", error)
                continue
            for key, value in found.items():
                samples.setdefault(title, {}).setdefault(key, []).append(value)
        say(f"    run {number + 1}")
    return samples


STEADY = Work(
    "steady",
    "Steadiness of the drain, threads and processes",
    "The drain of handlers that do nothing, one call for each object, repeated with three arrangements in turn.",
    (Column("nothing_per_second", "per second", "more"), Column("nothing_us", "CPU us")),
    whole=_steady,
    plot="nothing_per_second",
    minutes=2,
)
WORKS = (
    Work(
        "lag",
        "Lag of an idle worker",
        "The time from a deadline to the call of the handler, for random deadlines: 50 a second, and then 200 a "
        "second for a quarter as long. One worker runs; that of django-delayq has one process (`--processes 1`), "
        "that of celery a pool of two. Without Redis, all are scheduled more than two seconds ahead. A timeout that"
        " has not run three seconds after the last deadline counts as that late; 200 a second is only measured if "
        "all of the first ones ran. A negative lag is early.",
        (
            Column("p50", "50 /s, p50 ms"),
            Column("p99", "50 /s, p99 ms"),
            Column("ran", "ran, %", "more"),
            Column("fast_p50", "200 /s, p50 ms"),
            Column("fast_p99", "200 /s, p99 ms"),
        ),
        (*ALL, *UNSYNCED, "delayq@ledger", *FILES),
        _lag,
        slow=True,
        plot="p99",
        minutes=3,
    ),
    Work(
        "drain",
        "Drain a backlog",
        "Jobs become due while the workers are suspended; then these are resumed. One call of the handler for each "
        "object, except in the column `batch=`; django-delayq with a transaction for each, except in the columns "
        "`together=` and `batch=`. Rivals use both cores. django-delayq has its default settings: a process of four"
        " threads for each core. The handlers do nothing, or cancel an unpaid invoice through the ORM: rivals lock "
        "and check in the task, with `select_for_update`; django-delayq locks and checks before the call, and "
        "records the timeout as fired. All have the same business rows, of a model without an automatic policy; one"
        " column has such a policy, for which saving the object costs more. There are at most 10,000 jobs, and no "
        "more than run in about two seconds (a quick run: one). *Workers* and *servers* are the CPU time for one "
        "job of the worker processes, and of PostgreSQL and Redis.",
        (
            Column("nothing_per_second", "nothing, per second", "more"),
            Column("nothing_us", "workers, CPU us"),
            Column("nothing_server_us", "servers, CPU us"),
            Column("settle_per_second", "lock, check and save, per second", "more"),
            Column("settle_us", "workers, CPU us"),
            Column("settle_server_us", "servers, CPU us"),
            Column("automatic_per_second", "with an automatic policy, per second", "more"),
            Column("together_per_second", "with `together=50`, per second", "more"),
            Column("batch_per_second", "with `batch=500`, per second", "more"),
        ),
        (*ALL, "django_q2_orm", *UNSYNCED, "huey@unsynced", "django_q2_orm@unsynced", *FILES),
        _drain,
        slow=True,
        plot="settle_per_second",
        minutes=3.5,
    ),
    Work(
        "worker",
        "CPU of one worker process",
        "One process (`--processes 1`) drains 20,000 handlers that do nothing (a quick run: 2,000), with a line of log "
        "for each. Its CPU time is without its start. Beside it: the CPU time of a process that fires such timeouts by "
        "`run()` in a loop, planned 100 at a time, with the process of PostgreSQL that serves it.",
        (
            Column("per_second", "per second", "more"),
            Column("us", "worker, CPU us"),
            Column("server_us", "servers, CPU us"),
            Column("loop_us", "`run()` in a loop, CPU us"),
            Column("loop_server_us", "its server, CPU us"),
        ),
        ("delayq", "earlier"),
        _firings,
        rounds=lambda sizes: 2,
        slow=True,
        minutes=1,
    ),
    STEADY,
)
