"""OpenTelemetry: a span for each call of a handler, or of `confirm`, with links to what has scheduled its timeouts.

`DELAYQ = {"AROUND": ["django_delayq.contrib.opentelemetry.around_handler"]}`. The project sets up the SDK: without one,
nothing is recorded. See `docs/how-to/tracing.md`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextvars import Token
from types import TracebackType
from typing import Any, Final

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from django_delayq import __version__
from django_delayq.exceptions import Abandoned
from django_delayq.ledger.error_texts import error_details, message_of, scrubbed
from django_delayq.ledger.traces import attempt_of, is_asked
from django_delayq.models import Timeout
from django_delayq.policy.outcomes import GiveUp, Outcome
from django_delayq.policy.policies import TimeoutPolicy

FIRE: Final = "delayq.fire"
ASK: Final = "delayq.confirm"
"""With the policy, the name of the span: operation and destination, as the conventions for messaging have it."""
_tracer = trace.get_tracer("django_delayq", __version__)
_propagator = TraceContextTextMapPropagator()


def current_trace() -> str:
    """Return the `traceparent` of the current span; "" if there is none."""
    found = trace.get_current_span().get_span_context()
    if not found.is_valid:
        return ""
    ids = f"{trace.format_trace_id(found.trace_id)}-{trace.format_span_id(found.span_id)}"
    return f"00-{ids}-{found.trace_flags:02x}"


class around_handler:  # noqa: N801 - it is used as a function
    """Run a call of a handler in a span."""

    get_trace = staticmethod(current_trace)

    def __init__(self, policy: TimeoutPolicy[Any], timeouts: Sequence[Timeout]) -> None:
        self._policy, self._timeouts = policy, timeouts
        self._ended = threading.Lock()

    def __enter__(self) -> None:
        """Begin the span. Its parent is the current span, such as that of a task of Celery; a worker has none."""
        self._span: Span = _tracer.start_span(
            f"{_operation(self._timeouts)} {self._policy.label}",
            kind=SpanKind.CONSUMER,
            attributes=_attributes(self._policy, self._timeouts),
            links=[Link(found, _attributes_of(row)) for row in self._timeouts if (found := _scheduled_in(row))],
        )
        self._token: Token[Context] = context.attach(trace.set_span_in_context(self._span))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the span, unless the thread that has abandoned the call does that."""
        context.detach(self._token)
        if not isinstance(error, Abandoned):
            self._end(error)

    def abandoned(self, error: BaseException) -> None:
        """End the span, although the handler may run on: it can change nothing any more."""
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if not self._ended.acquire(blocking=False):
            return
        if isinstance(error, Outcome) and not isinstance(error, GiveUp):
            self._span.set_attribute("delayq.outcome", type(error).__name__.lower())
        elif error is not None:
            self._record(error)
        self._span.end()

    def _record(self, error: BaseException) -> None:
        """Record an error as the conventions for exceptions have it, with its message and traceback scrubbed."""
        row = self._timeouts[0] if len(self._timeouts) == 1 else None
        name, details = f"{type(error).__module__}.{type(error).__qualname__}", error_details(error, row)
        facts = {"exception.type": name, "exception.message": details["message"]}
        self._span.add_event("exception", {**facts, "exception.stacktrace": details["traceback"]})
        self._span.set_attribute("error.type", name)
        self._span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {message_of(error, row)}"))


def _scheduled_in(row: Timeout) -> trace.SpanContext | None:
    """Return the span in which the round of `row` was scheduled; None: it is not known."""
    if not row.trace:
        return None
    found = trace.get_current_span(_propagator.extract({"traceparent": row.trace}, Context())).get_span_context()
    return found if found.is_valid else None


def _operation(timeouts: Sequence[Timeout]) -> str:
    return ASK if is_asked(timeouts[0]) else FIRE


def _attributes(policy: TimeoutPolicy[Any], timeouts: Sequence[Timeout]) -> dict[str, AttributeValue]:
    """Return the attributes of a span: those of the conventions for messaging, and our own. No data of the object."""
    found: dict[str, AttributeValue] = {
        "messaging.system": "delayq",
        "messaging.operation.name": _operation(timeouts),
        "messaging.operation.type": "process",
        "messaging.destination.name": policy.label,
        "delayq.policy": policy.label,
        "delayq.queue": policy.queue,
    }
    if len(timeouts) > 1:
        return found | {"messaging.batch.message_count": len(timeouts)}
    return {**found, **_attributes_of(timeouts[0]), "delayq.attempt": attempt_of(timeouts[0])}


def _attributes_of(row: Timeout) -> dict[str, AttributeValue]:
    return {
        "messaging.message.id": str(row.pk),
        "delayq.timeout_id": row.pk,
        "delayq.object_id": scrubbed(row.object_id, row),
    }
