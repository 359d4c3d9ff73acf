"""The name of an installation in the ledger and in Redis: who claims it, and what a worker with another name does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TYPE_CHECKING, Any

import pytest
from django.core.checks import ERROR, run_checks
from django.core.management import CommandError, call_command
from django.db import OperationalError, connections
from django.utils import timezone

from django_delayq import clock
from django_delayq.contrib.remote import fire
from django_delayq.engine.engine import Engine
from django_delayq.exceptions import ForeignEngine, WrongInstallation
from django_delayq.ledger import installation
from django_delayq.models import Installation, Timeout, WorkerSeen
from django_delayq.monitoring import doctor
from django_delayq.redis_clients import forget_engine, get_worker_engine
from django_delayq.worker import Worker
from tests.e2e.outages.wire import Wire
from tests.engine.redis_process import RedisProcess
from tests.support.waiting import wait_until
from tests.support.workers import StartWorker, all_are, due_orders, events

if TYPE_CHECKING:
    import redis
    from pytest_django import Settings

pytestmark = pytest.mark.django_db(transaction=True)
Call = Callable[[str | None], None]


@pytest.fixture
def called(settings: Settings) -> Call:
    """`called("staging")`: from now on this is the name of this installation."""

    def do(name: str | None) -> None:
        settings.DELAYQ = {**settings.DELAYQ, "INSTALLATION": name}

    return do


def named(name: str) -> None:
    Installation.objects.create(name=name, since_at=timezone.now())


@pytest.fixture
def engine(with_redis: redis.Redis) -> Any:
    made = get_worker_engine("default")
    assert made is not None
    yield made
    made.close()


def test_the_first_worker_names_ledger_and_redis(start_worker: StartWorker, engine: Engine, called: Call) -> None:
    called("production")
    due_orders("remind", 3)
    start_worker()
    wait_until(all_are("fired"))
    assert Installation.objects.get().name == engine.installation() == "production"


@pytest.mark.parametrize("options", [{}, {"burst": True}, {"max_timeouts": 1}], ids=str)
def test_a_worker_with_another_name_does_not_start(
    start_worker: StartWorker, source: str, called: Call, options: dict[str, Any]
) -> None:
    named("production")
    called("staging")
    due_orders("remind", 3)
    with pytest.raises(WrongInstallation, match=r"'production'.*'staging'.*delayq_adopt"):
        start_worker(**options).join()
    assert set(Timeout.objects.values_list("state", "attempts", "claims")) == {("pending", 0, 0)}
    assert not WorkerSeen.objects.exists()


def test_a_running_worker_ends_when_a_copy_replaces_its_database(
    start_worker: StartWorker, source: str, called: Call
) -> None:
    """A nightly job restores production in staging, and does not stop the workers of staging."""
    called("staging")
    running = start_worker()
    wait_until(WorkerSeen.objects.exists, "it has passed the check of its start")
    Installation.objects.update(name="production")
    due_orders("remind", 3)
    with pytest.raises(WrongInstallation, match=r"'production'.*'staging'.*delayq_adopt"):
        running.join()
    assert set(Timeout.objects.values_list("state", "attempts")) == {("pending", 0)}


def test_the_command_exits_with_3(without_redis: None, called: Call) -> None:
    named("production")
    called("staging")
    with pytest.raises(CommandError, match="delayq_adopt") as raised:
        call_command("delayq_worker", "--burst", verbosity=0)
    assert raised.value.returncode == 3


def test_a_refusal_because_of_redis_does_not_name_the_ledger(engine: Engine, called: Call) -> None:
    assert engine.claim_prefix("production") == "production"
    called("staging")
    with pytest.raises(ForeignEngine, match=r"'production'.*PREFIX"):
        Worker(burst=True).run()
    assert not Installation.objects.exists()
    assert engine.installation() == "production"


def test_of_several_first_workers_one_name_wins(without_redis: None, called: Call) -> None:
    called("production")
    together = Barrier(4)

    def check(_: int) -> str | None:
        try:
            together.wait(20)
            installation.check("default", None)
            return installation.ledger_name("default")
        finally:
            connections.close_all()

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(check, range(4))) == {"production"}
    assert Installation.objects.count() == 1


def test_a_first_worker_that_comes_second_is_refused(
    without_redis: None, called: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its read and its insert, another one has inserted its own name."""
    called("staging")
    real = clock.database_now

    def another_is_faster(using: str) -> Any:
        named("production")
        return real(using)

    monkeypatch.setattr(installation, "database_now", another_is_faster)
    with pytest.raises(WrongInstallation):
        installation.check("default", None)
    assert Installation.objects.get().name == "production"


