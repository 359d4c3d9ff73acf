"""A round is written with the trace context of what has begun it, and only then."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
from django.core.checks import run_checks
from django.utils import timezone
from opentelemetry import trace

from django_delayq import reschedule_timeout, schedule_timeout, schedule_timeouts, sync_timeouts
from django_delayq.backoff import LogInterval
from django_delayq.conf import ConfigError
from django_delayq.contrib.opentelemetry import current_trace
from django_delayq.ledger import traces
from django_delayq.ledger.traces import get_around
from django_delayq.models import Timeout
from tests.integration.firing.handlers import Log, Patch
from tests.integration.firing.rows import logged
from tests.integration.tracing.conftest import Around, Spans
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
TRACER = trace.get_tracer("tests")


def request() -> Any:
    """Run the block in a span, as a web request does; it gives the `traceparent`."""
    return TRACER.start_as_current_span("request")


def traces_of(*orders: Order) -> list[str]:
    rows = Timeout.objects.filter(object_id__in=[str(order.pk) for order in orders])
    return list(rows.order_by("pk").values_list("trace", flat=True))


def by_hand(order: Order) -> None:
    schedule_timeout(order, "remind", minutes=5)


def by_saving(order: Order) -> None:
    order.created_at = timezone.now()
    order.save()


def later() -> Any:
    return timezone.now() + timedelta(minutes=5)


WAYS: dict[str, Callable[[Order], object]] = {
    "by hand": by_hand,
    "in steps": lambda order: schedule_timeout(order, "remind", at=later(), on_conflict="once"),
    "in bulk": lambda order: schedule_timeouts([order], "remind", minutes=5),
    "by saving": by_saving,
    "by a sync": lambda order: Order.objects.filter(pk=order.pk).update(created_at=later()) and sync_timeouts(order),
}
BY_SCHEDULING = list(WAYS.values())[:3]


@pytest.mark.parametrize("begin", WAYS.values(), ids=WAYS)
def test_a_round_has_the_trace_of_its_span(spans: Spans, around: Around, begin: Callable[[Order], None]) -> None:
    orders = [Order.objects.create(status="unpaid") for _ in range(3)]
    begin(orders[0])
    with request():
        expected = current_trace()
        begin(orders[1])
        around()
        begin(orders[2])
    assert traces_of(*orders) == ["", expected, ""]
    assert expected.startswith("00-")


@pytest.mark.parametrize("replace", [*BY_SCHEDULING, by_saving])
@pytest.mark.parametrize("has_span", [True, False])
def test_a_new_round_has_the_new_trace(order: Order, spans: Spans, replace: Any, has_span: bool) -> None:
    with request():
        by_saving(order) if replace is by_saving else by_hand(order)
    with request() if has_span else nullcontext():
        expected = current_trace()
        replace(order)
    assert traces_of(order) == [expected]
    assert bool(expected) == has_span


def test_what_was_moved_or_kept_has_the_first_trace(order: Order, spans: Spans) -> None:
    with request():
        expected = current_trace()
        assert schedule_timeout(order, "remind", minutes=5).trace == expected
    with request():
        schedule_timeout(order, "remind", minutes=9, on_conflict="keep")
        reschedule_timeout(order, "remind", minutes=9)
        assert traces_of(order) == [expected]
        assert schedule_timeout(order, "remind", minutes=6).trace == current_trace() != expected


def broken(policy: Any, timeouts: Any) -> Any: ...


@pytest.mark.parametrize("answer", [RuntimeError("no"), SystemExit(), "garbage", "0" * 500, 5])
def test_a_trace_that_cannot_be_read_is_logged_once(
    order: Order, around: Around, caplog: Log, monkeypatch: Patch, answer: Any
) -> None:
    def get_trace() -> Any:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(broken, "get_trace", get_trace, raising=False)
    monkeypatch.setattr(traces, "_log_interval", LogInterval(60))
    around(broken)
    for begin in BY_SCHEDULING:
        begin(order)
    assert traces_of(order) == [""]
    assert len(logged(caplog, "around_failed")) == 1


WRONG = {
    "django_delayq.contrib.opentelemetry.around_handler": "Install django-delayq[opentelemetry].",
    "django_delayq.contrib.sentry.around_handler": "Install django-delayq[sentry].",
    "tests.no_such.function": "No module named 'tests.no_such'",
    "tests.settings.DELAYQ": "is not callable",
    "tests.e2e.executors.rq_config.no_such": "cannot be imported: 'DELAYQ_TEST_BROKER'",
}


@pytest.mark.parametrize("path", WRONG)
def test_a_wrong_path_is_named_by_a_check(order: Order, around: Around, monkeypatch: Patch, path: str) -> None:
    traces._callable_at.cache_clear()
    for module in ("opentelemetry", "sentry_sdk"):
        monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.delitem(sys.modules, f"django_delayq.contrib.{module.removesuffix('_sdk')}", raising=False)
    around(path)
    with pytest.raises(ConfigError) as raised:
        get_around()
    assert path in str(raised.value)
    assert WRONG[path] in str(raised.value)
    [error] = [each for each in run_checks() if each.id == "django_delayq.E008"]
    assert error.msg == str(raised.value)
    by_hand(order)
    assert traces_of(order) == [""]


def test_without_the_setting_no_package_for_tracing_is_needed(order: Order, child_environment: dict[str, str]) -> None:
    code = (  # redis-py loads opentelemetry if there is one
        "import sys; sys.modules.update(opentelemetry=None, sentry_sdk=None)\n"
        "import django; django.setup()\n"
        "from django_delayq import schedule_timeout\n"
        "from django_delayq.testing import fire_due\n"
        "from tests.testapp.models import Order\n"
        "schedule_timeout(Order.objects.get(), 'remind', seconds=0)\n"
        "print(int(fire_due()), [each for each in sys.modules if each.endswith(('contrib.opentelemetry', '.sentry'))])"
    )
    found = subprocess.run([sys.executable, "-c", code], env=child_environment, stdout=subprocess.PIPE, check=True)
    assert found.stdout.strip() == b"1 []"
