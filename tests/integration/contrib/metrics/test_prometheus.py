"""Events are counted in the process in which they happen; the gauges show the state of the ledger."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import Mock
from urllib.request import urlopen

import pytest
from django.apps import apps
from django.conf import settings
from django.db import DatabaseError, transaction
from django.test import override_settings
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest, start_http_server

import django_delayq as dq
from django_delayq import GiveUp, Retry, Skip, clock, signals
from django_delayq.contrib import prometheus as metrics
from django_delayq.models import Timeout
from django_delayq.testing import fire_due
from tests.support.workers import due_orders
from tests.testapp.models import Order
from tools.servers import free_port

pytestmark = pytest.mark.django_db(transaction=True)
APP = "django_delayq.contrib.prometheus"
REMIND, LINGER, FORGOTTEN = (f"testapp.order.{name}" for name in ("remind", "linger", "forgotten"))
HOUR = timedelta(hours=1)


@pytest.fixture(autouse=True)
def counting() -> Iterator[None]:
    metrics.connect()
    yield
    disconnect()


def disconnect() -> None:
    for signal in (*metrics.COUNTERS, signals.entries_restored, signals.worker_started):
        signal.disconnect(dispatch_uid="delayq_prometheus")


def value(name: str, policy: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"delayq_{name}", {"policy": policy, **labels}) or 0.0


def gauge(name: str, policy: str | None = None) -> float | None:
    registry = CollectorRegistry()
    registry.register(metrics.Gauges())
    return registry.get_sample_value(f"delayq_{name}", {"policy": policy} if policy else {})


class Counted:
    """How much a sample has grown since this was made."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._before = self._now()

    def __call__(self) -> dict[str, float]:
        after = self._now()
        return {name: after[name] - self._before[name] for name in after if after[name] != self._before[name]}

    def _now(self) -> dict[str, float]:
        families = [family.name for each in metrics.COUNTERS.values() for family in each.describe()]
        names = [f"{name.removeprefix('delayq_')}_total" for name in families]
        return {name: value(name, self._policy) for name in (*names, "firing_lag_seconds_count")}


def test_each_thing_that_happens_to_a_timeout_counts_once(declare: Any) -> None:
    def handle(order: Order, timeout: Any) -> None:
        if order.note == "skip":
            raise Skip("no")
        if order.note == "give up":
            raise GiveUp("no")
        if order.note == "fail":
            raise RuntimeError("no")

    policy = declare(Order, handler=handle, name="counted", aliases=("formerly",), retry=Retry([HOUR]))
    counted, before = Counted(policy.label), value("firing_lag_seconds_sum", policy.label)
    for note in ("", "skip", "give up", "fail", "move", "cancel"):
        order = Order.objects.create(note=note)
        row = dq.schedule_timeout(order, policy, seconds=0 if note not in ("move", "cancel") else 60)
        if note == "move":
            dq.reschedule_timeout(order, policy, hours=2)
        if note == "cancel":
            dq.cancel_timeout(order, policy)
        if not note:
            Timeout.objects.filter(pk=row.pk).update(policy="testapp.order.formerly")
    with clock.set_to(clock.now() + timedelta(seconds=90)):
        fire_due(raises=False)
    assert counted() == {
        "scheduled_total": 6, "rescheduled_total": 1, "cancelled_total": 1, "fired_total": 1, "skipped_total": 1,
        "failed_total": 1, "dead_total": 1, "firing_lag_seconds_count": 1,
    }  # fmt: skip
    lag = value("firing_lag_seconds_sum", policy.label) - before
    assert lag == pytest.approx(90, abs=5), "from the deadline"


def test_what_is_rolled_back_counts_nothing_and_restored_entries_count() -> None:
    counted, before = Counted(REMIND), REGISTRY.get_sample_value("delayq_restored_entries_total") or 0.0
    with pytest.raises(RuntimeError), transaction.atomic():
        due_orders("remind")
        raise RuntimeError
    assert counted() == {}
    signals.entries_restored.send(Timeout, count=12)
    assert REGISTRY.get_sample_value("delayq_restored_entries_total") == before + 12


def test_the_gauges_tell_what_the_ledger_holds(django_assert_num_queries: Any) -> None:
    _, overdue, failing, forgotten = due_orders("remind", 4, hours=1)
    rows = Timeout.objects.filter
    rows(pk=overdue.pk).update(due_at=clock.now() - HOUR, run_at=clock.now() - HOUR)
    rows(pk=failing.pk).update(attempts=2)
    dead: dict[str, Any] = {"state": "dead", "cause": "retries", "settled_at": clock.now(), "slot_taken": None}
    rows(pk=forgotten.pk).update(policy=FORGOTTEN, **dead)
    expected = {"pending_timeouts": 3, "overdue_timeouts": 1, "failing_timeouts": 1, "dead_timeouts": 0}
    assert {name: gauge(name, REMIND) for name in expected} == expected
    assert gauge("dead_timeouts", FORGOTTEN) == 1, "also of a policy that is not declared"
    assert gauge("workers") == 0
    gauges = metrics.Gauges()
    first = list(gauges.collect())
    with django_assert_num_queries(0):
        assert list(gauges.collect()) == first, "many who ask share one query"


