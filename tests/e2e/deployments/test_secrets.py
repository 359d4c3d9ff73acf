"""The password of Redis is never logged. Addresses that do not work: `tests/integration/security/test_sources.py`."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection

from tests.e2e.deployments.conftest import Stage
from tests.engine.redis_process import RedisProcess
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "sqlite", reason="what Redis does is the same with each database"),
]
SECRET = "hunter2"


def test_a_worker_with_a_working_and_then_a_refused_password_logs_neither(stage: Stage) -> None:
    everything: dict[str, Any] = {"categories": ["+@all"], "keys": ["*"], "channels": ["*"]}
    with RedisProcess() as server, server.client() as owner:
        owner.acl_setuser("shop", enabled=True, passwords=[f"+{SECRET}"], **everything)
        stage.choose(f"redis://shop:{SECRET}@127.0.0.1:{server.port}/0")
        stage.start_worker()
        stage.schedule(5, within=0.5)
        owner.acl_setuser("shop", enabled=True, passwords=[f"-{SECRET}"])
        owner.client_kill_filter(_type="normal", skipme=True)
        wait_until(lambda: "not available" in stage.worker.text, "it has noticed")
        stage.await_all_fired_once_and_none_early()
        owner.acl_setuser("shop", enabled=True, passwords=[f"+{SECRET}"])
        stage.await_worker_on_redis()
        stage.end_worker()
    assert SECRET not in stage.worker.text
