"""A thread of the worker that hangs is noticed, and a process whose main loop hangs ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue

import pytest

from django_delayq.worker import watchdog
from django_delayq.worker.watchdog import Progress, watching
from tests.support.workers import events

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(watchdog, "HANGS_SECONDS", 0.1)
    monkeypatch.setattr(watchdog, "ABORT_SECONDS", 0.1)


@contextmanager
def hanging(progress: Progress) -> Iterator[None]:
    """Another thread is busy with one step until the block ends."""
    has_begun, may_end = threading.Event(), threading.Event()

    def work() -> None:
        with progress.step():
            has_begun.set()
            may_end.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    has_begun.wait(60)
    yield
    may_end.set()
    thread.join()


def test_a_process_whose_main_loop_hangs_ends_with_1_for_its_supervisor_and_no_other_thread_ends_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    codes = SimpleQueue[int]()
    loop, other = (Progress(name, "default", 0.01) for name in ("main loop", "sweep"))
    with watching([loop, other], lambda: False, codes.put):
        with hanging(other), pytest.raises(Empty):
            codes.get(timeout=0.5)
        found = events(caplog)
        assert {*found} == {"database_silent"}
        assert len(found) < 10, "each line after twice the time"
        with hanging(loop):
            assert codes.get(timeout=60) == 1
    assert {*events(caplog)} == {"database_silent", "worker_hangs"}
