"""Start child processes that end with their parent.

Standard library only, because it runs before anything is installed. On Linux this also works when a process is killed
with SIGKILL; on other systems it works for every other way of exiting.

Four mechanisms complement each other:

* Every child leads its own process group, so that a signal also reaches the processes that it started.
* The kernel signals a child when its parent dies (PDEATHSIG), because a killed parent cleans nothing up.
* Orphans become children of this process, not of init (child subreaper), so that a grandchild that left its group is
  still found.
* `supervised` splits a launcher in two, so that each half cleans up when the other one is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

# Loaded here, because loading a library between fork and exec could wait for a lock that is never released.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def supervised(work: Callable[[], int]) -> int:
    """Run `work` in a child process and return its exit code; if either process is killed, the other one cleans up.

    SIGTERM, SIGHUP and SIGINT reach `work` as `SystemExit`, once, so that its `finally` blocks run.
    Call it before any other process is started, and exit with its result.
    """
    _adopt_orphans()
    if "MAKELEVEL" in os.environ:  # killing make must end this process too; a shell may leave it running on purpose
        _die_with(os.getppid(), signal.SIGTERM)
    parent = os.getpid()
    # A signal between the fork and the handlers would end one half without cleaning up.
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    child = os.fork()
    if child == 0:
        _exit_on_signals()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
        _die_with(parent, signal.SIGTERM)
        _adopt_orphans()
        try:
            return work()
        finally:
            _report(stop_descendants())
    for number in ENDING_SIGNALS:
        signal.signal(number, lambda received, _frame: _signal(child, received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    _report(stop_descendants())  # finds something only if the child was killed
    return status if status >= 0 else 128 - status


def start(
    command: Sequence[str | os.PathLike[str]], *, death_signal: int = signal.SIGKILL, **options: Any
) -> subprocess.Popen[bytes]:
    """Start `command` as the leader of its own process group.

    Call it from the main thread: the kernel sends `death_signal` when the *thread* that forked ends.
    `options` go to `subprocess.Popen`.
    """
    parent = os.getpid()
    return subprocess.Popen(
        command,
        process_group=0,
        preexec_fn=lambda: _die_with(parent, death_signal),  # noqa: PLW1509 - two system calls, no lock
        **options,
    )


def stop(process: subprocess.Popen[bytes], *, first: int = signal.SIGTERM, patience: float = 10.0) -> int:
    """Stop the group of `process` with the signal `first`, and SIGKILL after a delay; return its exit code."""
    _signal_group(process.pid, first)
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        pass
    finally:
        _signal_group(process.pid, signal.SIGKILL)
    return process.wait()


def kill(process: subprocess.Popen[bytes]) -> int:
    """Kill the group of `process` with SIGKILL, like a crash of the machine; return its exit code."""
    _signal_group(process.pid, signal.SIGKILL)
    return process.wait()


def stop_descendants(patience: float = 2.0) -> list[str]:
    """Stop all descendants of this process and return their descriptions. Needs /proc; otherwise finds none."""
    names = [_describe(pid) for pid in descendants()]
    for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 5.0)):
        deadline = time.monotonic() + seconds
        told: set[int] = set()  # a second SIGTERM would abort the graceful exit
        while (living := descendants()) and time.monotonic() < deadline:
            for pid in living:
                if pid not in told:
                    told.add(pid)
                    _signal(pid, number)
            _reap()
            time.sleep(0.02)
    _reap()
    return names


def descendants() -> list[int]:
    """Return the ids of all running descendants, without zombies (Linux; elsewhere none)."""
    parents = dict(_parents())
    found: list[int] = []
    frontier = {os.getpid()}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier}
        found.extend(frontier)
    return found


@contextlib.contextmanager
def in_foreground(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Give the terminal to the group of `process`, so that it alone gets Ctrl-C and a debugger's prompt."""
    if not sys.stdin.isatty() or os.tcgetpgrp(sys.stdin.fileno()) != os.getpgrp():
        yield
        return
    former = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # otherwise regaining the terminal would stop this process
    try:
        os.tcsetpgrp(sys.stdin.fileno(), process.pid)
        yield
    finally:
        os.tcsetpgrp(sys.stdin.fileno(), os.getpgrp())
        signal.signal(signal.SIGTTOU, former)


def _adopt_orphans() -> None:
    if _libc is not None:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _exit_on_signals() -> None:
    def leave(number: int, _frame: object) -> None:
        for ending in ENDING_SIGNALS:  # a second signal must not interrupt the cleanup
            signal.signal(ending, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for ending in ENDING_SIGNALS:
        signal.signal(ending, leave)


def _die_with(parent: int, death_signal: int) -> None:
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
        if os.getppid() != parent:  # the parent died before the call above, so there will be no signal
            os._exit(1)


def _report(left_behind: Sequence[str]) -> None:
    for process in left_behind:
        print(f"stopped a process that was left behind: {process}", file=sys.stderr, flush=True)


def _parents() -> Iterator[tuple[int, int]]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # "pid (name) state ppid ...": the name may contain spaces and brackets, so parse from the end.
            state, parent = stat.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state not in "ZX":
                yield int(stat.parent.name), int(parent)


def _describe(pid: int) -> str:
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return f"{pid} {command.strip()[:100]}"
    return str(pid)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
