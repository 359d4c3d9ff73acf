"""The password in an address is never shown, whatever is wrong with the address or with Redis."""

from __future__ import annotations

import logging
import subprocess
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from django.core.checks import run_checks
from django.db import connection

from django_delayq.conf import get_settings
from django_delayq.engine.records import Change
from django_delayq.redis_clients import forget_engine, get_engine, get_worker_engine
from django_delayq.worker import Worker
from tests.e2e.deployments.conftest import Stage
from tests.engine.redis_process import RedisProcess
from tests.support.waiting import wait_until
from tools.servers import free_port

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "sqlite", reason="addresses are the same with each database"),
]
SECRET = "hunter2"
# Strings that are not addresses: tests/integration/security/test_sources.py.
ADDRESSES = {
    "no server": "redis://shop:{secret}@127.0.0.1:{closed}/0",
    "wrong password": "redis://default:{secret}@127.0.0.1:{open}/0",
    "wrong password with tls": "rediss://default:{secret}@127.0.0.1:{open}/0",
    "no sentinel there": "redis+sentinel://shop:{secret}@127.0.0.1:{closed}/shop?sentinel_password={secret}",
    "no cluster there": "redis+cluster://shop:{secret}@127.0.0.1:{closed}",
    "no cluster at all": "redis+cluster://default:{secret}@127.0.0.1:{open}",
}


@pytest.fixture(scope="module")
def server() -> Iterator[RedisProcess]:
    with RedisProcess() as found:
        with found.client() as client:
            client.config_set("requirepass", "another")
        yield found


def said_by(act: Callable[[], object]) -> str:
    """Return the visible output: an error with its causes, or a string."""
    try:
        found = act()
    except Exception as error:
        return "".join(traceback.format_exception(error))
    return f"{found!r} {found}"


@pytest.mark.parametrize("wrong", ADDRESSES)
def test_an_address_that_does_not_work_keeps_its_password(
    settings: Settings, caplog: pytest.LogCaptureFixture, server: RedisProcess, wrong: str
) -> None:
    address = ADDRESSES[wrong].format(secret=SECRET, closed=free_port(), open=server.port)
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": address}

    def schedule() -> None:
        engine = get_engine("default")
        assert engine is not None
        engine.apply([Change("default", "testapp.order.remind", 1, 1)])

    def look() -> list[Any]:
        engine = get_worker_engine("default")
        assert engine is not None
        return [engine, engine.client, getattr(engine.client, "connection_pool", None)]

    caplog.set_level(logging.INFO)
    acts: list[Callable[[], object]] = [schedule, look, get_settings, run_checks, lambda: Worker(burst=True)]
    seen = [said_by(act) for act in acts]
    forget_engine()
    assert "Error" in seen[0] or "Unavailable" in seen[0]
    for text in [*seen, caplog.text]:
        assert SECRET not in text


def test_a_worker_with_a_working_and_then_a_refused_password_logs_neither(
    stage: Stage, start_command: Callable[..., subprocess.Popen[bytes]], tmp_path: Any
) -> None:
    with RedisProcess() as server, server.client() as owner:
        everything = {"categories": ["+@all"], "keys": ["*"], "channels": ["*"]}
        owner.acl_setuser("shop", enabled=True, passwords=[f"+{SECRET}"], **everything)
        stage.choose(f"redis://shop:{SECRET}@127.0.0.1:{server.port}/0")
        stage.start_worker()
        stage.schedule(5, within=0.5)
        owner.acl_setuser("shop", enabled=True, passwords=[f"-{SECRET}"])
        owner.client_kill_filter(_type="normal", skipme=True)
        wait_until(lambda: "not available" in stage.log_text(), "it has noticed")
        stage.await_all_fired_once_and_none_early()
        owner.acl_setuser("shop", enabled=True, passwords=[f"+{SECRET}"])
        stage.await_worker_on_redis()
        stage.end_worker()
    assert SECRET not in stage.log_text()