def test_without_a_name_every_ledger_is_accepted_with_a_warning(
    start_worker: StartWorker, source: str, called: Call, caplog: pytest.LogCaptureFixture
) -> None:
    named("production")
    due_orders("remind", 3)
    start_worker()
    wait_until(all_are("fired"))
    assert events(caplog) == ["installation_unknown"]


def test_a_redis_that_was_emptied_gets_the_name_again(
    start_worker: StartWorker, own_redis: RedisProcess, called: Call
) -> None:
    called("production")
    start_worker()
    engine = get_worker_engine("default")
    assert engine is not None
    wait_until(lambda: engine.installation() == "production")
    with own_redis.client() as client:
        client.flushall()
    wait_until(lambda: engine.installation() == "production")
    engine.close()


def test_a_redis_that_is_away_at_the_start_is_not_used_if_it_comes_back_as_another_installations(
    start_worker: StartWorker,
    own_redis: RedisProcess,
    called: Call,
    settings: Settings,
    caplog: pytest.LogCaptureFixture,
) -> None:
    called("staging")
    prefix = settings.DELAYQ["PREFIX"]
    with Wire(own_redis.port) as wire, own_redis.client() as client:
        settings.DELAYQ = {**settings.DELAYQ, "REDIS": wire.url}
        client.set(f"{prefix}:installation", "production")
        wire.go_silent()
        running = start_worker()
        due_orders("remind", 2)
        wait_until(all_are("fired"))
        assert installation.ledger_name("default") == "staging"
        wire.speak()
        wire.cut()
        wait_until(lambda: "'production'" in caplog.text)
        due_orders("remind", 2)
        wait_until(all_are("fired"))
        for key in client.scan_iter(f"{prefix}:{{*"):  # what the test itself has pushed
            client.delete(key)
        asked = wire.asked
        wait_until(lambda: wire.asked > asked, "the worker has probed again")
        assert set(client.scan_iter(f"{prefix}*")) == {f"{prefix}:installation".encode()}
        running.stop()
        forget_engine()
    foreign = [line for line in caplog.records if "'production'" in line.getMessage() and line.levelno > logging.DEBUG]
    assert [(line.levelname, vars(line)["event"]) for line in foreign] == [("ERROR", "redis_away")]


