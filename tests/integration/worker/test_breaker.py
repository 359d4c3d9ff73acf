"""The circuit breaker between producers and Redis."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from django_delayq.backoff import Backoff
from django_delayq.exceptions import EngineError, EngineUnavailable
from django_delayq.redis_clients import breaker as module
from django_delayq.redis_clients.breaker import FRESH_SECONDS, Breaker
from tests.support.waiting import wait_until


class Seconds:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Server:
    """The server behind the breaker: it answers, fails, or hangs until released. Counts the calls."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.asked = 0
        self.answered = 0
        self.threads: set[str] = set()
        self.speaks = threading.Event()
        self.speaks.set()

    def __call__(self) -> str:
        self.asked += 1
        self.threads.add(threading.current_thread().name)
        error = self.error
        self.speaks.wait(30)
        self.answered += 1
        if error is not None:
            raise error
        return "answer"


@pytest.fixture
def seconds() -> Seconds:
    return Seconds()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.speaks.set()


@pytest.fixture
def breaker(seconds: Seconds, monkeypatch: pytest.MonkeyPatch) -> Breaker:
    monkeypatch.setattr(module, "LIMIT_SECONDS", 30)
    return Breaker(clock=seconds)


@pytest.fixture
def quick(seconds: Seconds, monkeypatch: pytest.MonkeyPatch) -> Breaker:
    monkeypatch.setattr(module, "LIMIT_SECONDS", 0.05)
    return Breaker(clock=seconds)


def refused(breaker: Breaker, work: Callable[[], Any]) -> bool:
    """Whether the call was answered by the breaker or the server with an error."""
    try:
        breaker.call(work)
    except EngineError:
        return True
    return False


def fail(breaker: Breaker, server: Server) -> None:
    server.error = EngineUnavailable("away")
    assert refused(breaker, server)
    assert breaker.is_open


def probe(breaker: Breaker, server: Server) -> None:
    """The next call begins a probe, which has ended."""
    before = server.answered
    assert refused(breaker, server)
    wait_until(lambda: server.answered == before + 1)
    wait_until(lambda: not breaker._is_probing)


def test_an_answer_and_an_error_are_handed_on(breaker: Breaker, server: Server) -> None:
    assert breaker.call(server) == "answer"
    server.error = EngineError("NOPERM")
    with pytest.raises(EngineError, match="NOPERM"):
        breaker.call(server)
    assert breaker.is_open, "a refusal opens it too"


def test_after_a_failure_nothing_passes_until_the_pause_is_over(
    breaker: Breaker, server: Server, seconds: Seconds
) -> None:
    fail(breaker, server)
    seconds.now += Backoff.first - 0.01
    for _ in range(100):
        assert refused(breaker, server)
    assert server.asked == 1
    server.error = None
    seconds.now += 0.01
    probe(breaker, server)
    assert not breaker.is_open
    assert breaker.call(server) == "answer"


def test_nobody_waits_for_a_probe_and_there_is_one_at_a_time(
    breaker: Breaker, server: Server, seconds: Seconds
) -> None:
    fail(breaker, server)
    server.error = None
    server.speaks.clear()
    seconds.now += 60
    start = threading.Barrier(8)

    def ask() -> None:
        start.wait(60)
        for _ in range(20):
            assert refused(breaker, server)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "it waits for the server"
    wait_until(lambda: server.asked == 2)
    server.speaks.set()
    wait_until(lambda: not breaker.is_open)
    assert server.asked == 2, "160 calls, one probe"


def test_a_server_that_says_nothing_is_waited_for_once(quick: Breaker, server: Server) -> None:
    server.speaks.clear()
    with pytest.raises(EngineUnavailable, match=r"no answer for 0\.05 seconds"):
        quick.call(server)
    for _ in range(100):
        assert refused(quick, server)
    assert server.asked == 1
    assert server.answered == 0


def test_an_answer_that_comes_when_nobody_waits_for_it_any_more_closes_it(quick: Breaker, server: Server) -> None:
    """A remote server: opening a connection takes longer than the timeout, but an open one works."""
    server.speaks.clear()
    assert refused(quick, server)
    assert quick.is_open
    server.speaks.set()
    wait_until(lambda: not quick.is_open)
    assert server.asked == 1


def test_an_answer_that_comes_just_before_it_counts_as_missing_leaves_it_closed(
    quick: Breaker, server: Server, seconds: Seconds, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Missing(EngineUnavailable):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)
            server.speaks.set()
            wait_until(lambda: quick._closed_at == seconds.now)

    monkeypatch.setattr(module, "EngineUnavailable", Missing)
    server.speaks.clear()
    assert refused(quick, server)
    assert not quick.is_open


