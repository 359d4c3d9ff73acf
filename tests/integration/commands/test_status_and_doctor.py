"""status, doctor, prune: what they say and how they exit."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from django.core.checks import ERROR, INFO, WARNING, CheckMessage
from django.core.management import call_command
from django.db import connection
from django.db.migrations.recorder import MigrationRecorder
from django.utils import timezone

import django_delayq
from django_delayq import schedule_timeout
from django_delayq.models import PolicyChange, PolicyControl, Timeout, WorkerSeen
from django_delayq.monitoring import doctor
from django_delayq.monitoring.doctor import examine
from django_delayq.operations import hold, pause
from django_delayq.redis_clients import get_engine
from tests.docs.pages import ROOT
from tests.engine.redis_process import RedisProcess
from tests.engine.test_acl import RULES, admit
from tests.integration.commands.conftest import Do, a_worker
from tests.integration.commands.test_verbs import REMIND
from tests.integration.operations.conftest import BY, as_if, dead, pending
from tests.testapp.models import Order

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = timedelta(hours=1)


def found(name: str) -> list[CheckMessage]:
    return [finding for finding in examine() if finding.id == name]


def worst(name: str) -> tuple[int, str]:
    finding = found(name)[0]
    return finding.level, f"{finding.msg} {finding.hint}"


def exit_code(*options: str) -> int:
    try:
        call_command("delayq_doctor", *options)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_a_due_timeout_whose_entry_a_worker_has_leased_is_explained(do: Do) -> None:
    a_worker()
    row = schedule_timeout(Order.objects.create(), "remind", seconds=0)
    engine = get_engine("default")
    assert engine is not None
    engine.queue(row.queue, engine.shard_of(row.pk)).reserve({row.policy: 1}, 60_000)
    time.sleep(0.002)  # it is due to the millisecond
    assert "A worker has claimed or deferred it until " in do("delayq_explain", "--id", str(row.pk)).out


@pytest.mark.usefixtures("without_redis")
def test_a_healthy_installation_is_told_so(do: Do) -> None:
    a_worker()
    pending(Order.objects.create())
    assert {finding.level for finding in examine()} == {INFO}
    said = do("delayq_doctor").out
    assert "shop1:7" in said
    assert "All indexes exist" in said
    assert (exit_code(), exit_code("--strict"), exit_code("--quick")) == (0, 0, 0)


@pytest.mark.usefixtures("without_redis")
def test_errors_exit_with_1_and_warnings_only_if_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code() == 1, "no worker is running"
    a_worker()
    dead(Order.objects.create())
    assert (exit_code(), exit_code("--strict")) == (0, 1)
    capsys.readouterr()
    exit_code("--json")
    told = json.loads(capsys.readouterr().out)
    assert (told[0]["name"], told[0]["level"]) == ("dead", "warning"), "the worst comes first"
    assert {"name", "level", "text", "hint"} == set(told[0])


@pytest.mark.usefixtures("without_redis")
def test_workers_that_are_gone_hang_or_serve_other_queues_are_found() -> None:
    assert worst("workers")[0] == ERROR
    a_worker(seen_at=timezone.now() - timedelta(minutes=5))
    assert worst("workers")[0] == ERROR
    hanging = a_worker(queues=["mail"], passed_at=timezone.now() - timedelta(minutes=3))
    assert worst("workers")[0] == INFO
    level, words = worst("workers.stuck")
    assert level == ERROR
    assert "shop1:7 has not checked for due timeouts for 3 min" in words
    as_if(pending(Order.objects.create()), "pending", run_at=timezone.now() - HOUR)
    assert worst("workers.queues")[0] == ERROR
    assert "delayq_worker --queue default" in worst("workers.queues")[1]
    other = a_worker(version="0.0.9")
    assert found("workers.queues") == []
    level, words = worst("workers")
    assert level == WARNING
    assert f"of version 0.0.9 are running; this process has {django_delayq.__version__}" in words
    WorkerSeen.objects.exclude(pk=other.pk).update(version="0.0.9")
    assert worst("workers")[0] == WARNING, "all workers have one version, and this process has another"
    hanging.delete()
    assert found("workers.stuck") == []


@pytest.mark.usefixtures("without_redis")
def test_threads_whose_handlers_hang_are_found(do: Do) -> None:
    worker = a_worker(stuck_threads=2)
    level, words = worst("workers.stuck_threads")
    assert level == WARNING
    assert "shop1:7 has 2 threads whose handlers do not end after the time limit." in words
    assert "2 stuck threads" in do("delayq_status").out
    worker.delete()
    a_worker()
    assert found("workers.stuck_threads") == []


@pytest.mark.usefixtures("without_redis")
def test_a_queue_that_policies_name_and_no_worker_serves_is_found_before_its_first_deadline(declare: Any) -> None:
    declare(Order, name="mailed", queue="mail")
    a_worker(queues=["default"])
    ((level, words),) = [(each.level, f"{each.msg} {each.hint}") for each in found("workers.queues")]
    assert level == WARNING
    assert "No worker serves the queue 'mail'" in words and "delayq_worker --queue mail" in words
    a_worker(queues=["mail"])
    assert found("workers.queues") == []


@pytest.mark.usefixtures("without_redis")
def test_what_waits_for_too_long_is_found_unless_somebody_has_paused_it() -> None:
    row = as_if(pending(Order.objects.create()), "pending", run_at=timezone.now() - timedelta(minutes=5))
    level, words = worst("overdue")
    assert (level, "1 of testapp.order.remind is overdue, for 5 min" in words) == (WARNING, True)
    as_if(row, "pending", run_at=timezone.now() - HOUR / 2)
    assert worst("overdue")[0] == ERROR
    pause(REMIND, by=BY, reason="outage")
    assert worst("overdue")[0] == INFO
    assert worst("stopped")[0] == INFO
    PolicyControl.objects.update(stopped_at=timezone.now() - timedelta(days=3))
    level, words = worst("stopped")
    assert level == WARNING
    assert "paused for 3 d, by admin:alice. outage" in words


@pytest.mark.usefixtures("without_redis")
def test_rows_that_nobody_will_fire_are_found() -> None:
    unknown = pending(Order.objects.create())
    Timeout.objects.filter(pk=unknown.pk).update(policy="testapp.order.forgotten")
    Order.objects.bulk_create([Order(status="unpaid", created_at=timezone.now() - timedelta(days=300))])
    level, words = worst("unknown_policy")
    assert (level, "delayq_retire testapp.order.forgotten" in words) == (WARNING, True)
    level, words = worst("too_old")
    assert level == WARNING
    assert "1 object matches testapp.order.cancel_unpaid, but its deadline passed" in words
    assert "too_old" not in {finding.id for finding in examine(quick=True)}


@pytest.mark.usefixtures("without_redis")
def test_dead_rows_of_a_policy_that_is_not_declared_are_counted_and_named(do: Do) -> None:
    a_worker()
    for _ in range(4):
        Timeout.objects.filter(pk=dead(Order.objects.create()).pk).update(policy="testapp.order.forgotten")
    told = do("delayq_status").out
    assert "dead      4" in told
    for out in (told, do("delayq_policies").out):
        (line,) = [line for line in out.splitlines() if "testapp.order.forgotten" in line]
        assert line.split()[1:8] == ["not", "declared", "0", "0", "0", "4", "0"]
    assert do("delayq_list", "--state", "dead", "--all").out.count("testapp.order.forgotten") == 4
    level, words = worst("unknown_policy")
    assert level == WARNING
    assert "testapp.order.forgotten is not declared, but has timeouts: 0 pending, 0 firing, 4 dead." in words
    level, words = worst("dead")
    assert level == WARNING
    assert "4 of testapp.order.forgotten are dead." in words
    assert "delayq_cancel --policy testapp.order.forgotten --state dead" in words


@pytest.mark.usefixtures("without_redis")
def test_each_finding_that_is_wrong_has_a_hint(settings: Settings) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": "redis://127.0.0.1:1/0"}
    dead(Order.objects.create())
    as_if(pending(Order.objects.create()), "pending", run_at=timezone.now() - HOUR)
    wrong = [finding for finding in examine() if finding.level > INFO]
    assert {finding.id for finding in wrong} >= {"redis", "workers", "dead", "overdue"}
    assert [finding for finding in wrong if not finding.hint] == []


@pytest.mark.usefixtures("without_redis")
def test_a_change_that_nobody_carries_on_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from django_delayq.operations import resume

    hold(REMIND, by=BY)
    with monkeypatch.context() as patched:
        patched.setattr("django_delayq.operations.policies.run_move", lambda change, *_: change)
        resume(REMIND, by=BY)
    assert found("changes") == []
    PolicyChange.objects.update(touched_at=timezone.now() - HOUR)
    level, words = worst("changes")
    assert (level, f"run delayq_resume {REMIND}" in words) == (ERROR, True)


@pytest.mark.usefixtures("without_redis")
def test_the_capacity_is_estimated_from_the_busiest_minute_and_the_running_workers() -> None:
    assert worst("capacity") == (INFO, "0 timeouts are due in the next hour, at most 0 in a minute. None")
    a_worker(), a_worker(concurrency=1)
    soon, late = timezone.now() + timedelta(minutes=5, seconds=30), timezone.now() + timedelta(minutes=30)
    for run_at in (soon, soon, late, timezone.now() + 2 * HOUR, timezone.now() - HOUR):
        as_if(pending(Order.objects.create()), "pending", run_at=run_at)
    words = worst("capacity")[1]
    assert "3 timeouts are due in the next hour, at most 2 in a minute." in words
    assert f"about {doctor.CAPACITY['firings_per_second_two_processes']} a second" in words
    assert "up to 11 database connections" in words
    assert "at most 5 rows, about 0.0 MB" in worst("capacity.storage")[1]
    assert not [finding for finding in examine(quick=True) if finding.id and finding.id.startswith("capacity")]


def test_the_constants_of_the_capacity_are_those_of_the_latest_benchmark_within_a_factor_of_three() -> None:
    measured = json.loads((ROOT / "benchmarks" / "results.json").read_text())["capacity"]
    off = {name: (value, measured[name]) for name, value in doctor.CAPACITY.items() if name in measured}
    assert off, "make bench has measured none of them"
    off = {name: pair for name, pair in off.items() if not 1 / 3 <= pair[0] / pair[1] <= 3}
    assert off == {}, "copy these constants (here, measured) from benchmarks/results.json to monitoring/doctor.py"


def test_a_missing_index_and_a_missing_migration_are_found() -> None:
    index = next(each for each in Timeout._meta.indexes if each.name == "delayq_policy")
    with connection.schema_editor() as editor:
        editor.remove_index(Timeout, index)
    MigrationRecorder.Migration.objects.filter(app="django_delayq").update(app="elsewhere")
    try:
        assert "delayq_policy" in worst("indexes")[1]
        assert worst("indexes")[0] == ERROR
        command = worst("indexes")[1].split("manage.py ")[1].split(" shows")[0].split()
        call_command(*command, stdout=io.StringIO())
        assert worst("migrations")[0] == ERROR
        assert "Migrations of django_delayq are not applied" in worst("migrations")[1]
    finally:
        with connection.schema_editor() as editor:
            editor.add_index(Timeout, index)
        MigrationRecorder.Migration.objects.filter(app="elsewhere").update(app="django_delayq")
    assert worst("indexes")[0] == worst("migrations")[0] == INFO


@pytest.mark.parametrize(("seconds", "level"), [(0.1, INFO), (-5, WARNING), (5, WARNING), (-300, ERROR)])
def test_a_clock_that_is_off_is_found(seconds: float, level: int) -> None:
    assert doctor.skew("clock", "This machine's clock", seconds).level == level


def test_the_clocks_of_the_test_servers_agree_with_this_one() -> None:
    assert worst("clock")[0] == INFO
    assert {finding.level for finding in found("redis.clock")} <= {INFO}


def test_what_cannot_be_examined_is_an_error_and_the_rest_is_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(using: str) -> Iterator[CheckMessage]:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(doctor, "QUICK", (broken, doctor.versions))
    findings = examine(quick=True)
    assert [(finding.level, finding.id) for finding in findings] == [(ERROR, "broken"), (INFO, "versions")]
    assert "RuntimeError: no such luck" in findings[0].msg


def test_a_redis_that_is_away_is_an_error_without_its_password(settings: Settings) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": "redis://:secret@127.0.0.1:1/0"}
    a_worker()
    assert worst("redis")[0] == ERROR
    assert "secret" not in " ".join(f"{finding.msg} {finding.hint}" for finding in examine())


def test_a_redis_that_throws_out_keys_is_an_error(settings: Settings) -> None:
    with RedisProcess() as server:
        settings.DELAYQ = {**settings.DELAYQ, "REDIS": f"redis://127.0.0.1:{server.port}/0"}
        assert worst("redis.eviction")[0] == INFO
        with server.client() as client:
            client.config_set("maxmemory-policy", "allkeys-lru")
        assert worst("redis.eviction")[0] == ERROR
        assert "noeviction" in worst("redis.eviction")[1]


def test_a_redis_that_never_saves_is_not_said_to_persist(settings: Settings) -> None:
    with RedisProcess() as server, server.client() as client:
        settings.DELAYQ = {**settings.DELAYQ, "REDIS": f"redis://127.0.0.1:{server.port}/0"}
        for answer in ("no", "yes"):
            client.config_set("appendonly", answer)
            level, words = worst("redis.persistence")
            assert level == INFO
            assert f"append-only file is {'on' if answer == 'yes' else 'off'};" in words


@pytest.mark.parametrize("rules", [[], ["+info"]])
def test_the_documented_user_of_redis_is_enough_for_the_doctor(
    settings: Settings, rules: list[str], do: Do, prefix: str
) -> None:
    with RedisProcess() as server, server.client() as client:
        mine = [f"~{prefix}:*", f"&{prefix}:*", *(rule for rule in RULES if rule.startswith("+"))]
        admit(client, [*mine, *rules])
        settings.DELAYQ = {**settings.DELAYQ, "REDIS": f"redis://shop:secret@127.0.0.1:{server.port}/0"}
        a_worker()
        pending(Order.objects.create(), seconds=1)
        assert exit_code() == 0
        assert worst("redis") == (INFO, "Redis answers. None")
        assert worst("redis.in_step")[0] == INFO
        if rules:
            assert found("redis.info") == []
            assert worst("redis.version")[0] == INFO
        else:
            level, words = worst("redis.info")
            assert level == WARNING
            assert "INFO" in words and "+info" in words
            assert found("redis.version") == []


def test_an_old_or_full_redis_is_named() -> None:
    told = {"redis_version": "5.0.14", "maxmemory": 100, "used_memory": 95, "maxmemory_policy": "noeviction"}
    levels = {finding.id: finding.level for finding in doctor.examine_redis_server(told)}
    assert (levels["redis.version"], levels["redis.memory"]) == (ERROR, WARNING)
    cluster = {"10.0.0.1:6379": told, "10.0.0.2:6379": told}
    assert doctor.redis_servers(cluster) == [told, told]


@pytest.mark.usefixtures("redis_client")
def test_a_redis_that_has_lost_what_falls_due_next_is_a_warning(redis_client: Any, prefix: str) -> None:
    pending(Order.objects.create(), minutes=1)
    assert worst("redis.in_step")[1].startswith("No timeout is due within 5 s: there is nothing to compare with Redis.")
    pending(Order.objects.create(), seconds=1)
    assert worst("redis.in_step") == (INFO, "Redis has 1 of 1 timeout that is due within 5 s. None")
    for key in redis_client.scan_iter(match=f"{prefix}*"):
        redis_client.delete(key)
    assert worst("redis.in_step")[0] == WARNING


def test_the_status_says_how_things_stand(do: Do, settings: Settings) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": None}
    a_worker(held=3)
    as_if(pending(Order.objects.create()), "pending", run_at=timezone.now() - HOUR)
    unknown = pending(Order.objects.create(), "linger")
    Timeout.objects.filter(pk=unknown.pk).update(policy="testapp.order.forgotten")
    dead(Order.objects.create())
    lines = dict(line.split(maxsplit=1) for line in do("delayq_status").out.splitlines()[1:])
    assert lines["workers"].startswith("1 process, 4 threads, 3 under way, version ")
    assert lines["pending"] == "2, of which 1 due, 1 for more than a minute"
    assert lines["oldest"].startswith("due for 1 h")
    assert (lines["dead"], lines["lag"]) == ("1", "p50 -, p99 -")
    assert " ".join(lines["testapp.order.forgotten"].split()) == "not declared 1 0 0 0 0 0 1 - -"
    assert lines["24"] == "hours  0 in time, 0 fired, 0 fired late, 1 dead"
    pause(REMIND, by=BY, reason="outage")
    assert f"paused    {REMIND} by admin:alice: outage; 1 due" in do("delayq_status").out
    seen = json.loads(do("delayq_status", "--json").out)
    assert (seen["pending"]["value"], seen["redis"]["is_configured"], len(seen["workers"])) == (2, False, 1)


def test_the_status_names_the_policy_with_the_highest_lag(do: Do) -> None:
    now = timezone.now()
    for name, minutes in (("linger", 1), ("remind", 5)):
        row = pending(Order.objects.create(), name)
        due_at = now - timedelta(minutes=minutes)
        as_if(row, "fired", "due", due_at=due_at, run_at=due_at, settled_at=now)
    assert f"lag       p50 5 min, p99 5 min (the highest; p99 is that of {REMIND})\n" in do("delayq_status").out


def test_the_status_names_no_oldest_timeout_when_none_may_fire(do: Do) -> None:
    assert "oldest    nothing due\n" in do("delayq_status").out
    as_if(pending(Order.objects.create()), "pending", run_at=timezone.now() - HOUR)
    pause(REMIND, by=BY, reason="outage")
    assert "oldest    nothing due that may fire\n" in do("delayq_status").out


def test_the_status_shows_redis(do: Do, redis_client: Any) -> None:
    pending(Order.objects.create(), seconds=1)
    assert "redis     1 entry, 0 leased, in step" in do("delayq_status").out


def test_watching_goes_on_until_it_is_interrupted(do: Do, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("django_delayq.management.commands.delayq_status.time.sleep", sleep)
    assert do("delayq_status", "--watch").out.count("workers ") == 3
    assert slept == [2.0] * 3


def test_pruning_can_be_tried(do: Do) -> None:
    old = as_if(pending(Order.objects.create()), "fired", "due")
    long_ago = timezone.now() - timedelta(days=100)
    Timeout.objects.filter(pk=old.pk).update(settled_at=long_ago, due_at=long_ago, first_due_at=long_ago)
    said = do("delayq_prune", "--dry-run").out
    assert said == "1 timeout settled more than 30 days ago (dry run: nothing was changed)\n"
    assert Timeout.objects.exists()
    assert do("delayq_prune").out == "1 timeout settled more than 30 days ago was deleted\n"
    assert not Timeout.objects.exists()
