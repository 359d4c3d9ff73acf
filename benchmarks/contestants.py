"""Contestants as the harness has them: own Redis, own database, a client process, and worker processes on demand."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from benchmarks.rivals.base import cpu_clock
from benchmarks.shop.jobs import RECORD
from tools import processes
from tools.servers import MariadbServer, PostgresServer, RedisServer, Server

ROOT = Path(__file__).resolve().parent.parent
RIVALS = ("celery", "rq", "huey", "dramatiq", "procrastinate", "django_q2", "bullmq")
TICKS = os.sysconf("SC_CLK_TCK")
PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 1e6
START_SECONDS = 60.0


class Variant(NamedTuple):
    """What a suffix of a contestant's name changes: `delayq@pure`."""

    words: str
    database: str = "postgresql"
    environment: Mapping[str, str] = {}
    fsync: bool = True


VARIANTS = {
    "": Variant(""),
    "unsynced": Variant(", `fsync` off", fsync=False),
    "pure": Variant(", psycopg in pure Python", environment={"PSYCOPG_IMPL": "python"}),
    "ledger": Variant(", without Redis", environment={"BENCH_WITHOUT_REDIS": "1"}),
    "sqlite": Variant(" on sqlite", "sqlite"),
    "mariadb": Variant(" on mariadb", "mariadb"),
}


class Postgres(PostgresServer):
    """With the default settings of its configuration, so that a commit waits for the disk."""

    unsafe: Mapping[str, str] = {}


class Mariadb(MariadbServer):
    """The same."""

    unsafe: Mapping[str, str] = {}


class Failed(Exception):
    """A contestant could not do what was asked of it; the others continue."""


class Tree:
    """Processes with their descendants: CPU time and memory, read from /proc."""

    def __init__(self, roots: Sequence[int]) -> None:
        self.roots = roots

    def pids(self) -> list[int]:
        children: dict[int, list[int]] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                children.setdefault(int(_stat(stat)[1]), []).append(int(stat.parent.name))
        found = list(self.roots)
        for pid in found:  # grows while it is read
            found += children.get(pid, [])
        return found

    def cpu(self) -> float:
        """Return the CPU seconds of the processes, and of their children that have ended, to the nanosecond."""
        total = 0.0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                total += time.clock_gettime(cpu_clock(pid))
                total += sum(map(int, _stat(Path(f"/proc/{pid}/stat"))[13:15])) / TICKS
        return total

    def signal(self, number: int) -> None:
        for pid in self.roots:
            os.killpg(pid, number)

    def memory_mb(self) -> float:
        total = 0.0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_MB
        return total


def _stat(path: Path) -> list[str]:
    return path.read_text(errors="replace").rpartition(")")[2].split()


