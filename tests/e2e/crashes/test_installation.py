"""Real workers on a database that belongs to another installation: they exit with 3, and nothing has changed."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import redis
from django.db import connection

from django_delayq.models import Installation, PolicySync, WorkerSeen
from tests.support.processes import StartWorker, due_now, effects, end
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.django_db(transaction=True)]


def contents() -> dict[str, list[Any]]:
    """Return all rows of all tables, as the driver returns them."""
    found = {}
    with connection.cursor() as cursor:
        for table in sorted(connection.introspection.table_names(cursor)):
            cursor.execute(f"SELECT * FROM {connection.ops.quote_name(table)}")
            found[table] = sorted(cursor.fetchall(), key=repr)
    return found


def entries(client: redis.Redis, prefix: str) -> set[tuple[bytes, Any]]:
    """Return each key of this test with its serialized value."""
    return {(key, client.dump(key)) for key in client.scan_iter(match=f"{prefix}*", count=1000)}


def outcome(worker: subprocess.Popen[bytes]) -> tuple[int, str]:
    _, errors = worker.communicate(timeout=60)
    return worker.returncode, errors.decode()


@pytest.mark.parametrize("options", [["--burst"], ["--processes", "2"]], ids=["burst", "two"])
def test_a_copied_database_is_refused_and_nothing_changes(
    start_worker: StartWorker, redis_client: redis.Redis, prefix: str, options: list[str]
) -> None:
    production = start_worker(INSTALLATION="production")
    wait_until(lambda: WorkerSeen.objects.exists() and PolicySync.objects.exists(), "a worker of production runs")
    end(production)  # the database may still commit what a killed process has sent
    for key in redis_client.scan_iter(match=f"{prefix}:*:turn:*", count=1000):  # they would expire meanwhile
        redis_client.delete(key)
    due_now("remind", 5)
    before = contents(), entries(redis_client, prefix)
    assert Installation.objects.get().name == "production"
    code, errors = outcome(start_worker(*options, INSTALLATION="staging", stderr=subprocess.PIPE))
    assert code == 3
    assert all(word in errors for word in ("'production'", "'staging'", "delayq_adopt"))
    assert (contents(), entries(redis_client, prefix)) == before
    assert outcome(start_worker("--burst", INSTALLATION="production", stderr=subprocess.PIPE))[0] == 0
    assert len(effects("remind")) == 5
