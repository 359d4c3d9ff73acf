"""A run: so much time of faults, then peace, then the verdict.

python -m tests.e2e.chaos.run [--db postgresql] [--minutes 1] [--seed N] [--runs 10] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.e2e.chaos.crew import Crew
from tests.e2e.chaos.databases import DATABASES, Database
from tests.e2e.chaos.evidence import gather, moment
from tests.e2e.chaos.faults import Faults
from tests.e2e.chaos.history import Violation
from tests.e2e.chaos.oracle import judge
from tests.e2e.chaos.report import Result
from tests.e2e.chaos.stage import ROOT, Stage
from tests.support.waiting import wait_until
from tools import processes

BRAKE_SECONDS = 3.0
"""Until every worker knows that a brake was removed."""
SQLITE_TRIES = 5
STALL_SECONDS = 120.0
"""How long nothing may be settled while something is due: the full sweep runs once a minute."""


def run(folder: Path, seed: int, seconds: float, database: str = "postgresql") -> Result:
    """Faults for `seconds`; then everything comes to rest and is judged. The servers' files stay in `folder`."""
    with Stage(folder, database) as stage:
        crew = Crew(stage, seed)
        try:
            crew.begin()
            _wait_for_first_effect(stage, crew)
            faults = Faults(stage, crew, seed)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                crew.tend()
                faults.tend()
                time.sleep(0.02)
            crew.tend()
            faults.heal()
            crew.stop_producing()
            released_at = _release(stage)
            drained_after = _drain(stage, crew)
            cuts = {
                f"{name} {fault.value}": n for name, proxy in stage.proxies.items() for fault, n in proxy.met.items()
            }
            crew.end()
        finally:
            crew.close()
        evidence = gather(stage.database, crew.journals, released_at)
    violations = [*judge(evidence), *(Violation("process", words) for words in crew.surprises)]
    if drained_after is None:
        violations.append(Violation("lost", f"nothing was settled for {STALL_SECONDS:g} s while something was due"))
    return Result(seed, seconds, drained_after, evidence, violations, faults.counts, cuts, crew.ends)


def _wait_for_first_effect(stage: Stage, crew: Crew) -> None:
    def fires() -> bool:
        crew.tend()
        return _number(stage.database, "SELECT count(*) FROM testapp_effect") > 0

    wait_until(fires, f"something fires, before the first fault; logs are in {stage.folder}")


def _release(stage: Stage) -> datetime:
    """Resume what producers and the brake have stopped; return when this began."""
    began_at = datetime.now(UTC)

    def call(*arguments: str) -> None:
        command = [sys.executable, "-m", "django", *arguments, "--yes"]
        with (stage.folder / "release.log").open("ab") as log:
            options: Any = {"env": stage.environment("producers"), "cwd": ROOT, "stdout": log, "stderr": log}
            # SQLite is not fair: while workers fire overdue timeouts, a command may wait longer than its own limit.
            for tries_left in reversed(range(SQLITE_TRIES if stage.database.name == "sqlite" else 1)):
                if subprocess.run(command, **options, check=not tries_left).returncode == 0:
                    return

    call("delayq_brake", "testapp.order.rush", "off")
    time.sleep(BRAKE_SECONDS)
    call("delayq_resume", *(f"testapp.order.{name}" for name in ("remind", "chill", "rush")))
    return began_at


def _drain(stage: Stage, crew: Crew) -> float | None:
    """Seconds from the last deadline until everything is settled (0: it was sooner); None: it never is.

    A busy machine may be left with thousands of overdue timeouts, so only a standstill is a violation.
    """
    database, fewest, progress_at = stage.database, math.inf, datetime.now(UTC)
    while True:
        unsettled = _number(database, "SELECT count(*) FROM django_delayq_timeout WHERE settled_at IS NULL")
        unsettled += _number(database, _UNARMED.format(text=database.text))
        [(last,)] = database.rows("SELECT max(due_at) FROM django_delayq_timeout")
        now, last_at = datetime.now(UTC), moment(last)
        if not unsettled:
            return max(0.0, (now - last_at).total_seconds())
        if unsettled < fewest:
            fewest, progress_at = unsettled, now
        if (now - max(last_at, progress_at)).total_seconds() > STALL_SECONDS:
            return None
        crew.tend()
        time.sleep(0.1)


_UNARMED = """
SELECT count(*) FROM testapp_order o WHERE status = 'unpaid' AND NOT EXISTS (
    SELECT 1 FROM django_delayq_timeout t JOIN django_content_type c ON c.id = t.content_type_id
    WHERE c.app_label = 'testapp' AND c.model = 'order'
    AND t.object_id = CAST(o.id AS {text}) AND t.since_at = o.created_at
)
"""


def _number(database: Database, sql: str) -> float:
    [(number,)] = database.rows(sql)
    return float(number)


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Run the seeds one after another; print each result, and at the end a line for each run."""
    parser = argparse.ArgumentParser(description="Workers, producers and servers under seeded faults, and a verdict.")
    parser.add_argument("--minutes", type=float, default=1.0, help="how long faults happen in each run (default 1)")
    parser.add_argument("--seed", type=int, help="repeat the faults of a former run")
    parser.add_argument("--runs", type=int, default=1, help="so many runs, with consecutive seeds (default 1)")
    parser.add_argument("--db", choices=sorted(DATABASES), default="postgresql", help="default: postgresql")
    parser.add_argument("--keep", type=Path, help="where logs, journals and the database's files stay")
    options = parser.parse_args()
    first = options.seed if options.seed is not None else random.randrange(10**9)
    verdicts = [_run(seed, options) for seed in range(first, first + options.runs)]
    passed = sum(line.startswith("passed") for line in verdicts)
    _print("\n".join([*verdicts, *([f"{passed} of {options.runs} runs passed"] if options.runs > 1 else [])]))
    return 0 if passed == options.runs else 1


def _run(seed: int, options: argparse.Namespace) -> str:
    """Run once and print the result; return the line of the verdict."""
    _print(f"seed {seed}")
    folder = options.keep / str(seed) if options.keep else Path(tempfile.mkdtemp(prefix="delayq-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        result = run(folder, seed, 60 * options.minutes, options.db)
    except Exception:
        _print(f"{traceback.format_exc()}the run itself failed; its files: {folder}")
        return f"FAILED  seed {seed:<10} the run itself failed"
    _print(str(result))
    if result.violations:
        _print(f"logs, journals and the database's files: {folder}")
    elif options.keep is None:
        shutil.rmtree(folder, ignore_errors=True)
    return result.verdict


if __name__ == "__main__":
    sys.exit(processes.supervised(main))