def test_a_worker_stops_using_a_redis_that_another_installation_has_claimed(
    start_worker: StartWorker, own_redis: RedisProcess, called: Call, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    called("staging")
    running = start_worker()
    with own_redis.client() as client:
        wait_until(lambda: WorkerSeen.objects.exists(), "the worker has passed the check of its start")
        assert client.get(f"{prefix}:installation") == b"staging"
        client.set(f"{prefix}:installation", "production")
        wait_until(lambda: not running.worker.redis.is_up)
        due_orders("remind", 2)
        wait_until(all_are("fired"))
        client.delete(f"{prefix}:installation")
        wait_until(lambda: events(caplog) == ["redis_away", "redis_back"], "it is logged after it is used")
        assert client.get(f"{prefix}:installation") == b"staging"


def test_a_full_redis_without_the_name_is_used(called: Call, own_redis: RedisProcess) -> None:
    called("production")
    full = get_worker_engine("default")
    assert full is not None
    with own_redis.client() as client:
        client.config_set("maxmemory", "1")
        installation.check_prefix(full, "default")
        client.config_set("maxmemory", "0")
        installation.check_prefix(full, "default")
    assert full.installation() == "production"
    full.close()


def test_a_database_that_is_away_at_the_start_is_waited_for(
    start_worker: StartWorker, without_redis: None, called: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that gave up would not start after a power failure; one that did not wait would fire."""
    named("production")
    called("staging")
    real, answers = installation.ledger_name, iter([OperationalError("away"), OperationalError("away")])

    def ledger_name(using: str) -> str | None:
        if (error := next(answers, None)) is not None:
            assert not WorkerSeen.objects.exists()
            raise error
        return real(using)

    monkeypatch.setattr(installation, "ledger_name", ledger_name)
    with pytest.raises(WrongInstallation):
        start_worker().join()


def test_a_worker_that_is_stopped_before_the_database_answers_does_nothing(
    start_worker: StartWorker, without_redis: None, called: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    called("staging")

    def away(using: str) -> None:
        raise OperationalError("away")

    monkeypatch.setattr(installation, "ledger_name", away)
    running = start_worker()
    running.stop()
    assert not WorkerSeen.objects.exists() and not Installation.objects.exists()


def test_a_process_of_a_task_queue_fires_nothing_of_another_installation(without_redis: None, called: Call) -> None:
    """A broker that both installations share may deliver messages of production in staging."""
    named("production")
    called("staging")
    (row,) = due_orders("remind")
    message = {"policy": row.policy, "ids": [row.pk], "suspect": False, "using": "default"}
    with pytest.raises(WrongInstallation):
        fire(message)
    assert set(Timeout.objects.values_list("state", "attempts")) == {("pending", 0)}
    called("production")
    fire(message)
    assert set(Timeout.objects.values_list("state", flat=True)) == {"fired"}


def test_deployments_are_advised_to_have_a_name(called: Call) -> None:
    def found() -> list[str | None]:
        return [each.id for each in run_checks(tags=["django_delayq"], include_deployment_checks=True)]

    assert "django_delayq.W030" in found()
    called("production")
    assert "django_delayq.W030" not in found()


@pytest.mark.parametrize("name", ["production", None])
def test_a_key_of_another_type_in_place_of_the_name_is_renamed(
    engine: Engine, with_redis: redis.Redis, prefix: str, called: Call, name: str | None
) -> None:
    """It would turn Redis off for good."""
    called(name)
    with_redis.rpush(f"{prefix}:installation", "x")
    installation.check_prefix(engine, "default")
    assert engine.installation() in (name, installation.name_of_unnamed("default"))
    [aside] = with_redis.scan_iter(f"{prefix}:foreign:*")
    assert with_redis.lrange(aside, 0, -1) == [b"x"]


OTHER = f"{installation.UNNAMED} 2020-02-02T00:00:00+00:00)"


def test_of_two_databases_without_a_name_under_one_prefix_the_second_does_without_redis(
    start_worker: StartWorker, own_redis: RedisProcess, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They would remove each other's entries, and the turns of one would keep the other from sweeping."""
    with own_redis.client() as client:
        client.set(f"{prefix}:installation", OTHER, px=300_000)
        due_orders("remind", 3)
        running = start_worker()
        wait_until(all_are("fired"))
        assert not running.worker.redis.is_up
        client.delete(f"{prefix}:installation")  # it has lapsed
        wait_until(lambda: events(caplog) == ["redis_away", "redis_back"], "the other one has gone")
        assert client.get(f"{prefix}:installation") == str(installation.name_of_unnamed("default")).encode()
        assert 0 < client.pttl(f"{prefix}:installation") <= 1000 * installation.UNNAMED_SECONDS
    [line] = [line for line in caplog.records if vars(line).get("event") == "redis_away" and line.levelno > 10]
    assert line.levelname == "ERROR"
    assert "PREFIX" in line.getMessage()


def test_a_worker_without_a_name_refuses_the_redis_of_an_installation(engine: Engine) -> None:
    engine.claim_prefix("production")
    with pytest.raises(ForeignEngine, match=r"'production'.*PREFIX"):
        Worker(burst=True).run()
    assert engine.installation() == "production"


def test_a_database_that_gets_a_name_keeps_its_prefix_and_so_do_its_workers_without_one(
    engine: Engine, called: Call, caplog: pytest.LogCaptureFixture
) -> None:
    installation.check("default", engine)
    called("production")
    installation.check("default", engine)
    assert engine.installation() == "production"
    called(None)
    assert installation.check("default", engine) is None
    assert events(caplog) == ["installation_unknown"]


def test_the_doctor_reports_a_prefix_of_another_database(engine: Engine, with_redis: redis.Redis, prefix: str) -> None:
    with_redis.set(f"{prefix}:installation", OTHER)
    found = [each for each in doctor.examine(quick=True) if each.id == "redis.owner"]
    assert [each.level for each in found] == [ERROR]
