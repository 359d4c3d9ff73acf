"""The name of an installation: who claims a ledger, what a worker with another name does, and keys in Redis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis
from django.core.checks import run_checks
from django.core.management import CommandError, call_command
from django.db import OperationalError
from django.db.migrations.recorder import MigrationRecorder
from django.utils import timezone
from pytest_django import Settings

from django_delayq import redis_clients
from django_delayq.contrib.remote import fire
from django_delayq.exceptions import WrongInstallation
from django_delayq.models import Installation, Timeout, WorkerSeen
from tests.support.waiting import wait_until
from tests.support.workers import StartWorker, all_are, due_orders, events, states

pytestmark = pytest.mark.django_db(transaction=True)
Call = Callable[[str | None], None]


@pytest.fixture
def called(settings: Settings) -> Call:
    """`called("staging")`: from now on this is the name of this installation."""

    def do(name: str | None) -> None:
        settings.DELAYQ = {**settings.DELAYQ, "INSTALLATION": name}

    return do


@pytest.fixture
def copied(called: Call) -> None:
    """The ledger is a copy of that of production, and this is staging."""
    named("production")
    called("staging")


def named(name: str) -> None:
    Installation.objects.create(name=name, since_at=timezone.now())


def is_refused() -> Any:
    """Expect what a worker named "staging" raises beside a ledger of "production"."""
    return pytest.raises(WrongInstallation, match=r"'production'.*'staging'.*delayq_adopt")


def untouched() -> bool:
    return set(Timeout.objects.values_list("state", "attempts", "claims")) == {("pending", 0, 0)}


def test_the_first_worker_names_the_ledger_and_one_without_a_name_accepts_it_with_a_warning(
    start_worker: StartWorker, without_redis: None, called: Call, caplog: pytest.LogCaptureFixture
) -> None:
    for name, told in (("production", []), (None, ["installation_unknown"])):
        called(name)
        due_orders("remind", 3)
        running = start_worker()
        wait_until(all_are("fired"))
        running.stop()
        assert Installation.objects.get().name == "production"
        assert events(caplog) == told


@pytest.mark.dialect
def test_a_worker_with_another_name_does_not_start(
    start_worker: StartWorker, without_redis: None, copied: None
) -> None:
    due_orders("remind", 3)
    with is_refused():
        start_worker().join()
    assert untouched()
    assert not WorkerSeen.objects.exists()


def test_a_running_worker_ends_when_a_copy_replaces_its_database(
    start_worker: StartWorker, without_redis: None, called: Call
) -> None:
    """A nightly job restores production in staging, and does not stop the workers of staging."""
    called("staging")
    running = start_worker()
    wait_until(WorkerSeen.objects.exists, "it has passed the check of its start")
    Installation.objects.update(name="production")
    due_orders("remind", 3)
    with is_refused():
        running.join()
    assert set(Timeout.objects.values_list("state", "attempts")) == {("pending", 0)}


@pytest.mark.dialect
def test_the_command_exits_with_3(without_redis: None, copied: None) -> None:
    with pytest.raises(CommandError, match="delayq_adopt") as raised:
        call_command("delayq_worker", "--burst", verbosity=0)
    assert raised.value.returncode == 3


def test_a_process_of_a_task_queue_fires_nothing_of_another_installation(
    without_redis: None, copied: None, called: Call
) -> None:
    """A broker that both installations share may deliver messages of production in staging."""
    (row,) = due_orders("remind")
    message = {"policy": row.policy, "ids": [row.pk], "suspect": False, "using": "default"}
    with pytest.raises(WrongInstallation):
        fire(message)
    assert untouched()
    called("production")
    fire(message)
    assert states() == {"fired": 1}


def test_deployments_are_advised_to_have_a_name(called: Call) -> None:
    def is_advised() -> bool:
        found = run_checks(tags=["django_delayq"], include_deployment_checks=True)
        return "django_delayq.W030" in [each.id for each in found]

    assert is_advised()
    called("production")
    assert not is_advised()


def test_copies_with_names_other_ledgers_and_a_database_without_migrations_have_keys_of_their_own(
    called: Call, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of several ledgers have the same ids, and a turn of one must not keep another one from sweeping."""
    found = set()
    for name in (None, "production", "staging"):
        called(name)
        found.add(redis_clients.key_prefix("default"))
        with monkeypatch.context() as patched:
            patched.setitem(redis_clients._created, "default", "another")
            found.add(redis_clients.key_prefix("default"))
    assert len(found) == 6
    assert all(each.startswith(f"{prefix}:") for each in found), "as rules of ACLs demand"
    called(None)
    monkeypatch.delitem(redis_clients._created, "default", raising=False)
    monkeypatch.setattr(MigrationRecorder, "has_table", lambda _: False)  # as with `pytest --no-migrations`
    assert redis_clients.key_prefix("default") == prefix
    monkeypatch.delitem(redis_clients._created, "default")


def test_a_push_before_which_the_identity_of_the_ledger_cannot_be_read_leaves_the_row_to_the_sweep(
    with_redis: redis.Redis, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: object) -> bool:
        raise OperationalError("away")

    monkeypatch.delitem(redis_clients._created, "default", raising=False)
    with monkeypatch.context() as patched:
        patched.setattr(MigrationRecorder, "has_table", away)
        due_orders("remind", minutes=1)
    assert Timeout.objects.count() == 1 and not list(with_redis.scan_iter(f"{prefix}*"))
    due_orders("remind", minutes=1)
    assert list(with_redis.scan_iter(f"{prefix}:*:l:*")), "the next push reads it again"
