"""Workers in processes of their own, which may be killed, and the ledger afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from django_delayq import clock, get_policy
from django_delayq.ledger import writing
from django_delayq.ledger.subjects import subject_at
from django_delayq.models import Timeout
from tests.testapp.models import Effect, Order

StartWorker = Callable[..., "subprocess.Popen[bytes]"]
SHORT = {"LEASE": 1.0, "SWEEP_INTERVAL": 1.0}


@pytest.fixture
def start_worker(start_command: Callable[..., subprocess.Popen[bytes]]) -> StartWorker:
    """Start `delayq_worker`; keywords are environment variables of the tests' settings, without their prefix.

    One process, unless the arguments say otherwise: few tests are about several, which start more slowly.
    """

    def start(
        *arguments: str, seconds: Mapping[str, float] = SHORT, stderr: int | None = None, **variables: str
    ) -> subprocess.Popen[bytes]:
        environment = {f"DELAYQ_TEST_{name}": value for name, value in variables.items()}
        environment["DELAYQ_TEST_SECONDS"] = json.dumps(dict(seconds))
        return start_command("delayq_worker", "--processes", "1", *arguments, env=environment, stderr=stderr)

    return start


@dataclass(frozen=True)
class LoggedWorker:
    """A worker process and its log."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def text(self) -> str:
        return self.log.read_text()

    def has_logged(self, words: str) -> bool:
        return words in self.text

    def stop(self) -> str:
        """Stop the worker, which must end well; return its log."""
        self.process.terminate()
        assert self.process.wait(60) == 0, self.text
        return self.text


StartLogged = Callable[..., LoggedWorker]


@pytest.fixture
def start_logged(start_command: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> StartLogged:
    """Start `delayq_worker` with one process, which writes to a log of its own; keywords are its environment."""

    def start(*arguments: str, **environment: str) -> LoggedWorker:
        log = tmp_path / f"worker-{len(list(tmp_path.glob('worker-*')))}.log"
        with log.open("wb") as output:
            command = ("delayq_worker", "--processes", "1", *arguments)
            return LoggedWorker(start_command(*command, env=environment, stdout=output, stderr=output), log)

    return start


def end(worker: subprocess.Popen[bytes]) -> None:
    """Stop a worker, which must end well.

    On SQLite its main thread may be waiting for the write lock, for up to 20 s a statement, while handlers hold it.
    """
    assert worker.poll() is None, "it has ended by itself"
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0]) / 1024


def states() -> dict[str, int]:
    return dict(Counter(Timeout.objects.values_list("state", flat=True)))


def settled(count: int) -> Callable[[], bool]:
    return lambda: Timeout.objects.filter(settled_at__isnull=False).count() == count


def effects(what: str) -> dict[int | None, int]:
    """How often the handler of each timeout did its work."""
    return dict(Counter(Effect.objects.filter(what=what).values_list("timeout_id", flat=True)))


def due_now(policy: str, count: int = 1) -> list[Timeout]:
    """Write timeouts of new orders, due now, without entries in Redis: only a sweep finds them."""
    declared: Any = get_policy((Order, policy))
    subjects = [subject_at(declared, Order.objects.create(status="new").pk, "", "default") for _ in range(count)]
    Timeout.objects.bulk_create([writing.new_row(subject, clock.now(), None) for subject in subjects])
    return list(Timeout.objects.filter(slot__in=[subject.slot for subject in subjects], slot_taken=1).order_by("pk"))


def is_stopped(pid: int) -> bool:
    """Return whether the kernel has suspended the process."""
    with suppress(OSError):  # it has ended
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False
