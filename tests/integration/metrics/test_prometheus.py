"""Events are counted in the process in which they happen; the gauges show the state of the ledger."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
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
from django_delayq import GiveUp, Retry, Skip, clock, operations, signals
from django_delayq.contrib import prometheus as metrics
from django_delayq.models import Timeout
from django_delayq.testing import fire_due
from tests.support.waiting import wait_until
from tests.testapp.models import Order
from tools.servers import free_port

pytestmark = pytest.mark.django_db(transaction=True)
APP = "django_delayq.contrib.prometheus"
REMIND = "testapp.order.remind"


@pytest.fixture(autouse=True)
def counting() -> Iterator[None]:
    metrics.connect()
    yield
    for signal in metrics.COUNTERS:
        signal.disconnect(dispatch_uid="delayq_prometheus")
    signals.entries_restored.disconnect(dispatch_uid="delayq_prometheus")


def value(name: str, policy: str) -> float:
    return REGISTRY.get_sample_value(name, {"policy": policy}) or 0.0


class Counted:
    """How much a sample has grown since this was made."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._before = self._now()

    def __call__(self) -> dict[str, float]:
        after = self._now()
        return {name: after[name] - self._before[name] for name in after if after[name] != self._before[name]}

    def _now(self) -> dict[str, float]:
        names = [f"{family.name}_total" for each in metrics.COUNTERS.values() for family in each.describe()]
        return {name: value(name, self._policy) for name in (*names, "delayq_firing_lag_seconds_count")}


def test_each_thing_that_happens_to_a_timeout_counts_once(declare: Any) -> None:
    def handle(order: Order, timeout: Any) -> None:
        if order.note == "skip":
            raise Skip("no")
        if order.note == "give up":
            raise GiveUp("no")
        if order.note == "fail":
            raise RuntimeError("no")

    policy = declare(Order, handler=handle, name="counted", retry=Retry([timedelta(hours=1)]))
    counted = Counted(policy.label)
    for note in ("", "skip", "give up", "fail", "move", "cancel"):
        order = Order.objects.create(note=note)
        dq.schedule_timeout(order, policy, seconds=0 if note not in ("move", "cancel") else 60)
        if note == "move":
            dq.reschedule_timeout(order, policy, hours=2)
        if note == "cancel":
            dq.cancel_timeout(order, policy)
    fire_due(raises=False)
    assert counted() == {
        "delayq_scheduled_total": 6,
        "delayq_rescheduled_total": 1,
        "delayq_cancelled_total": 1,
        "delayq_fired_total": 1,
        "delayq_skipped_total": 1,
        "delayq_failed_total": 1,
        "delayq_dead_total": 1,
        "delayq_firing_lag_seconds_count": 1,
    }


def test_a_timeout_with_a_former_label_counts_for_its_policy(declare: Any) -> None:
    policy = declare(Order, name="renamed", aliases=("formerly",))
    dq.schedule_timeout(Order.objects.create(), policy, seconds=0)
    Timeout.objects.update(policy="testapp.order.formerly")
    counted = Counted(policy.label)
    fire_due()
    assert counted() == {"delayq_fired_total": 1, "delayq_firing_lag_seconds_count": 1}


def test_restored_entries_are_counted() -> None:
    before = REGISTRY.get_sample_value("delayq_restored_entries_total") or 0.0
    signals.entries_restored.send(Timeout, count=12)
    assert REGISTRY.get_sample_value("delayq_restored_entries_total") == before + 12


def test_what_is_rolled_back_counts_nothing() -> None:
    counted = Counted("testapp.order.remind")
    with pytest.raises(RuntimeError), transaction.atomic():
        dq.schedule_timeout(Order.objects.create(), "remind", hours=1)
        raise RuntimeError
    assert counted() == {}


def test_the_lag_is_counted_from_the_deadline() -> None:
    before = value("delayq_firing_lag_seconds_sum", "testapp.order.remind")
    row = dq.schedule_timeout(Order.objects.create(), "remind", minutes=1)
    with clock.set_to(row.due_at + timedelta(seconds=90)):
        fire_due()
    assert value("delayq_firing_lag_seconds_sum", "testapp.order.remind") - before == pytest.approx(90, abs=5)