def test_an_error_that_comes_when_nobody_waits_any_more_changes_nothing(
    seconds: Seconds, quick: Breaker, server: Server
) -> None:
    server.speaks.clear()
    server.error = EngineUnavailable("away")
    assert refused(quick, server)
    server.speaks.set()
    wait_until(lambda: server.answered == 1)
    assert quick.is_open
    assert quick._backoff.retry_at == seconds.now + Backoff.first


def test_a_server_that_fails_again_at_once_is_not_asked_more_often_for_it(
    breaker: Breaker, server: Server, seconds: Seconds
) -> None:
    pauses = []
    for _ in range(4):
        fail(breaker, server)
        pauses.append(breaker._backoff.retry_at - seconds.now)
        server.error = None
        seconds.now = breaker._backoff.retry_at
        probe(breaker, server)
        seconds.now += 1
    assert pauses == [0.5, 1, 2, 4]
    seconds.now += Backoff.longest
    fail(breaker, server)
    assert breaker._backoff.retry_at - seconds.now == Backoff.first


def test_what_began_before_it_opened_changes_nothing(breaker: Breaker, seconds: Seconds) -> None:
    """Neither a failure, which would lengthen the pause, nor a success, which began before the failure."""
    began, go = threading.Barrier(5), threading.Event()

    def late(error: Exception | None) -> None:
        def work() -> None:
            began.wait(60)
            go.wait(60)
            if error:
                raise error

        refused(breaker, work)

    errors = [EngineUnavailable("away"), EngineUnavailable("away"), EngineUnavailable("away"), None]
    threads = [threading.Thread(target=late, args=(error,)) for error in errors]
    for thread in threads:
        thread.start()
    began.wait(60)
    failing = Server()
    fail(breaker, failing)
    go.set()
    for thread in threads:
        thread.join()
    assert breaker.is_open
    assert breaker._backoff.retry_at == seconds.now + Backoff.first


def test_an_error_that_nobody_thought_of_opens_it_and_ends_no_probing(
    breaker: Breaker, server: Server, seconds: Seconds, caplog: pytest.LogCaptureFixture
) -> None:
    server.error = UnicodeError("label empty or too long")
    with pytest.raises(UnicodeError):
        breaker.call(server)
    assert breaker.is_open
    seconds.now += 60
    server.error = SystemExit(1)
    probe(breaker, server)
    server.error = None
    seconds.now += 60
    probe(breaker, server)
    assert not breaker.is_open
    assert [vars(record)["event"] for record in caplog.records] == ["redis_away"]


def test_an_outage_is_logged_once_at_each_end_however_often_it_is_interrupted(
    breaker: Breaker, server: Server, seconds: Seconds, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "django_delayq"):
        for _ in range(5):
            fail(breaker, server)
            seconds.now = breaker._backoff.retry_at
            probe(breaker, server)
            server.error = None
            seconds.now = breaker._backoff.retry_at
            probe(breaker, server)
            breaker.call(server)
        assert [vars(record)["event"] for record in caplog.records] == ["redis_away"]
        seconds.now += Backoff.longest
        breaker.call(server)
        breaker.call(server)
        fail(breaker, server)
    assert [vars(record)["event"] for record in caplog.records] == ["redis_away", "redis_back", "redis_away"]


def test_only_calls_that_may_have_to_connect_are_made_in_another_thread(
    breaker: Breaker, server: Server, seconds: Seconds
) -> None:
    def made_here() -> bool:
        server.threads.clear()
        breaker.call(server)
        return server.threads == {threading.current_thread().name}

    assert not made_here(), "the first one"
    assert made_here()

    def within_another() -> None:
        assert not made_here(), "a second one at the same time needs a second connection"
        assert made_here(), "which is there from then on"

    breaker.call(within_another)
    seconds.now += FRESH_SECONDS
    assert not made_here(), "a connection that was idle for long may be gone"
    assert made_here()


def test_where_no_thread_can_be_had_the_caller_does_it_himself(
    breaker: Breaker, server: Server, seconds: Seconds, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    assert breaker.call(server) == "answer"
    fail(breaker, Server())
    seconds.now += 60
    assert refused(breaker, server)
    assert not breaker.is_open
    assert server.threads == {threading.current_thread().name}


def test_after_a_probe_that_could_not_begin_another_one_does(
    breaker: Breaker, server: Server, seconds: Seconds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler may raise at any time, as that of a time limit of Celery, and the process continues."""

    def interrupted(work: object) -> None:
        raise KeyboardInterrupt

    fail(breaker, server)
    seconds.now += 60
    with monkeypatch.context() as patched:
        patched.setattr(module, "call_in_thread", interrupted)
        with pytest.raises(KeyboardInterrupt):
            breaker.call(server)
    server.error = None
    probe(breaker, server)
    assert not breaker.is_open
