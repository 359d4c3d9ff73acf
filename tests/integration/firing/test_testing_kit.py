"""The testing kit: the clock, what handlers raise, `perform` and the assertions, on each database."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import unittest
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import TestCase

import django_delayq as dq
from django_delayq import clock
from django_delayq.models import Timeout
from django_delayq.sql.now import database_now
from django_delayq.testing import (
    assert_cancelled,
    assert_fired,
    assert_not_scheduled,
    assert_scheduled,
    fire_due,
    perform,
    travel,
    travel_to,
)
from tests.integration.firing.handlers import Declare, Patch, raising
from tests.testapp.models import Effect, Order

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)
pytestmark = pytest.mark.django_db


def test_a_block_moves_the_clock_and_stops_it(order: Order) -> None:
    with travel_to(NOON) as moment:
        assert moment == NOON == clock.now()
        dq.schedule_timeout(order, "remind", minutes=30)
        with travel(minutes=29):
            assert fire_due() == 0
        with travel(minutes=30):
            assert clock.now() == NOON + timedelta(minutes=30)
            assert (fire_due(), fire_due()) == (1, 0)
        assert clock.now() == NOON
    assert not clock.is_set()


def test_a_journey_ends_with_its_unittest_its_class_and_the_block_around_it() -> None:
    moments: list[datetime] = []

    class Case(TestCase):
        @classmethod
        def setUpTestData(cls) -> None:
            travel_to(NOON)

        def test_1_statement(self) -> None:
            travel(minutes=31)
            with travel_to(NOON):
                travel(days=1)
            moments.append(clock.now())

        def test_2_of_the_class(self) -> None:
            moments.append(clock.now())

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(Case).run(result)
    assert not result.errors and not result.failures, [*result.errors, *result.failures]
    assert moments == [NOON + timedelta(minutes=31), NOON]
    assert not clock.is_set()


def test_a_statement_needs_a_test_that_ends_it(monkeypatch: Patch) -> None:
    monkeypatch.delitem(sys.modules, "django_delayq.pytest_plugin", raising=False)
    with pytest.warns(RuntimeWarning, match="The clock was not moved"):
        travel(minutes=31)
    assert not clock.is_set()
    with travel(minutes=31):
        assert clock.is_set()
    with pytest.raises(dq.InvalidDelay, match="negative"):
        travel(minutes=-1)
    with pytest.raises(dq.InvalidDelay, match="By how much"):
        travel()
    with pytest.raises(TypeError, match="set to a datetime"), travel_to("12:00"):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize("library", ["freezegun", "time_machine"])
def test_the_clock_follows_libraries_that_freeze_time(library: str, order: Order) -> None:
    module = pytest.importorskip(library)

    def at(minutes: int) -> Any:
        moment = NOON + timedelta(minutes=minutes)
        return module.freeze_time(moment) if library == "freezegun" else module.travel(moment, tick=False)

    with at(0):
        assert clock.is_set(), "so statements do not ask the database"
        row = dq.schedule_timeout(order, "remind", minutes=30)
        assert row.due_at == NOON + timedelta(minutes=30)
        assert database_now("default") == NOON
    with at(29):
        assert fire_due() == 0
        with travel(minutes=2):
            assert clock.now() == NOON + timedelta(minutes=31)
    with at(30):
        assert fire_due() == 1
    assert assert_fired(order, "remind").settled_at == NOON + timedelta(minutes=30)
    assert not clock.is_set()


def test_what_a_handler_raises_fails_the_test_and_is_recorded(order: Order, declare: Declare) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        Effect.objects.create(what="undone", object_id="x")
        raise LookupError("no address")

    policy = declare(Order, handler, name="fails", retry=dq.Retry([60]))
    row = dq.schedule_timeout(order, policy, seconds=0)
    with pytest.raises(LookupError, match="no address") as caught:
        fire_due()
    assert [entry.name for entry in caught.traceback][-1] == "handler"
    assert not [str(entry.path) for entry in caught.traceback if "django_delayq/firing" in str(entry.path)]
    assert f"attempt of timeout {row.pk}, {policy.label} of {order.pk}," in caught.value.__notes__[0]
    row.refresh_from_db()
    assert (row.state, row.attempts, row.errors[0]["error"]) == ("pending", 1, "LookupError")
    assert not Effect.objects.exists()


def test_the_lists_contain_the_rows_and_retries_that_are_due_are_fired_too(order: Order, declare: Declare) -> None:
    for name, error, retry in (
        ("fired", None, None),
        ("skipped", dq.Skip("no need"), None),
        ("dead", dq.GiveUp("no way"), None),
        ("once", LookupError(), dq.Retry.never()),
        ("failed", LookupError(), dq.Retry([0, 60])),
        ("snoozed", dq.Snooze(seconds=0), None),  # again and again, but not here
    ):
        dq.schedule_timeout(order, declare(Order, raising(error), name=name, retry=retry), seconds=0)
    result = fire_due(raises=False)
    assert repr(result) == "<1 fired, 1 skipped, 1 failed, 2 dead>"
    listed = [[(row.policy.rpartition(".")[2], row.state) for row in rows] for rows in (result.fired, result.skipped)]
    assert listed == [[("fired", "fired")], [("skipped", "skipped")]]
    assert {row.policy.rpartition(".")[2] for row in result.dead} == {"dead", "once"}
    assert [(row.policy, row.attempts) for row in result.failed] == [("testapp.order.failed", 2)]
    assert Timeout.objects.pending().count() == 2


def test_a_policy_that_its_brake_pauses_is_named(declare: Declare) -> None:
    policy = declare(Order, lambda order, timeout: None, name="guarded", brake=dq.Brake(1, per=timedelta(minutes=10)))
    dq.schedule_timeouts([Order.objects.create() for _ in range(4)], policy, seconds=0)
    result = fire_due()
    assert (result, result.stopped) == (2, [policy.label])
    assert repr(result) == f"<2 fired, 0 skipped, 0 failed, 0 dead; stopped: {policy.label}>"
    assert fire_due("remind", Order).stopped == []


def test_only_the_policy_and_the_object_that_are_asked_for_fire(order: Order, declare: Declare) -> None:
    other = Order.objects.create()
    for each in (order, other):
        dq.schedule_timeout(each, "remind", seconds=0)
        dq.schedule_timeout(each, "remind_many", seconds=0)
    assert fire_due("remind", order).fired == [assert_fired(order, "remind")]
    assert fire_due("testapp.order.remind") == 1
    assert fire_due(obj=order) == 1
    assert_scheduled(other, "remind_many")
    assert fire_due(dq.get_policy((Order, "remind_many")), Order) == 1
    with pytest.raises(dq.UnknownPolicy):
        fire_due("remand", order)


def test_perform_runs_one_handler_as_a_worker_would(order: Order, declare: Declare) -> None:
    seen: list[Any] = []

    def handler(obj: Order, timeout: Timeout) -> None:
        seen.append((obj is order, obj.status, timeout.payload, timeout.due_at, clock.now()))

    policy = declare(Order, handler, name="seen")
    dq.schedule_timeout(order, "remind", seconds=0)
    Order.objects.filter(pk=order.pk).update(status="paid")
    row = perform(policy, order, payload={"to": "ann"}, at=NOON)
    assert (row.state, seen) == ("fired", [(False, "paid", {"to": "ann"}, NOON, NOON)])
    assert_scheduled(order, "remind")
    assert perform("cancel_unpaid", order).cause == "condition"
    with pytest.raises(RuntimeError, match="not in a worker"):
        perform("kill_worker", order)


def refused(words: str) -> Any:
    return pytest.raises(AssertionError, match=words)


def test_the_assertions_return_the_row_or_show_what_is_scheduled_and_the_story() -> None:
    with travel_to(NOON):
        order = Order.objects.create(created_at=NOON)
        row = assert_scheduled(order, "cancel_unpaid", due=NOON + timedelta(minutes=30))
        assert assert_scheduled(order, "cancel_unpaid", due=timedelta(minutes=30)) == row
        assert_not_scheduled(order, "remind")
        dq.schedule_timeout(order, "remind", hours=1, key="second")
        with refused(rf"testapp.order.remind of {order.pk} is not scheduled\.") as caught:
            assert_scheduled(order, "remind")
        words = str(caught.value)
        assert "testapp.order.cancel_unpaid due at 2026-06-01 09:30:00" in words, "in the time zone of the project"
        assert "testapp.order.remind (second) due at 2026-06-01 10:00:00" in words
        with refused(r"is due at 2026-06-01 09:30:00, 0:10:00 later than .* 09:20:00"):
            assert_scheduled(order, "cancel_unpaid", due=timedelta(minutes=20))
        with refused("is scheduled, due at 2026-06-01 09:30:00"):
            assert_not_scheduled(order, "cancel_unpaid")
        with refused("did not fire: it is pending"):
            assert_fired(order, "cancel_unpaid")
        with refused("did not get cancelled: it was never scheduled"):
            assert_cancelled(order, "remind_many")
        dq.cancel_timeout(order, "cancel_unpaid", reason="a gift")
        assert assert_cancelled(order, "cancel_unpaid") == row
        with refused(r"(?s)did not fire: it is cancelled.*a gift"):
            assert_fired(order, "cancel_unpaid")


@pytest.mark.parametrize("atomic", [True, False])
def test_a_block_that_a_handler_did_not_leave_fails_the_test(order: Order, declare: Declare, atomic: bool) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        Effect.objects.create(what="before", object_id=obj.pk)
        transaction.atomic().__enter__()
        Effect.objects.create(what="inside", object_id=obj.pk)

    blocks, words = list(connection.savepoint_ids), r"did not leave atomic\(\) blocks of database 'default' as it found"
    with pytest.raises(RuntimeError, match=words):
        perform(declare(Order, handler, name="enters", atomic=atomic), order)
    assert (connection.in_atomic_block, connection.savepoint_ids) == (True, blocks), "of the test"
    assert list(Effect.objects.values_list("what", flat=True)) == ["before"] * (not atomic)
    assert Order.objects.get() == order


ROOT = Path(__file__).resolve().parents[3]
TESTS = """
import pytest
from django.conf import settings
from django_delayq import clock
from django_delayq.testing import fire_due, travel
from tests.testapp.models import Order