def test_the_gauges_tell_what_the_ledger_holds() -> None:
    dq.schedule_timeout(Order.objects.create(), "remind", hours=1)
    overdue = dq.schedule_timeout(Order.objects.create(), "remind", hours=1)
    type(overdue).objects.filter(pk=overdue.pk).update(
        due_at=clock.now() - timedelta(hours=1), run_at=clock.now() - timedelta(hours=1)
    )
    failing = dq.schedule_timeout(Order.objects.create(), "remind", hours=1)
    Timeout.objects.filter(pk=failing.pk).update(attempts=2)
    registry = CollectorRegistry()
    registry.register(metrics.Gauges())
    labels = {"policy": "testapp.order.remind"}
    assert registry.get_sample_value("delayq_failing_timeouts", labels) == 1
    assert registry.get_sample_value("delayq_pending_timeouts", labels) == 3
    assert registry.get_sample_value("delayq_overdue_timeouts", labels) == 1
    assert registry.get_sample_value("delayq_dead_timeouts", labels) == 0
    assert registry.get_sample_value("delayq_policy_stopped", labels) == 0
    assert registry.get_sample_value("delayq_workers") == 0


def test_rows_of_a_policy_that_is_not_declared_are_in_the_gauges() -> None:
    row = dq.schedule_timeout(Order.objects.create(), "remind", hours=1)
    values = {"state": "dead", "cause": "retries", "settled_at": clock.now(), "slot_taken": None}
    type(row).objects.filter(pk=row.pk).update(policy="testapp.order.forgotten", **values)
    registry = CollectorRegistry()
    registry.register(metrics.Gauges())
    assert registry.get_sample_value("delayq_dead_timeouts", {"policy": "testapp.order.forgotten"}) == 1


def test_a_stopped_policy_is_told() -> None:
    operations.pause("testapp.order.remind", by="test")
    registry = CollectorRegistry()
    registry.register(metrics.Gauges())
    assert registry.get_sample_value("delayq_policy_stopped", {"policy": "testapp.order.remind"}) == 1


@pytest.mark.parametrize("cause", ["late", "shadow", "limit"])
def test_what_a_guard_rail_settles_is_counted_by_its_cause(cause: str) -> None:
    def withheld() -> float:
        labels = {"policy": "testapp.order.remind", "cause": cause}
        return REGISTRY.get_sample_value("delayq_withheld_total", labels) or 0.0

    row, before, counted = dq.schedule_timeout(Order.objects.create(), "remind", hours=1), withheld(), Counted(REMIND)
    row.cause = cause
    signals.timeout_skipped.send(Order, timeout=row)
    row.cause = "condition"
    signals.timeout_skipped.send(Order, timeout=row)
    assert withheld() - before == 1
    assert counted() == {"delayq_skipped_total": 2}


def test_the_guard_rails_in_force_have_gauges() -> None:
    operations.pause(REMIND, by="brake", reason="51 fired in 10 minutes")
    operations.shadow(REMIND, share=10, by="test")
    operations.pause("testapp.order.linger", by="test")
    registry = CollectorRegistry()
    registry.register(metrics.Gauges())
    found = [
        [registry.get_sample_value(f"delayq_policy_{name}", {"policy": label}) for name in ("braked", "shadow_percent")]
        for label in (REMIND, "testapp.order.linger")
    ]
    assert found == [[1, 10], [0, 0]]


