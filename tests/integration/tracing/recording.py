"""The functions for `AROUND` in a worker process, which also set up both SDKs: they write to a directory.

Sentry has its default integrations, as in a project.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import sentry_sdk
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from sentry_sdk.envelope import Envelope
from sentry_sdk.transport import Transport

from django_delayq.contrib.opentelemetry import around_handler as in_span
from django_delayq.contrib.sentry import around_handler as in_scope

__all__ = ("in_scope", "in_span")

DIRECTORY = Path(os.environ["DELAYQ_TEST_RECORDED"])


class Written(Transport):
    """Write each event as a line of JSON."""

    def capture_envelope(self, envelope: Envelope) -> None:
        with DIRECTORY.joinpath("events").open("a") as file:
            file.write(json.dumps(envelope.get_event(), default=str) + "\n")


provider = TracerProvider()
spans = DIRECTORY.joinpath("spans").open("a", buffering=1)
provider.add_span_processor(
    SimpleSpanProcessor(ConsoleSpanExporter(out=spans, formatter=lambda each: each.to_json(None) + "\n"))
)
trace.set_tracer_provider(provider)
sentry_sdk.init("https://key@sentry.invalid/1", transport=Written())