def test_a_statement_applies_until_the_test_ends(timeouts):
    order = Order.objects.create(created_at=clock.now())
    timeouts.assert_scheduled(order, "cancel_unpaid")
    timeouts.travel(minutes=31)
    assert timeouts.fire_due() == 1
    timeouts.assert_fired(order, "cancel_unpaid")
    assert settings.DELAYQ["REDIS"] is None

def test_and_not_longer():
    assert not clock.is_set()
    assert settings.DELAYQ.get("REDIS", "not set") is not None

@pytest.fixture
def tomorrow():
    travel(days=1)

@pytest.mark.django_db(transaction=True)
def test_fixtures_and_functions_move_the_clock_too(tomorrow):
    Order.objects.create(created_at=clock.now())
    travel(minutes=31)
    assert fire_due() == 1

def test_wrong(timeouts):
    timeouts.assert_fired(Order.objects.create(), "remind")
"""


@pytest.mark.skipif(connection.vendor != "sqlite", reason="it is the same on each database")
def test_the_fixture_and_the_functions(tmp_path: Path) -> None:
    (tmp_path / "test_shop.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    inherited = {name: os.environ[name] for name in os.environ.keys() - {"PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"}}
    own = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "DJANGO_SETTINGS_MODULE": "tests.settings", "PYTHONPATH": str(ROOT)}
    plugins = ["-p", "pytest_django.plugin", "-p", "django_delayq.pytest_plugin"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=inherited | own, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    assert "1 failed, 3 passed" in output, output
    assert "testapp.order.remind of 1 did not fire: it was never scheduled." in output
    assert "django_delayq/testing.py" not in output, "the traceback ends in the test"


def test_the_plugin_imports_neither_django_nor_the_library_and_is_an_entry_point() -> None:
    code = "import sys, django_delayq.pytest_plugin; print([x for x in sys.modules if x.startswith('django')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['django_delayq', 'django_delayq.pytest_plugin']"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"delayq": "django_delayq.pytest_plugin"}
