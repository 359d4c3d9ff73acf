"""Works and reports as messages: they survive JSON, and a garbled one is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.utils import timezone

from django_delayq.exceptions import Abandoned
from django_delayq.firing import Report, Work
from django_delayq.firing.works import Call, RunningWork


def test_works_and_reports_survive_json_and_fields_of_a_newer_release() -> None:
    work = Work("shop.order.x", (1, 2**62), ("a", "b"), "mail", suspect=True)
    report = Report((1,), {2: timezone.now()}, (1,), timezone.now(), {}, (3,), (4,), (2,))
    for message in (work, report):
        data = json.loads(json.dumps({**message.as_dict(), "version": 2, "new": {"of": "a newer release"}}))
        assert type(message).from_dict(data) == message
    assert Work.from_dict({"policy": "a.b.c", "ids": [1], "object_ids": ["1"]}) == Work("a.b.c", (1,), ("1",))
    assert Report.from_dict({}) == Report()


GARBLED: list[Any] = [
    None, [], {}, {"policy": "a.b.c", "ids": [1], "object_ids": []}, {"policy": "a.b.c", "ids": [], "object_ids": []},
    {"policy": "a.b.c", "ids": [1, 1], "object_ids": ["1", "1"]}, {"policy": 1, "ids": [1], "object_ids": ["1"]},
    {"policy": "a.b.c", "ids": ["1"], "object_ids": ["1"]}, {"policy": "a.b.c", "ids": [2**63], "object_ids": ["1"]},
    {"policy": "a.b.c", "ids": [True], "object_ids": ["1"]}, {"policy": "a.b.c", "ids": [1], "object_ids": [1]},
]  # fmt: skip


@pytest.mark.parametrize("data", GARBLED, ids=str)
def test_a_garbled_work_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match="This is not a work"):
        Work.from_dict(data)


@pytest.mark.parametrize(
    "data", [None, {"done": 1}, {"again": [[1, "tomorrow"]]}, {"again": [[1, "2026-01-01T00:00:00"]]}], ids=str
)
def test_a_garbled_report_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match="This is not a report"):
        Report.from_dict(data)


def test_a_call_either_ends_or_is_abandoned() -> None:
    ended, abandoned = Call((1,)), Call((2,))
    running = RunningWork(Work("a.b.c", (1, 2), ("1", "2")), using="default", report=None)
    running.leave(ended, running.enter(ended))
    assert running.abandon(0.0) is None
    running.enter(abandoned)
    assert running.abandon(0.0) is abandoned
    with pytest.raises(Abandoned):  # so that its thread calls no other handler
        running.leave(abandoned, None)
