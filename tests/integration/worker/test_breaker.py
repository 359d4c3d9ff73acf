"""The circuit breaker between producers and Redis."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from django_delayq.backoff import Backoff
from django_delayq.exceptions import EngineError, EngineUnavailable
from django_delayq.redis_clients import breaker as module
from django_delayq.redis_clients.breaker import FRESH_SECONDS, Breaker
from tests.support.waiting import Steady, wait_until


class Server:
    """The server behind the breaker: it answers, fails, or hangs until released. Counts the calls."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.asked = self.answered = 0
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
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.speaks.set()


@pytest.fixture
def breaker(steady: Steady, monkeypatch: pytest.MonkeyPatch) -> Breaker:
    monkeypatch.setattr(module, "LIMIT_SECONDS", 30)
    return Breaker(clock=steady)


@pytest.fixture
def quick(breaker: Breaker, monkeypatch: pytest.MonkeyPatch) -> Breaker:
    """One that waits for no answer for long."""
    monkeypatch.setattr(module, "LIMIT_SECONDS", 0.05)
    return breaker


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


def probe(breaker: Breaker, server: Server, error: BaseException | None = None) -> None:
    """The next call begins a probe, which has ended; the server is sound again, unless it has an error."""
    before, server.error = server.answered, error
    assert refused(breaker, server)
    wait_until(lambda: server.answered == before + 1 and not breaker._is_probing)


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [vars(record)["event"] for record in caplog.records]


def test_after_a_failure_nothing_passes_until_the_pause_is_over(
    breaker: Breaker, server: Server, steady: Steady
) -> None:
    assert breaker.call(server) == "answer"
    fail(breaker, server)
    steady.seconds += Backoff.first - 0.01
    assert all(refused(breaker, server) for _ in range(100))
    assert server.asked == 2
    steady.seconds += 0.01
    probe(breaker, server)
    assert not breaker.is_open
    assert breaker.call(server) == "answer"
    server.error = EngineError("NOPERM")
    with pytest.raises(EngineError, match="NOPERM"):
        breaker.call(server)
    assert breaker.is_open, "a refusal opens it too"


def test_nobody_waits_for_a_probe_and_there_is_one_at_a_time(breaker: Breaker, server: Server, steady: Steady) -> None:
    fail(breaker, server)
    server.error = None
    server.speaks.clear()
    steady.seconds += 60
    start = threading.Barrier(8)

    def ask() -> None:
        start.wait(60)
        assert all(refused(breaker, server) for _ in range(20))

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


@pytest.mark.parametrize("error", [None, EngineUnavailable("away")], ids=["answer", "error"])
def test_a_server_that_says_nothing_is_waited_for_once_and_a_late_answer_closes_it(
    quick: Breaker, server: Server, steady: Steady, error: BaseException | None
) -> None:
    """A remote server: opening a connection takes longer than the timeout, but an open one works."""
    server.speaks.clear()
    server.error = error
    with pytest.raises(EngineUnavailable, match=r"no answer for 0\.05 seconds"):
        quick.call(server)
    assert all(refused(quick, server) for _ in range(100))
    assert (server.asked, server.answered, quick.is_open) == (1, 0, True)
    server.speaks.set()
    wait_until(lambda: server.answered == 1)
    if error is None:
        wait_until(lambda: not quick.is_open)
    assert quick.is_open == bool(error)
    assert error is None or quick._backoff.retry_at == steady.seconds + Backoff.first, "a late error changes nothing"
    assert server.asked == 1


def test_an_answer_that_comes_just_before_it_counts_as_missing_leaves_it_closed(
    quick: Breaker, server: Server, steady: Steady, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Missing(EngineUnavailable):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)
            server.speaks.set()
            wait_until(lambda: quick._closed_at == steady.seconds)

    monkeypatch.setattr(module, "EngineUnavailable", Missing)
    server.speaks.clear()
    assert refused(quick, server)
    assert not quick.is_open


def test_a_server_that_fails_again_at_once_is_not_asked_more_often_for_it_and_is_told_of_once(
    breaker: Breaker, server: Server, steady: Steady, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "django_delayq.redis")
    pauses = []
    for _ in range(4):
        fail(breaker, server)
        pauses.append(breaker._backoff.retry_at - steady.seconds)
        steady.seconds = breaker._backoff.retry_at
        probe(breaker, server)
        breaker.call(server)
        steady.seconds += 1
    assert pauses == [0.5, 1, 2, 4]
    assert events(caplog) == ["redis_away"], "once, however often it is interrupted"
    steady.seconds += Backoff.longest
    breaker.call(server)
    breaker.call(server)
    fail(breaker, server)
    assert breaker._backoff.retry_at - steady.seconds == Backoff.first
    assert events(caplog) == ["redis_away", "redis_back", "redis_away"]


@pytest.mark.parametrize("error", [EngineUnavailable("away"), None], ids=["error", "answer"])
def test_what_began_before_it_opened_changes_nothing(breaker: Breaker, steady: Steady, error: Exception | None) -> None:
    """Neither a failure, which would lengthen the pause, nor a success, which began before the failure."""

    def work() -> None:
        fail(breaker, Server())
        if error:
            raise error

    refused(breaker, work)
    assert breaker.is_open
    assert breaker._backoff.retry_at == steady.seconds + Backoff.first


def test_an_error_that_nobody_thought_of_opens_it_and_ends_no_probing(
    breaker: Breaker, server: Server, steady: Steady, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupted(work: object) -> None:
        raise KeyboardInterrupt

    server.error = UnicodeError("label empty or too long")
    with pytest.raises(UnicodeError):
        breaker.call(server)
    assert breaker.is_open
    steady.seconds += 60
    probe(breaker, server, SystemExit(1))
    steady.seconds += 60
    with monkeypatch.context() as patched:  # as a signal handler may, such as that of a time limit of Celery
        patched.setattr(module, "call_in_thread", interrupted)
        with pytest.raises(KeyboardInterrupt):
            breaker.call(server)
    probe(breaker, server)
    assert not breaker.is_open
    assert events(caplog) == ["redis_away"]


def test_only_calls_that_may_have_to_connect_are_made_in_another_thread(
    breaker: Breaker, server: Server, steady: Steady
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
    steady.seconds += FRESH_SECONDS
    assert not made_here(), "a connection that was idle for long may be gone"
    assert made_here()


def test_where_no_thread_can_be_had_the_caller_does_it_himself(
    breaker: Breaker, server: Server, steady: Steady, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    assert breaker.call(server) == "answer"
    fail(breaker, Server())
    steady.seconds += 60
    assert refused(breaker, server)
    assert not breaker.is_open
    assert server.threads == {threading.current_thread().name}