@dataclass
class Contestant:
    """One contestant: `call` makes requests to its client process, `working` starts its workers.

    Its processes run in the folder of the records: in ROOT, `python -m` would import the package of this checkout also
    for the contestant "earlier".
    """

    name: str
    title: str
    environment: dict[str, str]
    records: Path
    log: Path
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    pending: int = 0
    """How many jobs are pending for longer than a measurement (see `works.pending.grow`)."""

    @property
    def database(self) -> str:
        name: str = json.loads(self.environment["BENCH_DATABASE"])["NAME"]
        return name

    @property
    def purposes(self) -> Path:
        """The file in which an idle worker of django-delayq names the function that began each transaction."""
        return self.records.with_suffix(".purposes")

    def call(self, operation: str, *args: Any) -> Any:
        """Return the result of an operation of the client. Raises `Failed`."""
        if operation == "clear":
            self.pending = 0
        process = self._client()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({"operation": operation, "args": args}).encode() + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError as error:
            raise Failed(f"{operation}: {error}; {self._end_of_log()}") from error
        if not answer:
            raise Failed(f"{operation}: its process ended; {self._end_of_log()}")
        reply = json.loads(answer)
        if "error" in reply:
            raise Failed(f"{operation}: {reply['error']}")
        return reply["result"]

    @contextlib.contextmanager
    def working(self, kind: str) -> Iterator[Tree]:
        """Run the workers of this kind; yield their processes."""
        commands, environment = self.call("worker", kind), dict(self.environment)
        if kind == "idle":
            environment["BENCH_PURPOSES"] = str(self.purposes)
        with self.log.open("ab") as log:
            started = [
                processes.start(command, env=environment, cwd=self.records.parent, stdout=log, stderr=log)
                for command in commands
            ]
        try:
            yield Tree([process.pid for process in started])
        finally:
            for process in started:
                processes.kill(process)  # nothing of it is used any more, and some need seconds to stop

    def recorded(self) -> int:
        """Return how many handlers have run since `forget`."""
        return self.records.stat().st_size // RECORD.size

    def runs(self) -> list[tuple[float, float]]:
        """Return deadline and time of every call of a handler since `forget`."""
        return list(RECORD.iter_unpack(self.records.read_bytes()))

    def forget(self) -> None:
        os.truncate(self.records, 0)

    def wait_for(self, count: int, seconds: float) -> bool:
        """Wait until `count` handlers have run; return False after so many seconds."""
        return wait_until(lambda: self.recorded() >= count, seconds)

    def warm_up(self, job: str, count: int = 20) -> None:
        """Have the workers run some jobs, so that they have loaded their code and opened their connections."""
        self.forget()
        self.call("enqueue", job, count)
        if not self.wait_for(count, START_SECONDS):
            raise Failed(
                f"the workers ran {self.recorded()} of {count} jobs in {START_SECONDS:.0f} s; {self._end_of_log()}"
            )
        time.sleep(0.3)
        self.forget()

    def close(self) -> None:
        if self.process is not None:
            with contextlib.suppress(BrokenPipeError), self.process:  # a dead process has closed one
                processes.stop(self.process)

    def _client(self) -> subprocess.Popen[bytes]:
        if self.process is None:
            command = [sys.executable, "-m", "benchmarks.client", self.environment["BENCH_NAME"]]
            if self.name == "bullmq":
                command = ["node", str(ROOT / "benchmarks/rivals/bullmq.mjs"), "client"]
            self.records.touch()
            with self.log.open("ab") as log:
                self.process = processes.start(
                    command,
                    env=self.environment,
                    cwd=self.records.parent,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                )
        return self.process

    def _end_of_log(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()[-1:]
        return " ".join(lines)[:300].replace(str(ROOT), "")


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


class Arena:
    """Starts temporary servers and contestants when they are first used, and stops them at the end.

    Args:
        folder: an empty folder for all files.
        against: another checkout of this project, to be measured as the contestant "earlier"; or None.
    """

    def __init__(self, folder: Path, against: Path | None = None) -> None:
        self._folder, self.against = folder, against and against.resolve()
        self._stack = contextlib.ExitStack()
        self._servers: dict[str, Server] = {}
        self._contestants: dict[str, Contestant] = {}
        self._fsync = True

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        for contestant in self._contestants.values():
            contestant.close()
        self._stack.close()

    def server(self, name: str, kind: type[Server]) -> Any:
        """Return a running server, one for each name. Raises `Failed` if this machine has no such server."""
        if name not in self._servers:
            if missing := kind.missing():
                raise Failed(missing)
            self._servers[name] = self._stack.enter_context(kind(self._folder / name))
        return self._servers[name]

    def servers_of(self, name: str) -> Tree:
        """Return the processes of the database servers that run, and of the Redis of this contestant."""
        names = {"postgresql", "mariadb", f"redis-{name}"}
        return Tree([one.process.pid for key, one in self._servers.items() if key in names and one.process])

    @property
    def postgres(self) -> Postgres:
        server: Postgres = self.server("postgresql", Postgres)
        return server

    def _switch_fsync(self, wanted: bool) -> None:
        if wanted == self._fsync:
            return
        word = "on" if wanted else "off"
        for statement in (f"ALTER SYSTEM SET fsync = {word}", "SELECT pg_reload_conf()"):
            self.query("postgres", statement)
        if not wait_until(lambda: self.query("postgres", "SHOW fsync")[0] == word, START_SECONDS):
            raise Failed(f"PostgreSQL did not switch fsync {word}")
        self.query("postgres", "CHECKPOINT")  # what was written without it does not delay the first commits with it
        self._fsync = wanted

    def redis(self, name: str) -> RedisServer:
        """Return the Redis of a contestant, which no other contestant uses."""
        server: RedisServer = self.server(f"redis-{name}", RedisServer)
        return server

    def contestant(self, name: str) -> Contestant:
        """Return a contestant, which starts when it is called first, and switch PostgreSQL to its `fsync`.

        `delayq`, `earlier` or a rival, and behind a `@` one of `VARIANTS`.
        """
        self._switch_fsync(VARIANTS[name.partition("@")[2]].fsync)
        if name not in self._contestants:
            self._contestants[name] = self._make(name)
        return self._contestants[name]

    def exists(self, name: str) -> bool:
        """Return whether the contestant can run here: "earlier" needs another checkout."""
        return not name.startswith("earlier") or self.against is not None

    def _make(self, name: str) -> Contestant:
        module, _, suffix = name.partition("@")
        variant = VARIANTS[suffix]
        if module == "bullmq" and not shutil.which("node"):
            raise Failed("Node is not installed")
        titles = {
            "delayq": "django-delayq",
            "procrastinate_pool": "procrastinate, own pool",
            "django_q2": "django-q2",
            "django_q2_orm": "django-q2, jobs in the database",
        }
        if self.against:
            titles["earlier"] = f"django-delayq, {self.against.name}"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*([str(self._earlier())] if module == "earlier" else []), str(ROOT)]),
            "DJANGO_SETTINGS_MODULE": "benchmarks.shop.settings",
            "BENCH_NAME": "delayq" if module == "earlier" else module,
            "BENCH_REDIS_URL": self.redis(name).url,
            "BENCH_DATABASE": json.dumps(self._database(name, variant.database)),
            "BENCH_RECORDS": str(self._folder / f"{name}.records"),
            **variant.environment,
            "BENCH_PACKAGE": str(self._earlier() if module == "earlier" else ROOT),
            "BENCH_NODE": str(Path(sys.prefix) / "node"),
        }
        title = titles.get(module, module) + variant.words
        return Contestant(name, title, environment, self._folder / f"{name}.records", self._folder / f"{name}.log")

    def _earlier(self) -> Path:
        """Return a folder with the package of the other checkout, and nothing else of it."""
        assert self.against is not None
        folder = self._folder / "earlier"
        folder.mkdir(exist_ok=True)
        if not (link := folder / "django_delayq").exists():
            link.symlink_to(self.against / "django_delayq")
        return folder

    def _database(self, name: str, kind: str) -> dict[str, Any]:
        if kind == "sqlite":
            pragmas = "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL"
            options = {"transaction_mode": "IMMEDIATE", "timeout": 20, "init_command": pragmas}
            file = str(self._folder / f"{name}.sqlite3")
            return {"ENGINE": "django.db.backends.sqlite3", "NAME": file, "OPTIONS": options, "CONN_MAX_AGE": None}
        database = "bench_" + name.replace("@", "_")
        server = self.postgres if kind == "postgresql" else self.server("mariadb", Mariadb)
        url = urlsplit(server.url)
        if kind == "postgresql":
            self.query("postgres", f"CREATE DATABASE {database}")
        else:
            import MySQLdb

            MySQLdb.connect(host=url.hostname, port=url.port, user=url.username).query(f"CREATE DATABASE {database}")
        engine = "django.db.backends." + ("postgresql" if kind == "postgresql" else "mysql")
        address = {"HOST": url.hostname, "PORT": str(url.port), "USER": url.username}
        return {"ENGINE": engine, "NAME": database, "CONN_MAX_AGE": None, **address}

    def query(self, database: str, statement: str) -> Any:
        """Return the first row of a statement on PostgreSQL, outside a transaction."""
        import psycopg

        with psycopg.connect(self.postgres.url, dbname=database, autocommit=True) as connection:
            cursor = connection.execute(statement)  # type: ignore[call-overload]
            return cursor.fetchone() if cursor.description else None
