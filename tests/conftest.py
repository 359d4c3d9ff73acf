"""What all levels of tests share: addresses of servers, Redis keys of one's own, processes that meet their test."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tools import processes
from tools.servers import PgbouncerServer

if TYPE_CHECKING:
    import redis
    from pytest_django import Settings

pytest_plugins = ["tests.support.fixtures", "tests.support.left_out"]

PATIENCE_SECONDS = 5
ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_finish() -> None:
    """Leave thousands of tests and their modules alone at each garbage collection: a tenth of the suite's time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def databases_are_emptied_quickly() -> Iterator[None]:
    from tests import emptying

    with emptying.quick():
        yield


@pytest.fixture
def prefix() -> str:
    """Return a Redis key prefix that no other test, worker or run uses, so that no test needs FLUSHALL."""
    return f"delayq-test-{uuid.uuid4().hex}"


@pytest.fixture(autouse=True)
def own_prefix(prefix: str, settings: Settings) -> None:
    """`DELAYQ["PREFIX"]` is this test's own, whether it asks for it or not."""
    settings.DELAYQ = {**settings.DELAYQ, "PREFIX": prefix}


@pytest.fixture(scope="session", autouse=True)
def redis_has_time_to_answer() -> Iterator[None]:
    """Let this process wait longer than a web request may. Processes that tests start have the limit of the library."""
    from django_delayq.redis_clients import breaker, clients

    patience = clients.Timeouts(PATIENCE_SECONDS, is_limit=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(breaker, "LIMIT_SECONDS", PATIENCE_SECONDS)
        patch.setattr(clients, "PRODUCER", patience)
        yield


@pytest.fixture(autouse=True)
def no_stop_is_known() -> None:
    """A process keeps the last answer about stopped policies, also after a test has emptied the tables behind it."""
    from django_delayq.ledger.controls import stop_cache

    stop_cache.forget()


@pytest.fixture(scope="session")
def redis_url() -> str:
    """Return the address of the Redis under test. Without one, skip the test; fail it with `CI=true`."""
    return _address("DELAYQ_TEST_REDIS_URL")


@pytest.fixture
def redis_client(redis_url: str, prefix: str) -> Iterator[redis.Redis]:
    """Yield a client of the Redis under test; delete the keys under `prefix` afterwards."""
    import redis

    client = redis.Redis.from_url(redis_url)
    yield client
    if keys := list(client.scan_iter(match=f"{prefix}*", count=1000)):
        client.unlink(*keys)
    client.close()


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None, django_db_blocker: Any) -> Iterator[None]:
    """With `DELAYQ_TEST_POOLER=pgbouncer`, tests and their child processes reach PostgreSQL through PgBouncer.

    With `DELAYQ_TEST_POOL`, the thread of the test has a connection outside the pool, which belongs to its workers.
    """
    with ExitStack() as stack:
        if os.environ.get("DELAYQ_TEST_POOLER") == "pgbouncer":
            stack.enter_context(_through_pgbouncer())
        if os.environ.get("DELAYQ_TEST_POOL"):
            stack.enter_context(_outside_the_pool())
        from django_delayq.redis_clients import key_prefix  # not before the settings are loaded

        with django_db_blocker.unblock():
            key_prefix("default")  # read once in a process, by a query that no test counts
        yield


@contextmanager
def _through_pgbouncer() -> Iterator[None]:
    from django.db import connection

    program = _address("DELAYQ_TEST_PGBOUNCER")
    database = connection.settings_dict
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o711)
        with PgbouncerServer(
            Path(directory, "pgbouncer"), program, int(database["PORT"]), database["USER"], 8
        ) as pooler:
            before = {"DELAYQ_TEST_POSTGRESQL_URL": os.environ["DELAYQ_TEST_POSTGRESQL_URL"]}
            port, database["PORT"] = database["PORT"], str(pooler.port)
            os.environ["DELAYQ_TEST_POSTGRESQL_URL"] = re.sub(
                r"@[^/]+/", f"@127.0.0.1:{pooler.port}/", before["DELAYQ_TEST_POSTGRESQL_URL"]
            )
            connection.close()
            yield
            connection.close()
            database["PORT"] = port
            os.environ.update(before)


@contextmanager
def _outside_the_pool() -> Iterator[None]:
    from django.db import connections

    connection: Any = connections["default"]
    pooled = type(connection)
    connection.close()
    connection.__class__ = type("DatabaseWrapper", (pooled,), {"pool": None, "__module__": pooled.__module__})
    yield
    connection.close()
    connection.__class__ = pooled  # which closes the pool, so that the test database can be dropped


@pytest.fixture
def child_environment(prefix: str) -> dict[str, str]:
    """Return the environment in which a child process uses the database and the Redis keys of this test.

    Rows must be committed to be seen there: `django_db(transaction=True)`. It serves no pages, whose modules would take
    a third of the time in which some 400 workers start.
    """
    from django.db import connection

    return {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "DELAYQ_TEST_DB_NAME": str(connection.settings_dict["NAME"]),
        "DELAYQ_TEST_PREFIX": prefix,
        "DELAYQ_TEST_URLS": "tests.support.no_pages",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        "PYTHONUNBUFFERED": "1",
    }


@pytest.fixture
def start_command(child_environment: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start `django-admin <arguments>` as a real process of this test; killed, group and all, when the test ends.

    One that still runs then prints where its threads are: a test that fails shows it. Keywords are passed to
    `subprocess.Popen`; `env` extends `child_environment`.
    """
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "django", *arguments]
        environment = {**child_environment, "PYTHONFAULTHANDLER": "1", **(env or {})}
        process = processes.start(command, env=environment, cwd=ROOT, **options)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGABRT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)
        processes.kill(process)


@pytest.fixture(scope="session")
def chromium() -> tuple[str, str]:
    """Return the paths of Chromium and of its driver. Without them, skip the test; fail it with `CI=true`."""
    return _address("DELAYQ_TEST_CHROMIUM"), _address("DELAYQ_TEST_CHROMEDRIVER")


def _address(variable: str) -> str:
    if value := os.environ.get(variable):
        return value
    words = f"{variable} is not set: python3 tests/servers.py run -- ..."
    if os.environ.get("CI") == "true":
        pytest.fail(words)
    pytest.skip(words)
