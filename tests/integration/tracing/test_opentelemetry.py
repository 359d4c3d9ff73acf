"""The span of a firing: its links, attributes, parents and errors, in every mode."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

import django_delayq as dq
from django_delayq import schedule_timeouts
from django_delayq.firing.state import firing_state
from django_delayq.models import Timeout
from django_delayq.testing import fire_due
from tests.integration.firing.conftest import MODES, WAIT, due, fire, make_due
from tests.integration.firing.limits import LIMITS, RETRY, compute
from tests.integration.tracing.conftest import Around, Spans
from tests.support.waiting import wait_until
from tests.testapp.models import Effect, Order

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = pytest.mark.django_db(transaction=True)
Declare = Callable[..., dq.TimeoutPolicy[Any]]
TRACER = trace.get_tracer("tests")


def due_in_a_request(order: Order, policy: Any) -> tuple[Timeout, Any]:
    """Schedule a timeout in a span; return it and the context of the span."""
    with TRACER.start_as_current_span("request") as span:
        return due(order, policy), span.get_span_context()


def contexts(span: Any) -> list[tuple[int, int]]:
    return [(each.context.trace_id, each.context.span_id) for each in span.links]


@pytest.mark.parametrize("mode", ["alone", "together", "outside"])
def test_a_firing_links_to_the_span_that_scheduled_it(declare: Declare, spans: Spans, mode: str) -> None:
    policy = declare(Order, name="linked", **MODES[mode])
    given = [due_in_a_request(Order.objects.create(), policy) for _ in range(2)]
    fire(*[row for row, _ in given])
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


def test_timeouts_that_were_scheduled_in_bulk_link_to_one_span(declare: Declare, spans: Spans) -> None:
    policy = declare(Order, name="bulk")
    orders = [Order.objects.create() for _ in range(3)]
    with TRACER.start_as_current_span("request") as request:
        schedule_timeouts(orders, policy, seconds=0)
    fire_due(policy)
    assert [contexts(each) for each in spans.ended()] == [
        [(request.get_span_context().trace_id, request.get_span_context().span_id)]
    ] * 3


@pytest.mark.parametrize("stored", ["", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "ff-garbage"])
def test_without_a_known_trace_there_is_no_link(order: Order, declare: Declare, spans: Spans, stored: str) -> None:
    row, _ = due_in_a_request(order, declare(Order, name="unlinked"))
    Timeout.objects.update(trace=stored)
    fire(row)
    assert spans.one().links == ()


def test_a_chain_of_rounds_is_a_chain_of_links(order: Order, declare: Declare, spans: Spans) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        if timeout.key == "":
            dq.schedule_timeout(obj, policy, key="second", seconds=0)

    policy = declare(Order, handler, name="chain")
    due(order, policy)
    fire_due(policy)
    first, second = spans.ended()
    assert contexts(second) == [(first.context.trace_id, first.context.span_id)]


def test_the_current_span_is_the_parent_as_that_of_a_task_of_celery(
    order: Order, declare: Declare, spans: Spans
) -> None:
    row = due(order, declare(Order, name="child"))
    with TRACER.start_as_current_span("run/django_delayq.fire") as task:
        fire(row)
    assert spans.one().parent == task.get_span_context()


@pytest.mark.parametrize("mode", [*MODES, "limited"])
def test_spans_of_a_handler_are_children_of_its_span(declare: Declare, spans: Spans, mode: str) -> None:
    def handler(target: Any, timeouts: Any) -> None:
        seen.append(trace.get_current_span().get_span_context().span_id)

    seen: list[int] = []
    options = MODES.get(mode, {"limits": LIMITS})
    policy = declare(Order, handler, name="parent", **options)
    fire(*[due(Order.objects.create(), policy) for _ in range(2)])
    assert seen == [span.context.span_id for span in spans.ended()]
    assert not trace.get_current_span().get_span_context().is_valid


def test_spans_of_an_async_handler_are_children_of_its_span(order: Order, declare: Declare, spans: Spans) -> None:
    async def handler(obj: Order, timeout: Timeout) -> None:
        await Effect.objects.acreate(what="x", object_id=obj.pk)
        seen.append(trace.get_current_span().get_span_context().span_id)

    seen: list[int] = []
    fire(due(order, declare(Order, handler, name="asynchronous")))
    assert seen == [spans.one().context.span_id]


@pytest.mark.parametrize("mode", ["alone", "outside"])
def test_an_error_is_recorded_in_the_span_of_each_attempt(
    order: Order, declare: Declare, spans: Spans, mode: str
) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        raise LookupError("no such shop")

    row = due(order, declare(Order, handler, name="fails", retry=dq.Retry([0]), **MODES[mode]))
    fire(row)
    make_due(row)
    fire(row)
    assert [(span.attributes or {})["delayq.attempt"] for span in spans.ended()] == [1, 2]
    for span in spans.ended():
        assert span.status.status_code is StatusCode.ERROR
        assert span.status.description == "LookupError: no such shop"
        assert (span.attributes or {})["error.type"] == "builtins.LookupError"
        [event] = span.events
        facts = dict(event.attributes or {})
        assert (event.name, facts["exception.type"]) == ("exception", "builtins.LookupError")
        assert facts["exception.message"] == "no such shop"
        assert "in handler" in str(facts["exception.stacktrace"])


def test_what_a_span_has_of_an_error_is_scrubbed(
    order: Order, declare: Declare, spans: Spans, settings: Settings
) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        raise LookupError("card 4000")

    settings.DELAYQ = {**settings.DELAYQ, "SCRUB": lambda text, timeout: text.replace("4000", "[card]")}
    fire(due(order, declare(Order, handler, name="fails")))
    assert "4000" not in spans.one().to_json()
    assert "card [card]" in spans.one().to_json()


@pytest.mark.parametrize("answer", [None, RuntimeError("the provider is down")])
def test_a_question_is_a_span_of_its_own(
    order: Order, declare: Declare, spans: Spans, answer: Exception | None
) -> None:
    def ask(obj: Order, timeout: Timeout) -> None:
        if answer is not None:
            raise answer

    policy = declare(Order, name="asks", retry=dq.Retry([60]))
    policy.confirm()(ask)
    row, scheduled = due_in_a_request(order, policy)
    fire(row)
    asked, *fired = spans.named("delayq.")
    assert (asked.name, (asked.attributes or {})["delayq.attempt"]) == ("delayq.confirm testapp.order.asks", 1)
    assert contexts(asked) == [(scheduled.trace_id, scheduled.span_id)]
    if answer is None:
        assert [each.name for each in fired] == ["delayq.fire testapp.order.asks"]
        assert (fired[0].attributes or {})["delayq.attempt"] == 1
    else:
        assert fired == []
        assert asked.status.description == "RuntimeError: the provider is down"


@pytest.mark.parametrize("outcome", [dq.Skip("nothing to do"), dq.Snooze(minutes=5)])
def test_an_outcome_is_not_an_error(order: Order, declare: Declare, spans: Spans, outcome: Exception) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        raise outcome

    fire(due(order, declare(Order, handler, name="decides")))
    span = spans.one()
    assert (span.status.status_code, span.events) == (StatusCode.UNSET, ())
    assert (span.attributes or {})["delayq.outcome"] == type(outcome).__name__.lower()


def test_a_handler_that_gives_up_has_failed(order: Order, declare: Declare, spans: Spans) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        raise dq.GiveUp("the account is closed")

    fire(due(order, declare(Order, handler, name="gives_up")))
    assert spans.one().status.description == "GiveUp: the account is closed"


@pytest.fixture
def wait() -> Iterator[Callable[..., None]]:
    """A handler that nothing interrupts: it waits for a lock, until the test ends."""
    end = threading.Lock()
    end.acquire()

    def handler(*_: object) -> None:
        end.acquire(timeout=WAIT)
        end.release()

    yield handler
    end.release()
    wait_until(lambda: firing_state.stuck_threads == 0, "the abandoned thread has ended")


@pytest.mark.parametrize("mode", ["alone", "outside", "batch"])
def test_the_span_of_an_abandoned_handler_ends_although_its_thread_runs_on(
    order: Order, declare: Declare, spans: Spans, wait: Callable[..., None], mode: str
) -> None:
    policy = declare(Order, wait, name="hangs", limits=LIMITS, retry=RETRY, **MODES[mode])
    fire(due(order, policy))
    assert firing_state.stuck_threads == 1
    span = spans.one()
    assert span.status.status_code is StatusCode.ERROR
    assert str(span.status.description).startswith("TimeLimitExceeded: It took longer than 0.3 s")
    assert span.end_time is not None


def test_a_span_of_an_abandoned_handler_ends_once(order: Order, declare: Declare, spans: Spans) -> None:
    policy = declare(Order, lambda obj, timeout: compute(), name="computes", limits=LIMITS, retry=RETRY)
    fire(due(order, policy))
    wait_until(lambda: firing_state.stuck_threads == 0, "the abandoned thread has ended")
    assert str(spans.one().status.description).startswith("TimeLimitExceeded")


def test_without_the_setting_there_is_no_span(order: Order, declare: Declare, spans: Spans, around: Around) -> None:
    around()
    row, _ = due_in_a_request(order, declare(Order, name="silent"))
    fire(row)
    assert spans.ended() == []
