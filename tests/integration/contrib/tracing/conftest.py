"""The SDKs of OpenTelemetry and Sentry, which keep what they would send."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sentry_sdk
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sentry_sdk.envelope import Envelope
from sentry_sdk.integrations.dedupe import DedupeIntegration
from sentry_sdk.integrations.logging import LoggingIntegration
from sentry_sdk.transport import Transport

from django_delayq.firing.state import firing_state

OPENTELEMETRY = "django_delayq.contrib.opentelemetry.around_handler"
SENTRY = "django_delayq.contrib.sentry.around_handler"
Around = Callable[..., None]


@pytest.fixture
def around(settings: Any) -> Around:
    """`around(...)` sets `AROUND`. What was logged before is logged again."""
    firing_state.forget()

    def use(*functions: Any) -> None:
        settings.DELAYQ = {**settings.DELAYQ, "AROUND": list(functions)}

    return use


@pytest.fixture(scope="session")
def exporter() -> InMemorySpanExporter:
    """OpenTelemetry accepts one provider for each process."""
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    trace.set_tracer_provider(provider)
    return kept


class Spans:
    """The spans that have ended."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    def ended(self) -> list[ReadableSpan]:
        """Return the spans of handlers, in the order in which they ended."""
        return self.named("delayq.fire ")

    def named(self, start: str) -> list[ReadableSpan]:
        return [each for each in self._exporter.get_finished_spans() if each.name.startswith(start)]

    def one(self) -> ReadableSpan:
        [span] = self.ended()
        return span


@pytest.fixture
def spans(exporter: InMemorySpanExporter, around: Around) -> Spans:
    exporter.clear()
    around(OPENTELEMETRY)
    return Spans(exporter)


class Kept(Transport):
    """Keep the events instead of sending them."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        if (event := envelope.get_event()) is not None:
            self.events.append(dict(event))


@pytest.fixture
def sentry(around: Around) -> Iterator[list[dict[str, Any]]]:
    """Return the list of the events that Sentry gets. Only these integrations: others change Django for good."""
    transport = Kept()
    integrations = [LoggingIntegration(), DedupeIntegration()]
    options: dict[str, Any] = {"default_integrations": False, "auto_enabling_integrations": False}
    sentry_sdk.init("https://key@sentry.invalid/1", transport=transport, integrations=integrations, **options)
    around(SENTRY)
    with sentry_sdk.isolation_scope():
        yield transport.events
    sentry_sdk.get_global_scope().set_client(None)
