"""Run `make demo`: Redis, web server and worker for the shop, a few dozen orders, and then a page to play with it.

In a terminal the shop stays open until Ctrl-C; without a terminal the demo exits after the orders. Its processes
always end with it.

Environment variables: `ORDERS` and `REVIEWS` (CSV files of recorded orders instead of made-up ones), `PORT`,
`DEMO_DATABASE_URL` and `DEMO_REDIS_URL` (your own servers). `DATABASE_URL`, `REDIS_URL` and
`DJANGO_SETTINGS_MODULE` are ignored, because they may belong to another project, whose database the demo would migrate.
Standard library only; Django runs in the children.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from tools import processes  # noqa: E402
from tools.servers import RedisServer, ServerFailed, free_port  # noqa: E402

ADMIN, PASSWORD = "admin", "demo"
USUAL_PORT = 8000
PATIENCE_SECONDS = 60
LOG_LINES = 25
SHOW_CURSOR = "\x1b[?25h"


class DemoFailed(Exception):
    """A part of the demo failed; the message names it and contains the end of its log."""


class Demo:
    """The processes of the shop, and the directory with its database and logs."""

    def __init__(self, directory: Path, redis_url: str | None) -> None:
        self.directory = directory
        self.port = _port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.environment = {
            **{name: value for name, value in os.environ.items() if name != "REDIS_URL"},
            "DJANGO_SETTINGS_MODULE": "config.settings",
            "DATABASE_URL": os.environ.get("DEMO_DATABASE_URL") or f"sqlite:///{directory / 'shop.sqlite3'}",
            "PYTHONUNBUFFERED": "1",
            "DJANGO_SUPERUSER_USERNAME": ADMIN,
            "DJANGO_SUPERUSER_EMAIL": "admin@example.com",
            "DJANGO_SUPERUSER_PASSWORD": PASSWORD,
        }
        if redis_url:
            self.environment["REDIS_URL"] = redis_url
        self.serving: dict[str, subprocess.Popen[bytes]] = {}

    def prepare(self) -> None:
        """Create a migrated database with an administrator."""
        self._finish("migrate", "--verbosity", "0")
        self._finish("createsuperuser", "--no-input")

    def serve(self) -> None:
        """Start worker and web server, and wait until the shop responds."""
        self._start("worker", "delayq_worker")
        self._start("web", "runserver", "--noreload", f"127.0.0.1:{self.port}")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self._answers():
            self.check()
            if time.monotonic() > deadline:
                raise DemoFailed(f"The web server does not answer at {self.url}.\n{self._end_of_log('web')}")
            time.sleep(0.1)

    def play(self, options: Sequence[str]) -> None:
        """Play the orders; the command draws the table and prints the summary."""
        command = _manage("play_demo", *options)
        playing = processes.start(command, env=self.environment, stdin=subprocess.DEVNULL)
        try:
            while playing.poll() is None:
                self.check()
                time.sleep(0.1)
        finally:
            processes.stop(playing)
        if playing.returncode:
            raise DemoFailed(f"Some orders did not end as expected.\n{self._end_of_log('worker')}")

    def stay(self) -> None:
        """Serve until Ctrl-C."""
        try:
            while True:
                self.check()
                time.sleep(0.5)
        except SystemExit as ending:
            if ending.code != 128 + signal.SIGINT:
                raise

    def check(self) -> None:
        """Raise `DemoFailed` if the worker or the web server has exited."""
        for name, process in self.serving.items():
            if process.poll() is not None:
                raise DemoFailed(f"The {name} has ended with {process.returncode}.\n{self._end_of_log(name)}")

    def stop(self) -> None:
        """Stop worker and web server; running handlers finish."""
        for process in self.serving.values():
            processes.stop(process)

    def _start(self, name: str, *arguments: str) -> None:
        environment = {**self.environment, "DJANGO_SETTINGS_MODULE": "config.demo"}
        with (self.directory / f"{name}.log").open("wb") as log:
            self.serving[name] = processes.start(
                _manage(*arguments), env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _finish(self, *arguments: str) -> None:
        done = subprocess.run(
            _manage(*arguments), env=self.environment, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        if done.returncode:
            raise DemoFailed(f"{arguments[0]} failed.\n{(done.stdout + done.stderr).decode(errors='replace')}")

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url, timeout=5) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError as error:
            raise DemoFailed(f"{self.url} answers with {error.code}.\n{self._end_of_log('web')}") from error
        except OSError:
            return False

    def _end_of_log(self, name: str) -> str:
        lines = (self.directory / f"{name}.log").read_text(errors="replace").splitlines()
        return "\n".join([f"The end of its log ({name}):", *lines[-LOG_LINES:]])


def main() -> int:
    if sys.argv[1:]:
        _say(str(__doc__))
        return 0 if sys.argv[1] in {"-h", "--help"} else 2
    in_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    try:
        with tempfile.TemporaryDirectory(prefix="delayq-demo-") as directory, _redis(Path(directory)) as redis_url:
            demo = Demo(Path(directory), redis_url)
            try:
                _show(demo, stay=in_terminal)
            finally:
                demo.stop()
    except (DemoFailed, ServerFailed) as failure:
        _say(str(failure))
        return 1
    finally:
        if in_terminal:
            sys.stdout.write(SHOW_CURSOR)  # a table that is stopped cannot show it again
    _say("Done; all its processes have ended.")
    return 0


def _show(demo: Demo, *, stay: bool) -> None:
    orders = _recorded_orders()
    demo.prepare()
    demo.serve()
    _say("The shop is open. Its first orders:")
    demo.play(orders)
    if stay:
        _say(f"Now play with it: {demo.url}/   (admin: {ADMIN} / {PASSWORD})   Ctrl-C: stop")
        demo.stay()


@contextlib.contextmanager
def _redis(directory: Path) -> Iterator[str | None]:
    """Yield the URL of a Redis for this demo, or None if there is none."""
    if own := os.environ.get("DEMO_REDIS_URL"):
        yield own
    elif missing := RedisServer.missing():
        _say(f"Without Redis ({missing}): the worker polls the database once a second instead.")
        yield None
    else:
        with RedisServer(directory / "redis") as server:
            yield server.url


def _recorded_orders() -> list[str]:
    options: list[str] = []
    for variable, option in (("ORDERS", "--orders-csv"), ("REVIEWS", "--reviews-csv")):
        if file := os.environ.get(variable):
            if not Path(file).is_file():
                raise DemoFailed(f"{variable}={file}: there is no such file.")
            options += [option, file]
    return options


def _port() -> int:
    if chosen := os.environ.get("PORT"):
        return int(chosen)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just closed is free
        try:
            probe.bind(("127.0.0.1", USUAL_PORT))
        except OSError:
            return free_port()
    return USUAL_PORT


def _manage(*arguments: str) -> list[str]:
    return [sys.executable, str(HERE / "manage.py"), *arguments]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(processes.supervised(main))
