"""`delayq_doctor` about the database, Redis and the clocks; and `--here`, the probe that restarts a worker."""

from __future__ import annotations

import io
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from django.core.checks import ERROR, INFO, WARNING, CheckMessage
from django.core.management import call_command
from django.db import OperationalError, connection
from django.db.migrations.recorder import MigrationRecorder
from django.utils import timezone

from django_delayq.management.commands import delayq_doctor
from django_delayq.models import Timeout, WorkerSeen
from django_delayq.monitoring import doctor
from django_delayq.monitoring.doctor import examine
from django_delayq.worker.servers import REDIS_AWAY
from tests.engine.redis_process import RedisProcess
from tests.engine.test_acl import RULES, admit
from tests.integration.management.conftest import Do, a_worker, exit_code, found, says, worst
from tests.integration.operations.conftest import pending
from tests.support.typed import Patch
from tests.testapp.models import Order

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = pytest.mark.django_db(transaction=True)


def use(settings: Settings, address: str | None) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": address}


def test_a_worker_that_does_not_use_redis_is_found_although_redis_answers_the_doctor(settings: Settings) -> None:
    """Redis is a replica that refuses writes, or a firewall separates it from the machine of the worker."""
    a_worker()
    assert found("workers.redis") == []
    a_worker(host="shop2", uses_redis=False)
    says("redis", INFO), says("workers.redis", WARNING, "shop2:7 does not use Redis", f'"{REDIS_AWAY}"')
    use(settings, None)
    assert found("workers.redis") == []


def test_a_database_that_accepts_no_writes_is_named_beside_the_missing_heartbeats() -> None:
    """The workers run, and to start one, which the first finding recommends, would not help."""
    begin, end = {
        "sqlite": ("PRAGMA query_only = ON", "PRAGMA query_only = OFF"),
        "postgresql": ("SET default_transaction_read_only = on", "SET default_transaction_read_only = off"),
        "mysql": ("SET SESSION TRANSACTION READ ONLY", "SET SESSION TRANSACTION READ WRITE"),
    }[connection.vendor]
    with connection.cursor() as cursor:
        cursor.execute(begin)
        try:
            words = [finding.msg for finding in found("workers")]
        finally:
            cursor.execute(end)
    assert words[0] == "No worker is running: nothing fires."
    assert any("read" in each.lower() and "only" in each.lower() for each in words[1:])
    assert len(found("workers")) == 1


def test_a_missing_index_and_a_missing_migration_are_found() -> None:
    index = next(each for each in Timeout._meta.indexes if each.name == "delayq_policy")
    with connection.schema_editor() as editor:
        editor.remove_index(Timeout, index)
    MigrationRecorder.Migration.objects.filter(app="django_delayq").update(app="elsewhere")
    try:
        words = says("indexes", ERROR, "delayq_policy")
        command = words.split("manage.py ")[1].split(" shows")[0].split()
        call_command(*command, stdout=io.StringIO())
        says("migrations", ERROR, "Migrations of django_delayq are not applied")
    finally:
        with connection.schema_editor() as editor:
            editor.add_index(Timeout, index)
        MigrationRecorder.Migration.objects.filter(app="elsewhere").update(app="django_delayq")
    assert worst("indexes")[0] == worst("migrations")[0] == INFO


def test_a_clock_that_is_off_is_found_and_those_of_the_test_servers_agree() -> None:
    for seconds, level in ((0.1, INFO), (-5, WARNING), (5, WARNING), (-300, ERROR)):
        assert doctor.skew("clock", "This machine's clock", seconds).level == level
    assert worst("clock")[0] == INFO
    assert {finding.level for finding in found("redis.clock")} <= {INFO}


def test_what_cannot_be_examined_is_an_error_and_the_rest_is_examined(monkeypatch: Patch) -> None:
    def broken(using: str) -> Iterator[CheckMessage]:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(doctor, "QUICK", (broken, doctor.versions))
    findings = examine(quick=True)
    assert [(finding.level, finding.id) for finding in findings] == [(ERROR, "broken"), (INFO, "versions")]
    assert "RuntimeError: no such luck" in findings[0].msg


def test_a_redis_that_throws_out_keys_or_never_saves_is_named(settings: Settings) -> None:
    with RedisProcess() as server, server.client() as client:
        use(settings, server.url)
        assert worst("redis.eviction")[0] == INFO
        client.config_set("maxmemory-policy", "allkeys-lru")
        says("redis.eviction", ERROR, "noeviction")
        for answer, state in (("no", "off"), ("yes", "on")):
            client.config_set("appendonly", answer)
            says("redis.persistence", INFO, f"append-only file is {state};")


def test_the_documented_user_of_redis_is_enough_for_the_doctor(settings: Settings, prefix: str) -> None:
    with RedisProcess() as server, server.client() as client:
        mine = [f"~{prefix}:*", f"&{prefix}:*", *(rule for rule in RULES if rule.startswith("+"))]
        use(settings, f"redis://shop:secret@127.0.0.1:{server.port}/0")
        admit(client, mine)
        a_worker()
        pending(Order.objects.create(), seconds=1)
        assert exit_code() == 0
        assert worst("redis") == (INFO, "Redis answers. None")
        assert worst("redis.in_step")[0] == INFO
        says("redis.info", WARNING, "INFO", "+info")
        assert found("redis.version") == []
        admit(client, [*mine, "+info"])
        assert found("redis.info") == [] and worst("redis.version")[0] == INFO


def test_an_old_or_full_redis_is_named() -> None:
    told = {"redis_version": "5.0.14", "maxmemory": 100, "used_memory": 95, "maxmemory_policy": "noeviction"}
    levels = {finding.id: finding.level for finding in doctor.examine_redis_server(told)}
    assert (levels["redis.version"], levels["redis.memory"]) == (ERROR, WARNING)
    cluster = {"10.0.0.1:6379": told, "10.0.0.2:6379": told}
    assert doctor.redis_servers(cluster) == [told, told]


def test_a_redis_that_has_lost_what_falls_due_next_is_a_warning(redis_client: Any, prefix: str, do: Do) -> None:
    pending(Order.objects.create(), minutes=1)
    assert worst("redis.in_step")[1].startswith("No timeout is due within 5 s: there is nothing to compare with Redis.")
    pending(Order.objects.create(), seconds=1)
    assert worst("redis.in_step") == (INFO, "Redis has 1 of 1 timeout that is due within 5 s. None")
    assert "redis     2 entries, 0 leased, in step" in do("delayq_status").out
    for key in redis_client.scan_iter(match=f"{prefix}*"):
        redis_client.delete(key)
    assert worst("redis.in_step")[0] == WARNING


def test_only_a_worker_of_this_machine_that_passes_satisfies_the_probe(do: Do, monkeypatch: Patch) -> None:
    """Only a restart that would help makes it fail."""
    here = socket.gethostname()
    a_worker(host="another-pod")
    assert exit_code("--here") == 1
    a_worker(host=here)
    assert f"{here}:7 checked for due timeouts 0 s ago" in do("delayq_doctor", "--here").out
    WorkerSeen.objects.filter(host=here).update(passed_at=timezone.now() - timedelta(minutes=3))
    assert exit_code("--here") == 1

    def refuse(using: str) -> Any:
        raise OperationalError("connection refused")

    monkeypatch.setattr(delayq_doctor, "workers_alive", refuse)
    assert "do not restart them" in do("delayq_doctor", "--here").out
