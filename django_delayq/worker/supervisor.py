"""Run several worker processes under one supervisor.

It passes signals on, and starts processes again that died.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

from django.db import Error as DatabaseError
from django.db import connections

from django_delayq.backoff import Backoff
from django_delayq.conf import get_settings
from django_delayq.exceptions import NotMigrated, PolicyError, WrongInstallation
from django_delayq.ledger.db_connections import pool_limit, server_limit
from django_delayq.logs import Formatter
from django_delayq.times.clock import duration_text
from django_delayq.worker.loop import STOP_SIGNALS, Worker, log_summary, signal_handlers
from django_delayq.worker.watchdog import exit_at_once

logger = logging.getLogger("django_delayq.worker")

FIRST_PAUSE_SECONDS: Final = 0.5
"""A process that dies at its start must not be started in a loop."""
LONGEST_PAUSE_SECONDS: Final = 30.0
"""The longest delay before a process is started again; one that has run for longer is started after the first delay."""
CHECK_SECONDS: Final = 1.0
"""The longest wait for a signal: one that the system passes to another thread than the main one does not end it."""
NUMBER_VARIABLE: Final = "DELAYQ_PROCESS"
"""The environment variable that holds the number of a process, from 1."""
REFUSED: Final = 3
"""The exit code of a worker that refuses its database or its Redis. It is not started again."""
GAVE_UP: Final = 4
"""The exit code of a process of a burst whose database failed for too long. It is not started again."""
_STOP, _ABORT = b"s", b"a"


@dataclass(slots=True)
class _Process:
    """A place for a worker process: `pid` 0 while none runs."""

    number: int
    pid: int = 0
    channel: Any = None
    """By which the process is stopped, and sends at its end what it has done."""
    began: float = 0.0
    suspended: float = inf
    """Since when it is suspended, as by SIGSTOP; if it is not, `inf`."""
    is_done: bool = False
    backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS))


class Supervisor:
    """Runs `count` workers, each in a process of its own. Needs `os.fork`. For the main thread of a process.

    A socket and not a signal stops a process. Terminals, and systemd by default, send a signal to all processes of a
    service, so a process would receive it twice and abort its handlers. The end of the socket also stops the processes
    of a supervisor that was killed.

    Args:
        count: how many processes.
        new_worker: makes the worker, in its process.
        ends: whether a process that exits with 0 is done, as in a burst. If not, it is started again.
    """

    def __init__(self, count: int, new_worker: Callable[[], Worker], *, ends: bool = False) -> None:
        self._processes = [_Process(number) for number in range(1, count + 1)]
        self._new_worker, self._ends = new_worker, ends
        self._signals = self._sent = self._code = 0
        self._began_at = time.monotonic()
        self._counts: Counter[str] = Counter()

    def run(self) -> int:
        """Run the processes until a signal stops them, or all are done; return the exit code.

        It is 1 if a process failed while it was stopped, or had to abort handlers; `REFUSED` if a process
        refused to start, which stops the others.
        """
        woken: SimpleQueue[None] = SimpleQueue()  # whose `get` a signal handler may end

        def count(*_: object) -> None:
            self._signals += 1
            woken.put(None)

        handlers = {**dict.fromkeys(STOP_SIGNALS, count), signal.SIGCHLD: lambda *_: woken.put(None)}
        with signal_handlers(handlers):
            while True:
                self._pass_signals_on()
                for process in self._processes:
                    if not process.pid and not process.is_done and not process.backoff.seconds_left:
                        self._start(process)
                left = [process for process in self._processes if process.pid or not process.is_done]
                if not left:
                    if self._counts:  # one of them has begun
                        log_summary(self._began_at, self._counts)
                    return self._code
                waits = [process.backoff.seconds_left for process in left if not process.pid]
                with suppress(Empty):
                    woken.get(timeout=min([CHECK_SECONDS, *waits]))
                self._reap()

    def _pass_signals_on(self) -> None:
        """Stop the processes after the first signal, and abort their handlers after the second one."""
        for _ in range(self._sent, min(self._signals, 2)):
            self._sent += 1
            for process in self._processes:
                process.is_done = True  # it is not started again
                if process.channel is not None:
                    with suppress(OSError):  # it has just ended
                        process.channel.send(_STOP if self._sent == 1 else _ABORT)

    def _start(self, process: _Process) -> None:
        for connection in connections.all(initialized_only=True):  # two processes cannot share a connection or a pool
            connection.close()
            getattr(connection, "close_pool", connection.close)()
        process.channel, channel = socket.socketpair()
        process.began = time.monotonic()
        # A signal between the fork and the handlers of the process would be counted by the copy of this object.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            process.pid = os.fork()
            if process.pid == 0:
                self._be_worker(process, channel)
        except OSError as error:  # too many processes, or too little memory, for now
            self._close(process)
            process.backoff.failed()
            words = "Worker process %d cannot be started, which is tried again in %.1f s: %s"
            logger.error(words, process.number, process.backoff.seconds_left, error, extra={"event": "process_refused"})
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            channel.close()

    def _close(self, process: _Process) -> None:
        """Add what the process has sent, if any, to the sums of the summary."""
        with process.channel as channel, suppress(OSError, ValueError):  # it was killed
            self._counts.update(json.loads(channel.recv(4096, socket.MSG_DONTWAIT)))
        process.channel = None

    def _be_worker(self, process: _Process, channel: socket.socket) -> None:
        """Run a worker in the new process, and end it without returning to the code that called the supervisor."""
        code = 1
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for own in [each.channel for each in self._processes if each.channel]:
                own.close()
            Formatter.prefix = f"[{process.number}] "
            os.environ[NUMBER_VARIABLE] = str(process.number)
            worker = self._new_worker()
            worker.exits, worker.processes = exit_at_once, len(self._processes)
            for number in STOP_SIGNALS:  # until `run` counts them
                signal.signal(number, lambda _number, _frame: worker.stop())
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            threading.Thread(target=_obey, args=(channel, worker), name="delayq-orders", daemon=True).start()
            worker.run()
            with suppress(OSError):  # the supervisor was killed
                channel.sendall(json.dumps(worker.counts).encode())
            code = GAVE_UP if worker.gave_up else int(worker.has_failed)
        except (NotMigrated, PolicyError, WrongInstallation) as error:
            print(f"delayq_worker: {error}", file=sys.stderr, flush=True)  # noqa: T201 - the log may not be shown
            code = REFUSED
        except BaseException:  # noqa: BLE001 - nothing of the supervisor may run in this process
            traceback.print_exc()
        finally:
            logging.shutdown()
            with suppress(AttributeError, OSError, ValueError):  # AttributeError: it is None if it was closed
                sys.stdout.flush()
            os._exit(code)

    def _reap(self) -> None:
        """Note the processes that have ended, and when each is started again."""
        for process in [each for each in self._processes if each.pid]:
            pid, status = os.waitpid(process.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if not pid or os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
                if pid:
                    process.suspended = time.monotonic() if os.WIFSTOPPED(status) else inf
                self._kill_suspended(process)
                continue
            code, process.pid, process.suspended = os.waitstatus_to_exitcode(status), 0, inf
            self._close(process)
            process.is_done |= code in (REFUSED, GAVE_UP) or (code == 0 and self._ends)
            if code == REFUSED:
                self._code, self._signals = code, max(self._signals, 1)
            elif process.is_done:
                self._code = self._code or int(code != 0)
            elif code != 0:
                if time.monotonic() - process.began > LONGEST_PAUSE_SECONDS:
                    process.backoff.succeeded()
                process.backoff.failed()
                end = f"exit code {code}" if code > 0 else f"signal {-code} ({signal.strsignal(-code)})"
                pause, lease = process.backoff.seconds_left, duration_text(get_settings().lease)
                words = "Worker process %d (pid %d) ended with %s, and is started again in %.1f s. "
                words += "The timeouts that it held fire when its lease expires, within %s"
                facts = {"pid": pid, "exit_code": code}
                logger.error(words, process.number, pid, end, pause, lease, extra={"event": "process_died", **facts})

    def _kill_suspended(self, process: _Process) -> None:
        """Kill a process that is to stop, and has been suspended for a lease: other workers fire what it held.

        After the second signal at once.
        """
        seconds = time.monotonic() - process.suspended
        if process.is_done and seconds > (get_settings().lease.total_seconds() if self._sent < 2 else 0):
            words = "Worker process %d (pid %d) is to stop, but has been suspended for %.0f s: it is killed"
            logger.error(words, process.number, process.pid, seconds, extra={"event": "process_suspended"})
            os.kill(process.pid, signal.SIGKILL)


def default_count(worker: Worker) -> int:
    """Return for how many processes like `worker` there are cores, at most four.

    Together they open at most half of the connections that the server allows, because web processes need some, too.
    """
    found = min(4, _cores())
    with suppress(DatabaseError):
        if found > 1 and pool_limit(worker.using) is None and (limit := server_limit(worker.using)):
            found = max(1, min(found, limit.size // 2 // (worker.concurrency + limit.own)))
    return found


def _cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may use, by its affinity and by the quota of its container or service.

    1 on systems other than Linux: libraries of macOS may crash a process that was forked.
    """
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    groups, own = root / "sys/fs/cgroup", ""
    with suppress(OSError):
        own = (root / "proc/self/cgroup").read_text().rpartition("::/")[2].strip()
    for names in (("cpu.max",), (f"{own}/cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with suppress(OSError, ValueError):  # ValueError: "max"
            quota, period = map(int, " ".join((groups / name).read_text() for name in names).split())
            cores = min(cores, quota / period if quota > 0 else cores)
    return max(1, round(cores))


def _obey(channel: socket.socket, worker: Worker) -> None:
    """Stop `worker` when the supervisor orders it, or ends without an order."""
    while (order := channel.recv(1)) == _STOP:
        worker.stop()
    worker.stop(hard=order == _ABORT)