def test_what_a_guard_rail_settles_is_counted_by_its_cause() -> None:
    [row] = due_orders("remind", hours=1)
    before, counted = value("withheld_total", REMIND, cause="shadow"), Counted(REMIND)
    for row.cause in ("shadow", "condition"):
        signals.timeout_skipped.send(Order, timeout=row)
    assert value("withheld_total", REMIND, cause="shadow") - before == 1
    assert counted() == {"skipped_total": 2}


def test_a_ledger_that_cannot_be_read_leaves_the_page_alive(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("django_delayq.monitoring.snapshot.snapshot", Mock(side_effect=DatabaseError("gone")))
    registry = CollectorRegistry()
    registry.register(metrics.Gauges())
    assert generate_latest(registry) == b""
    assert [record.event for record in caplog.records if hasattr(record, "event")] == ["metrics_failed"]


@pytest.fixture
def app() -> Iterator[None]:
    """Install the app, and remove it completely afterwards."""
    disconnect()
    with override_settings(INSTALLED_APPS=[*settings.INSTALLED_APPS, APP]):
        yield
    for collector in list(REGISTRY._collector_to_names):
        if isinstance(collector, metrics.Gauges):
            REGISTRY.unregister(collector)


def test_counters_are_zero_before_the_first_event_so_that_an_increase_is_visible(declare: Any) -> None:
    label = declare(Order, name="never").label
    metrics.serve_worker()  # no address is set
    page = generate_latest(REGISTRY).decode()
    for name in [family.name for each in metrics.COUNTERS.values() for family in each.describe()]:
        assert f'{name}_total{{policy="{label}"}} 0.0\n' in page
    for cause in metrics.GUARD_CAUSES:
        assert f'delayq_withheld_total{{cause="{cause}",policy="{label}"}} 0.0\n' in page


@pytest.mark.usefixtures("app")
def test_the_app_connects_itself() -> None:
    assert apps.is_installed(APP)
    assert signals.worker_started.has_listeners()
    counted = Counted(REMIND)
    due_orders("remind", hours=1)
    assert counted() == {"scheduled_total": 1}
    assert REGISTRY.get_sample_value("delayq_dead_total", {"policy": LINGER}) == 0
    assert re.search(rb"^delayq_pending_timeouts", generate_latest(REGISTRY), re.MULTILINE)


def test_each_process_of_a_supervisor_logs_the_address_that_it_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started, port = [], free_port()
    monkeypatch.setattr(metrics, "start_http_server", lambda *given: started.append(start_http_server(*given)))
    monkeypatch.setenv("DELAYQ_METRICS_ADDRESS", f":{port - 1}")
    monkeypatch.setenv("DELAYQ_PROCESS", "2")
    with caplog.at_level("INFO", "django_delayq.metrics"):
        metrics.serve_worker()
    ((server, thread),) = started
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        assert b"delayq_fired_total" in answer.read()
    server.shutdown()
    server.server_close()
    thread.join()
    assert caplog.messages == [f"metrics at 127.0.0.1:{port}"]


def test_an_address_that_cannot_be_used_stops_no_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for address in (f"127.0.0.1:{taken.getsockname()[1]}", "nonsense", "127.0.0.1:99999999"):
            caplog.clear()
            monkeypatch.setenv("DELAYQ_METRICS_ADDRESS", address)
            metrics.serve_worker()
            assert [record.event for record in caplog.records if hasattr(record, "event")] == ["metrics_address"]


@pytest.mark.parametrize("how", ["save", "guard", "too late", "by hand"])
def test_rounds_that_their_condition_ends_in_time_are_counted(how: str) -> None:
    label = "testapp.order.cancel_unpaid"
    now, before = clock.now(), value("in_time_total", label)
    order = Order.objects.create(status="unpaid", created_at=now)
    assert Timeout.objects.get().policy == label
    with clock.set_to(now + (timedelta(days=3) if how == "too late" else timedelta(seconds=1))):
        if how == "by hand":
            dq.cancel_timeout(order, "cancel_unpaid")
        elif how == "guard":
            with dq.before_deadline(order, "cancel_unpaid"):
                order.status = "paid"
                order.save()
        else:
            order.status = "paid"
            order.save()
    assert value("in_time_total", label) - before == (how in ("save", "guard"))
