"""OpenTelemetry: the span of a firing, its links and errors; and the trace context with which a round is written."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
from django.core.checks import run_checks
from django.utils import timezone
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

import django_delayq as dq
from django_delayq import schedule_timeout, schedule_timeouts, sync_timeouts
from django_delayq.backoff import LogInterval
from django_delayq.conf import ConfigError
from django_delayq.contrib.opentelemetry import current_trace
from django_delayq.firing.state import firing_state
from django_delayq.ledger import traces
from django_delayq.ledger.traces import get_around
from django_delayq.models import Timeout
from tests.integration.contrib.tracing.conftest import Around, Spans
from tests.integration.firing.conftest import MODES, due, fire
from tests.integration.firing.handlers import LIMITED_MODES, WAIT, Declare, Log, Patch, raising
from tests.integration.firing.limits import LIMITS, RETRY, threads_end
from tests.integration.firing.rows import logged
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
TRACER = trace.get_tracer("tests")


def request() -> Any:
    """Run the block in a span, as a web request does."""
    return TRACER.start_as_current_span("request")


def due_in_a_request(order: Order, policy: Any) -> tuple[Timeout, Any]:
    """Schedule a timeout in a span; return it and the context of the span."""
    with request() as span:
        return due(order, policy), span.get_span_context()


def contexts(span: Any) -> list[tuple[int, int]]:
    return [(each.context.trace_id, each.context.span_id) for each in span.links]


@pytest.mark.parametrize("mode", ["alone", "together", "outside", "limited"])
def test_a_firing_links_to_the_span_that_scheduled_it(declare: Declare, spans: Spans, mode: str) -> None:
    seen: list[int] = []

    def handler(obj: Order, timeout: Timeout) -> None:
        seen.append(trace.get_current_span().get_span_context().span_id)

    policy = declare(Order, handler, name="linked", **MODES.get(mode, {"limits": LIMITS}))
    given = [due_in_a_request(Order.objects.create(), policy) for _ in range(2)]
    fire(*[row for row, _ in given])
    assert seen == [span.context.span_id for span in spans.ended()]
    assert not trace.get_current_span().get_span_context().is_valid
    for span, (row, scheduled) in zip(spans.ended(), given, strict=True):
        assert (span.name, span.kind) == ("delayq.fire testapp.order.linked", SpanKind.CONSUMER)
        assert contexts(span) == [(scheduled.trace_id, scheduled.span_id)]
        assert span.parent is None
        assert span.status.status_code is StatusCode.UNSET
        assert dict(span.attributes or {}) == {
            "messaging.system": "delayq",
            "messaging.operation.name": "delayq.fire",
            "messaging.operation.type": "process",
            "messaging.destination.name": "testapp.order.linked",
            "messaging.message.id": str(row.pk),
            "delayq.policy": "testapp.order.linked",
            "delayq.queue": "default",
            "delayq.timeout_id": row.pk,
            "delayq.object_id": row.object_id,
            "delayq.attempt": 1,
        }


def test_a_batch_is_one_span_with_a_link_for_each_timeout(declare: Declare, spans: Spans) -> None:
    policy = declare(Order, name="batched", batch=10)
    given = [due_in_a_request(Order.objects.create(), policy) for _ in range(3)]
    unknown = due(Order.objects.create(), policy)
    fire(unknown, *[row for row, _ in given])
    span = spans.one()
    assert sorted(contexts(span)) == sorted((each.trace_id, each.span_id) for _, each in given)
    assert {(each.attributes or {})["delayq.timeout_id"] for each in span.links} == {row.pk for row, _ in given}
    assert (span.attributes or {})["messaging.batch.message_count"] == 4
    assert "delayq.timeout_id" not in (span.attributes or {})


def test_the_current_span_is_the_parent(order: Order, declare: Declare, spans: Spans, around: Around) -> None:
    policy = declare(Order, name="child")
    with TRACER.start_as_current_span("run/django_delayq.fire") as task:
        fire(due(order, policy))
    assert spans.one().parent == task.get_span_context()
    around()
    fire(due_in_a_request(order, policy)[0])
    assert len(spans.ended()) == 1


@pytest.mark.parametrize("mode", ["alone", "outside"])
def test_an_error_is_in_the_span_of_each_attempt(declare: Declare, spans: Spans, mode: str, settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "SCRUB": lambda text, timeout: text.replace("4000", "[card]")}
    handler = raising(LookupError("no card 4000"))
    row = due(Order.objects.create(), declare(Order, handler, name="fails", retry=dq.Retry([0]), **MODES[mode]))
    fire(row)
    fire(row)
    assert [(span.attributes or {})["delayq.attempt"] for span in spans.ended()] == [1, 2]
    for span in spans.ended():
        assert span.status.status_code is StatusCode.ERROR
        assert span.status.description == "LookupError: no card [card]"
        assert (span.attributes or {})["error.type"] == "builtins.LookupError"
        [event] = span.events
        facts = dict(event.attributes or {})
        assert (event.name, facts["exception.type"]) == ("exception", "builtins.LookupError")
        assert facts["exception.message"] == "no card [card]"
        assert "raise error" in str(facts["exception.stacktrace"])
        assert "4000" not in span.to_json()


def test_a_question_is_a_span_of_its_own(order: Order, declare: Declare, spans: Spans) -> None:
    policy = declare(Order, name="asks", retry=dq.Retry([60]))
    policy.confirm()(raising(RuntimeError("the provider is down")))
    row, scheduled = due_in_a_request(order, policy)
    fire(row)
    [asked] = spans.named("delayq.")
    assert (asked.name, (asked.attributes or {})["delayq.attempt"]) == ("delayq.confirm testapp.order.asks", 1)
    assert contexts(asked) == [(scheduled.trace_id, scheduled.span_id)]
    assert asked.status.description == "RuntimeError: the provider is down"


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (dq.Skip("nothing to do"), None),
        (dq.Snooze(minutes=5), None),
        (dq.GiveUp("the account is closed"), "GiveUp: the account is closed"),
    ],
)
def test_only_giving_up_is_an_error(order: Order, declare: Declare, spans: Spans, outcome: Any, error: Any) -> None:
    fire(due(order, declare(Order, raising(outcome), name="decides")))
    span = spans.one()
    assert span.status.description == error
    if error is None:
        assert (span.status.status_code, span.events) == (StatusCode.UNSET, ())
        assert (span.attributes or {})["delayq.outcome"] == type(outcome).__name__.lower()


@LIMITED_MODES
def test_the_span_of_an_abandoned_handler_ends_once(order: Order, declare: Declare, spans: Spans, mode: str) -> None:
    """Nothing interrupts a handler that waits for a lock."""
    end = threading.Lock()
    end.acquire()
    policy = declare(
        Order, lambda *_: end.acquire(timeout=WAIT), name="hangs", limits=LIMITS, retry=RETRY, **MODES[mode]
    )
    fire(due(order, policy))
    assert firing_state.stuck_threads == 1
    span = spans.one()
    assert span.status.status_code is StatusCode.ERROR
    assert str(span.status.description).startswith("TimeLimitExceeded: It took longer than 0.3 s")
    end.release()
    threads_end()
    assert spans.one() is span


# A round is written with the trace context of what has begun it, and only then


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
