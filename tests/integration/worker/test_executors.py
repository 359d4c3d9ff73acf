"""Whatever an executor does with a work, no timeout is stuck, none is fired twice, and the worker ends in order."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from pytest_django import Settings

from django_delayq.firing import Report, Work, run
from django_delayq.firing.executors import Executor
from django_delayq.models import Timeout
from tests.support.waiting import wait_until
from tests.support.workers import RunningWorker, StartWorker, all_are, due_orders, events
from tests.testapp.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)
LEASE = timedelta(seconds=1)


class Scripted(Executor):
    """Treats the first works as the test defines, and runs the others in the worker's own thread."""

    script: Callable[[Scripted, Work, Any], object] | None = None
    times = 1
    made: list[Scripted] = []

    def __init__(self, using: str, concurrency: int) -> None:
        self.using = using
        self.seen: list[Work] = []
        Scripted.made.append(self)

    def submit(self, work: Work, done: Any) -> None:
        self.seen.append(work)
        script = type(self).script
        if script is not None and len(self.seen) <= type(self).times:
            script(self, work, done)
        else:
            done(work, run(work, self.using))


@pytest.fixture
def start(with_redis: Any, start_worker: StartWorker, settings: Settings) -> Callable[..., RunningWorker]:
    """Start a worker whose executor treats the first `times` works as `script` defines."""

    def do(script: Any, times: int = 1, lease: timedelta = LEASE) -> RunningWorker:
        Scripted.script, Scripted.times = script, times
        settings.DELAYQ = {**settings.DELAYQ, "EXECUTOR": f"{__name__}.Scripted", "LEASE": lease}
        return start_worker()

    return do


def raises(executor: Scripted, work: Work, done: Any) -> None:
    raise OSError("the broker is down")


def refuses(executor: Scripted, work: Work, done: Any) -> None:
    threading.Thread(target=lambda: done(work, Report(refused=work.ids)), daemon=True).start()


def loses(executor: Scripted, work: Work, done: Any) -> None:
    done(work, Report(lost=work.ids))


def keeps_silent(executor: Scripted, work: Work, done: Any) -> None:
    """As a broker that loses its messages."""


def answers_garbage(executor: Scripted, work: Work, done: Any) -> None:
    done(work, Report(done=(10**6,), again={work.ids[0]: "tomorrow"}))  # type: ignore[dict-item]


def answers_twice_and_with_another_work(executor: Scripted, work: Work, done: Any) -> None:
    report = Report.from_dict(json.loads(json.dumps(run(work, executor.using).as_dict())))
    done(object(), report)
    done(Work("testapp.order.remind", (10**6,), ("1",)), report)
    done(work, report)
    done(Work.from_dict(json.loads(json.dumps(work.as_dict()))), report)


FAULTS = [raises, loses, keeps_silent, answers_garbage, answers_twice_and_with_another_work]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_no_timeout_is_stuck_and_the_worker_ends_in_order(start: Any, fault: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO, logger="django_delayq")
    due_orders("remind", 3)
    running = start(fault, times=2)
    wait_until(all_are("fired"))
    assert set(Timeout.objects.values_list("attempts", flat=True)) == {1}
    assert Effect.objects.filter(what="remind").count() == 3
    running.stop()
    assert "database_away" not in events(caplog)
    first, *others = Scripted.made[-1].seen
    if fault is loses:  # a process may have died of it
        assert not first.suspect
        assert {work.ids for work in others if work.suspect} >= {(id,) for id in first.ids}


@pytest.mark.parametrize("fault", [raises, refuses], ids=lambda fault: fault.__name__)
def test_an_executor_that_refuses_is_asked_again_long_before_the_lease_ends_and_named_in_the_log(
    start: Any, fault: Any, caplog: Any
) -> None:
    caplog.set_level(logging.INFO, logger="django_delayq")
    due_orders("remind", 60)
    start(fault, times=3, lease=timedelta(minutes=10))
    wait_until(all_are("fired"))
    [said] = [record.getMessage() for record in caplog.records if getattr(record, "event", "") == "executor_refused"]
    assert f"{__name__}.Scripted" in said
    wait_until(lambda: "executor_back" in [getattr(record, "event", "") for record in caplog.records])
    assert "database_away" not in events(caplog)


def test_a_work_waits_for_its_slot() -> None:
    [row] = due_orders("remind")
    begin_at = time.monotonic() + 0.2
    work = Work(row.policy, (row.pk,), (row.object_id,), begin_at=begin_at)
    assert "begin_at" not in work.as_dict(), "the clock of another process is another one"
    assert run(work, "default").fired == (row.pk,)
    assert time.monotonic() >= begin_at
