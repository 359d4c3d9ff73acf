"""The workers and the producers: as many as there should be, whatever happens to them.

Some workers fire in threads, one sends messages to Celery, whose processes fire, and now and then there is an intruder:
a worker of another installation, which must refuse to start.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.chaos.databases import CELERY, INTRUDER, USERS
from tests.e2e.chaos.stage import ROOT, Stage
from tools import processes

END_SECONDS = 30.0
MOST_STOPPING_SECONDS = 120.0
"""How long a worker may take to stop while servers are away. One that never stops keeps what it has reserved."""
MOST_SURPRISES = 20
WITHOUT_REDIS = "p0"
"""The producer whose pushes are never made: a quarter of all."""
THREADS, SENDER = "threads", "sender"
SIZES = {THREADS: 3, SENDER: 1, CELERY: 1}
"""How many processes of each kind there should be. A process of Celery has two more, which fire."""
EXECUTOR = "django_delayq.contrib.celery.CeleryExecutor"
CELERY_WORKER = (
    "celery", "-A", "tests.e2e.executors.celery_app", "worker", "-c", "2", "-l", "WARNING",
    "--without-gossip", "--without-mingle", "--without-heartbeat",
)  # fmt: skip
WORKER = ("django", "delayq_worker", "--processes", "1", "-v0")
ANOTHER_INSTALLATION = 3
"""The exit code of a worker that refuses a ledger or a Redis of another installation."""


@dataclass
class Worker:
    """A worker process, and what we know of its fate."""

    process: subprocess.Popen[bytes]
    variables: Mapping[str, str]
    kind: str = THREADS
    is_ours_to_end: bool = False
    """The run has killed it, stopped it, or chosen it to be killed."""
    told_at: float | None = None
    """When it got SIGTERM."""
    stopped_since: float | None = None

    @property
    def is_plain(self) -> bool:
        return not self.variables and not self.is_told and self.stopped_since is None

    @property
    def is_told(self) -> bool:
        return self.told_at is not None

    def tell(self) -> None:
        """Ask it to stop. A second time would make it abort."""
        self.told_at = time.monotonic()
        self.process.send_signal(signal.SIGTERM)

    @property
    def does_not_stop(self) -> bool:
        return self.told_at is not None and time.monotonic() - self.told_at > MOST_STOPPING_SECONDS

    def is_stopped(self) -> bool:
        return self._status("State").startswith("T")

    def listens(self) -> bool:
        """Whether SIGTERM means something to it yet: one that has only just been started simply dies of it."""
        return bool(int(self._status("SigCgt") or "0", 16) >> (signal.SIGTERM - 1) & 1)

    def _status(self, name: str) -> str:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
            return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(f"{name}:")), "")
        return ""


def _end_of(process: subprocess.Popen[bytes], seconds: float = END_SECONDS) -> int | None:
    """Wait for its exit code. None: it still runs."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.returncode


