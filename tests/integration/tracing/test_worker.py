"""A worker process with both SDKs set up as in a project."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace

from django_delayq.models import Timeout
from tests.integration.firing.conftest import due
from tests.integration.tracing.conftest import Spans
from tests.support.waiting import wait_until
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
RECORDING = "tests.integration.tracing.recording"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_attempts_of_another_process_link_to_the_span_here_and_their_errors_are_events(
    order: Order, spans: Spans, start_command: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    with trace.get_tracer("tests").start_as_current_span("request") as request:
        row = due(order, "kill_worker")  # this worker does not die, but its handler raises
        scheduled = request.get_span_context()
    around = f"{RECORDING}.in_span {RECORDING}.in_scope"
    environment = {"DELAYQ_TEST_AROUND": around, "DELAYQ_TEST_RECORDED": str(tmp_path)}
    worker = start_command("delayq_worker", "--processes", "1", env=environment)
    wait_until(lambda: Timeout.objects.filter(pk=row.pk, state="dead").exists(), "it is dead")
    worker.terminate()
    assert worker.wait(60) == 0
    attempts = lines(tmp_path / "spans")
    assert [each["attributes"]["delayq.attempt"] for each in attempts] == [1, 2, 3]
    for each in attempts:
        assert each["name"] == "delayq.fire testapp.order.kill_worker"
        assert each["status"]["status_code"] == "ERROR"
        [link] = each["links"]
        assert int(link["context"]["trace_id"], 16) == scheduled.trace_id
        assert int(link["context"]["span_id"], 16) == scheduled.span_id
    events = lines(tmp_path / "events")
    assert [each["tags"]["delayq.attempt"] for each in events] == ["2", "3"], "the first failure is a warning"
    for event in events:
        assert event["tags"]["delayq.timeout"] == str(row.pk)
        assert event["transaction"] == row.policy
        assert "exception" in event or event["logentry"]