def test_many_who_ask_share_one_look(django_assert_num_queries: Any) -> None:
    gauges = metrics.Gauges()
    first = list(gauges.collect())
    with django_assert_num_queries(0):
        assert list(gauges.collect()) == first


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
    for signal in metrics.COUNTERS:
        signal.disconnect(dispatch_uid="delayq_prometheus")
    with override_settings(INSTALLED_APPS=[*settings.INSTALLED_APPS, APP]):
        yield
    for collector in list(REGISTRY._collector_to_names):
        if isinstance(collector, metrics.Gauges):
            REGISTRY.unregister(collector)
    signals.worker_started.disconnect(dispatch_uid="delayq_prometheus")


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
    counted = Counted("testapp.order.remind")
    dq.schedule_timeout(Order.objects.create(), "remind", hours=1)
    assert counted() == {"delayq_scheduled_total": 1}
    assert REGISTRY.get_sample_value("delayq_dead_total", {"policy": "testapp.order.linger"}) == 0
    assert re.search(rb"^delayq_pending_timeouts", generate_latest(REGISTRY), re.MULTILINE)


def page(port: int, host: str = "127.0.0.1") -> str:
    """Return the page of metrics, or "" if no process serves it."""
    try:
        with urlopen(f"http://{host}:{port}/metrics", timeout=30) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def test_a_worker_serves_what_it_has_done(start_command: Callable[..., Any]) -> None:
    dq.schedule_timeout(Order.objects.create(), "remind", seconds=0)
    port = free_port()
    start_command("delayq_worker", env={"DELAYQ_TEST_APPS": APP, "DELAYQ_METRICS_ADDRESS": f"127.0.0.1:{port}"})
    wait_until(lambda: 'delayq_fired_total{policy="testapp.order.remind"} 1.0' in page(port))
    wait_until(lambda: "\ndelayq_workers " in page(port))
    served = page(port)
    assert '\ndelayq_dead_total{policy="testapp.order.remind"} 0.0\n' in served
    assert '\ndelayq_withheld_total{cause="late",policy="testapp.order.remind"} 0.0\n' in served


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(("given", "host"), [("", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("[::1]", "[::1]")])
def test_each_process_of_a_supervisor_logs_the_address_that_it_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, given: str, host: str
) -> None:
    if host == "[::1]" and not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    started, port = [], free_port()
    monkeypatch.setattr(metrics, "start_http_server", lambda *given: started.append(start_http_server(*given)))
    monkeypatch.setenv("DELAYQ_METRICS_ADDRESS", f"{given}:{port - 1}")
    monkeypatch.setenv("DELAYQ_PROCESS", "2")
    with caplog.at_level("INFO", "django_delayq.metrics"):
        metrics.serve_worker()
    ((server, thread),) = started
    assert "delayq_fired_total" in page(port, host)
    server.shutdown()
    server.server_close()
    thread.join()
    assert caplog.messages == [f"metrics at {host}:{port}"]


def test_an_address_that_cannot_be_used_stops_no_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for address in (f"127.0.0.1:{taken.getsockname()[1]}", "nonsense", "127.0.0.1:99999999"):
            caplog.clear()
            monkeypatch.setenv("DELAYQ_METRICS_ADDRESS", address)
            metrics.serve_worker()
            assert [record.event for record in caplog.records if hasattr(record, "event")] == ["metrics_address"]


@pytest.mark.parametrize("how", ["save", "guard", "too late"])
def test_rounds_that_their_condition_ends_in_time_are_counted(how: str) -> None:
    label = "testapp.order.cancel_unpaid"
    now, before = clock.now(), value("delayq_in_time_total", label)
    order = Order.objects.create(status="unpaid", created_at=now)
    assert Timeout.objects.get().policy == label
    with clock.set_to(now + timedelta(days=3) if how == "too late" else now + timedelta(seconds=1)):
        if how == "guard":
            with dq.before_deadline(order, "cancel_unpaid"):
                order.status = "paid"
                order.save()
        else:
            order.status = "paid"
            order.save()
    assert value("delayq_in_time_total", label) - before == (how != "too late")


def test_what_is_cancelled_by_hand_is_not_in_time() -> None:
    label = "testapp.order.remind"
    before = value("delayq_in_time_total", label)
    order = Order.objects.create(status="new")
    dq.schedule_timeout(order, "remind", minutes=5)
    dq.cancel_timeout(order, "remind")
    assert value("delayq_in_time_total", label) == before