class Crew:
    """Workers of all kinds and some producers; `tend` replaces workers that have ended."""

    def __init__(self, stage: Stage, seed: int, *, producers: int = 4) -> None:
        self.surprises: list[str] = []
        """Processes that exited unexpectedly."""
        self.ends: Counter[str] = Counter()
        self._stage = stage
        self._producers = producers
        self._seed = seed
        self._next: list[Mapping[str, str]] = []
        self._producing: list[subprocess.Popen[bytes]] = []
        self.workers: list[Worker] = []

    @property
    def journals(self) -> list[Path]:
        return sorted(self._stage.folder.glob("journal-*"))

    def begin(self) -> None:
        """Workers and producers are started."""
        self.tend()
        for number in range(self._producers):
            name = f"p{number}"
            silent = {"WITHOUT_REDIS": "1"} if name == WITHOUT_REDIS else {}
            journal = self._stage.folder / f"journal-{name}"
            command = ["tests.e2e.chaos.producing.producer", name, str(self._seed), str(journal)]
            environment = self._stage.environment("producers", **silent)
            self._producing.append(self._run(f"{name}.log", command, environment))

    def next_has(self, variables: Mapping[str, str]) -> None:
        """Set the environment of the next worker that fires in threads."""
        self._next.append(variables)

    def intrude(self) -> bool:
        """Start a worker of another installation. Return False if one is still about to refuse."""
        if any(worker.kind == INTRUDER for worker in self.workers):
            return False
        self._start(INTRUDER)
        return True

    def tend(self) -> None:
        """Call it often."""
        for worker in list(self.workers):
            if worker.process.poll() is not None:
                self._note_end(worker)
                self.workers.remove(worker)
                if len(self.surprises) > MOST_SURPRISES:
                    raise RuntimeError(f"workers do not live; logs are in {self._stage.folder}")
            elif worker.does_not_stop and not worker.is_ours_to_end:
                if worker.kind != CELERY:
                    self.surprises.append(f"a worker has not ended {MOST_STOPPING_SECONDS:g} s after SIGTERM")
                worker.is_ours_to_end = True
                processes.kill(worker.process)
            elif "STOP_AT" in worker.variables and worker.stopped_since is None and worker.is_stopped():
                worker.stopped_since = time.monotonic()
        for kind, size in SIZES.items():
            while sum(worker.kind == kind for worker in self.workers) < size:
                self._start(kind)

    def stop_producing(self) -> None:
        """Stop the producers after their current operation."""
        for process in self._producing:
            process.send_signal(signal.SIGTERM)
        for number, process in enumerate(self._producing):
            if _end_of(process, 90) != 0:
                self.surprises.append(f"producer p{number} ended with {process.returncode}")

    def dismiss_the_doomed(self) -> None:
        """From here on all workers are sound ones."""
        self._next.clear()
        for worker in self.workers:
            if worker.variables:
                worker.is_ours_to_end = True
                processes.kill(worker.process)
        self.tend()

    def end(self) -> None:
        """Stop all workers and wait for them."""
        for worker in [each for each in self.workers if each.kind != INTRUDER]:
            while worker.process.poll() is None and not worker.listens():
                time.sleep(0.02)
            if not worker.is_told:
                worker.tell()
        for worker in self.workers:
            _end_of(worker.process)
            self._note_end(worker)
        self.workers.clear()

    def close(self) -> None:
        """Nothing runs any more, however it came to this."""
        for process in [*(worker.process for worker in self.workers), *self._producing]:
            processes.kill(process)

    def _start(self, kind: str) -> None:
        variables = self._next.pop(0) if self._next and kind == THREADS else {}
        others = {
            SENDER: {"EXECUTOR": EXECUTOR},
            CELERY: {"EXECUTOR": EXECUTOR},
            INTRUDER: {"INSTALLATION": "elsewhere"},
        }
        user = kind if kind in USERS else ""
        environment = self._stage.environment("workers", user, **variables, **others.get(kind, {}))
        process = self._run(f"{kind}.log", CELERY_WORKER if kind == CELERY else WORKER, environment)
        self.workers.append(Worker(process, variables, kind))

    def _run(self, name: str, command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with (self._stage.folder / name).open("ab") as log:
            return processes.start([sys.executable, "-m", *command], env=environment, cwd=ROOT, stdout=log, stderr=log)

    def _note_end(self, worker: Worker) -> None:
        code = worker.process.returncode
        if worker.kind == CELERY:  # it may end when it loses its broker: its supervisor would start it again
            processes.kill(worker.process)
            self.ends["celery"] += 1
        elif worker.kind == INTRUDER and code == ANOTHER_INSTALLATION:
            self.ends["refused"] += 1
        elif worker.is_told and code == 0:
            self.ends["stopped"] += 1
        elif "KILL_AT" in worker.variables and code == -signal.SIGKILL:
            self.ends[f"killed at {worker.variables['KILL_AT']}"] += 1
        elif not (worker.is_ours_to_end and code == -signal.SIGKILL):
            told = " after SIGTERM" if worker.is_told else ""
            self.surprises.append(f"a worker ended with {code}{told}; see {worker.kind}.log")
