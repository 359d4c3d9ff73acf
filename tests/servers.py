"""Throwaway servers for the tests, on free ports, in a temporary directory, gone when their user is.

    python3 tests/servers.py run -- make test-suite                       what this machine has, then a command
    python3 tests/servers.py run --only redis,postgresql -- pytest tests/engine
    python3 tests/servers.py check                                        what this machine has, and what it lacks

The command finds the addresses in its environment (`DELAYQ_TEST_REDIS_URL`, ...). An address that is set
already is used as it is, so that runs nest and a server of your own can take the place of one of these.
What is missing is named and left out; with `CI=true` it is a failure.

Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import sys

if __package__ in (None, ""):  # run as a script, from this folder, whose `typing` would hide Python's own
    sys.path[0] = __file__.rpartition("tests")[0] or "."

import argparse
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tools import moved_clock, processes
from tools.servers import MariadbServer, PostgresServer, RedisServer, Server, ServerFailed

LEFT_OUT = "DELAYQ_TEST_LEFT_OUT"

SERVERS: dict[str, tuple[str, type[Server]]] = {
    "redis": ("DELAYQ_TEST_REDIS_URL", RedisServer),
    "postgresql": ("DELAYQ_TEST_POSTGRESQL_URL", PostgresServer),
    "mariadb": ("DELAYQ_TEST_MARIADB_URL", MariadbServer),
}
PROGRAMS: dict[str, tuple[str, Sequence[str]]] = {
    "chromium": ("DELAYQ_TEST_CHROMIUM", ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")),
    "chromedriver": ("DELAYQ_TEST_CHROMEDRIVER", ("chromedriver",)),
    "pgbouncer": ("DELAYQ_TEST_PGBOUNCER", ("pgbouncer",)),
}


def lacking(wanted: Sequence[str]) -> dict[str, str]:
    """Return descriptions of the missing servers of `wanted`, by name."""
    found: dict[str, str] = {}
    for name in wanted:
        variable = (SERVERS.get(name) or PROGRAMS[name])[0]
        if os.environ.get(variable):
            continue
        if name in SERVERS:
            words = SERVERS[name][1].missing()
        else:
            words = None if _program(name) else f"no {' or '.join(PROGRAMS[name][1])} on PATH"
        if words:
            found[name] = words
    return found


@contextlib.contextmanager
def serving(wanted: Sequence[str]) -> Iterator[dict[str, str]]:
    """Start what is there of `wanted` and give the environment variables that lead to it."""
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="delayq-servers-") as directory, contextlib.ExitStack() as stack:
        Path(directory).chmod(0o711)  # other accounts must reach their own directories in it
        for name in wanted:
            variable = (SERVERS.get(name) or PROGRAMS[name])[0]
            if os.environ.get(variable):
                continue
            if name in SERVERS:
                found[variable] = stack.enter_context(SERVERS[name][1](Path(directory, name))).url
            else:
                found[variable] = _program(name) or ""
        yield found


def run(command: Sequence[str], wanted: Sequence[str]) -> int:
    """Run `command` with the servers up; returns its exit code. Nothing that it or we started is left behind."""
    left_out = lacking(wanted)
    for name, words in left_out.items():
        _say(f"left out: {name} ({words})")
    if left_out and os.environ.get("CI") == "true":
        _say("CI=true: nothing may be left out")
        return 2
    try:
        with _on_another_day(), serving([name for name in wanted if name not in left_out]) as addresses:
            for variable, value in addresses.items():
                _say(f"{variable}={value}")
            return _run(command, {**os.environ, **addresses, LEFT_OUT: _joined(left_out)})
    except (ServerFailed, moved_clock.NotMoved) as failure:
        _say(str(failure))
        return 2


@contextlib.contextmanager
def _on_another_day() -> Iterator[None]:
    """Let what is started in the block run on the day that `DELAYQ_TEST_DAY` names, if it does."""
    with tempfile.TemporaryDirectory(prefix="delayq-clock-") as directory:
        Path(directory).chmod(0o755)  # PostgreSQL runs as another account
        os.environ.update(moved_clock.environment_of(os.environ.get(moved_clock.DAY, ""), Path(directory)))
        yield


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    process = processes.start(command, death_signal=signal.SIGTERM, env=environment)
    try:
        with processes.in_foreground(process):
            code = process.wait()
    finally:
        processes.stop(process)
    return code if code >= 0 else 128 - code


def _joined(left_out: Mapping[str, str]) -> str:
    before = os.environ.get(LEFT_OUT, "")
    return "\n".join(filter(None, [before, *(f"{name} ({words})" for name, words in left_out.items())]))


def _say(line: str) -> None:
    print(f"servers: {line}", file=sys.stderr, flush=True)


def _program(name: str) -> str | None:
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"  # where Debian keeps PgBouncer
    return next(filter(None, (shutil.which(program, path=path) for program in PROGRAMS[name][1])), None)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests/servers.py", description="Throwaway servers for the tests.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, words in (("run", "start servers, run a command, stop them"), ("check", "say what this machine has")):
        sub = verbs.add_parser(verb, help=words, description=words)
        sub.add_argument("--only", metavar="A,B", help=f"of {', '.join([*SERVERS, *PROGRAMS])}; by default all")
    verbs.choices["run"].add_argument("command", nargs=argparse.REMAINDER, help="after --")
    options = parser.parse_args(arguments)
    wanted = options.only.split(",") if options.only else [*SERVERS, *PROGRAMS]
    if unknown := set(wanted) - {*SERVERS, *PROGRAMS}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if options.verb == "check":
        absent = lacking(wanted)
        for name in wanted:
            print(f"{name}: {absent.get(name, 'there')}")
        return 1 if absent else 0
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("a command is needed after --")
    return processes.supervised(lambda: run(command, wanted))


if __name__ == "__main__":
    sys.exit(main())
