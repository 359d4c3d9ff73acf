"""From `DELAYQ["REDIS"]` to a client that gives up in time, and the circuit breaker between producers and Redis."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio
from pytest_django import Settings

from django_delayq.backoff import Backoff
from django_delayq.conf import ConfigError
from django_delayq.engine.engine import Engine
from django_delayq.engine.records import Change
from django_delayq.exceptions import EngineError, EngineUnavailable
from django_delayq.redis_clients import breaker as module
from django_delayq.redis_clients import forget_engine, get_engine, get_worker_engine
from django_delayq.redis_clients.breaker import Breaker
from django_delayq.redis_clients.clients import Timeouts, make_client
from tests.support.waiting import Steady, wait_until
from tests.support.workers import worker_engine

pytestmark = pytest.mark.usefixtures("django_db_setup")  # which reads the prefix of the keys from the database
CHANGES = [Change("default", "line", 1, 4_000_000_000_000)]
MADE: list[redis.Redis] = []
Configure = Callable[..., None]


@pytest.fixture
def configure(settings: Settings) -> Iterator[Configure]:
    """Sets `DELAYQ["REDIS"]`, and the cache "shared" to the given one."""

    def configure(source: Any, cache: dict[str, Any] | None = None) -> None:
        if cache is not None:
            settings.CACHES = {**settings.CACHES, "shared": cache}
        settings.DELAYQ = {**settings.DELAYQ, "REDIS": source}

    yield configure
    forget_engine()


def producers() -> Engine:
    engine = get_engine("default")
    assert engine is not None
    return engine


def is_on(engine: Engine | None, client: redis.Redis) -> bool:
    """Whether what the engine writes is found on this server."""
    assert engine is not None
    engine.apply(CHANGES)
    entries = client.zcard(engine.queue("default", 0).keys.line("line"))
    engine.close()
    return entries == 1


def own_client() -> redis.Redis:
    client: redis.Redis = redis.Redis.from_url(os.environ["DELAYQ_TEST_REDIS_URL"], decode_responses=True)
    MADE.append(client)
    return client


def make_asyncio_client() -> Any:
    return redis.asyncio.Redis()


NO_CALLABLE = 7


def test_a_url_leads_producers_to_one_engine_and_each_worker_to_one_of_its_own(
    configure: Configure, redis_url: str, redis_client: redis.Redis
) -> None:
    configure(redis_url)
    first = producers()
    assert producers() is first
    assert get_worker_engine("default") is not get_worker_engine("default")
    assert is_on(first, redis_client) and is_on(get_worker_engine("default"), redis_client)
    configure(f"{redis_url}?client_name=x")
    assert producers() is not first, "settings have changed"


DJANGO, DJANGO_REDIS = "django.core.cache.backends.redis.RedisCache", "django_redis.cache.RedisCache"
CACHES: dict[str, dict[str, Any]] = {
    "django-redis": {
        "BACKEND": DJANGO_REDIS,
        "OPTIONS": {
            "CLIENT_CLASS": "django_redis.client.HerdClient",
            "CONNECTION_POOL_CLASS": "redis.BlockingConnectionPool",
            "CONNECTION_POOL_KWARGS": {"max_connections": 1, "timeout": 20, "decode_responses": True},
        },
    },
    "django": {"BACKEND": DJANGO, "OPTIONS": {"db": "0", "socket_timeout": 30}},
}


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_alias_leads_to_the_caches_server(
    configure: Configure, redis_url: str, redis_client: redis.Redis, name: str
) -> None:
    configure("shared", {**CACHES[name], "LOCATION": redis_url})
    client: Any = producers().client
    assert client.connection_pool.connection_kwargs["socket_timeout"] == module.LIMIT_SECONDS
    assert is_on(producers(), redis_client)


def test_of_a_cache_with_replicas_the_writable_server_is_taken_and_one_that_is_spread_is_refused(
    configure: Configure, redis_url: str
) -> None:
    configure("shared", {"BACKEND": DJANGO_REDIS, "LOCATION": [redis_url, "redis://replica/0"]})
    for _ in range(20):
        with worker_engine() as engine:
            engine.ping()
    sharded = {"CLIENT_CLASS": "django_redis.client.ShardClient"}
    configure("shared", {"BACKEND": DJANGO_REDIS, "LOCATION": [redis_url, redis_url], "OPTIONS": sharded})
    with pytest.raises(ConfigError, match="does not keep everything on one Redis server"):
        get_engine("default")


@pytest.mark.parametrize("source", [f"{__name__}.own_client", own_client], ids=["dotted path", "callable"])
def test_a_callable_gives_the_client_and_keeps_its_own_connections(
    configure: Configure, redis_client: redis.Redis, source: Any
) -> None:
    configure(source)
    engine = producers()
    assert is_on(engine, redis_client)
    made = MADE[-1].connection_pool
    assert isinstance(engine.client, redis.Redis)
    assert engine.client.connection_pool is not made
    assert made.connection_kwargs["decode_responses"] is True


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("make_asyncio_client", "must return a redis.Redis"),
        ("make_nothing", "cannot be imported"),
        ("NO_CALLABLE", "not callable"),
    ],
)
def test_a_callable_that_gives_no_client_is_refused(configure: Configure, name: str, words: str) -> None:
    configure(f"{__name__}.{name}")
    with pytest.raises(ConfigError, match=words), worker_engine() as engine:
        engine.ping()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_closed_engine_leaves_no_connection_open_and_a_forked_child_makes_one_of_its_own(
    configure: Configure, redis_url: str
) -> None:
    configure(redis_url)
    with redis.Redis.from_url(redis_url) as observer:
        with worker_engine() as made:
            number = made.client.client_id()
            assert observer.client_list(client_id=[str(number)])
        wait_until(lambda: not observer.client_list(client_id=[str(number)]), "the server has noticed")
    engine = producers()
    engine.ping()
    child = os.fork()
    if child == 0:
        fresh = get_engine("default")
        os._exit(0 if fresh is not None and fresh is not engine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    engine.ping()


TIMEOUTS = Timeouts(9.0)


WRONG = [
    "http://secret@host", "redis://user:secret/x@host:6379/0", "redis://:secret@host/first",
    "redis+sentinel://secret@a,b", "redis+sentinel://me:secret@a/service/first",
    "redis+sentinel://me:secret@a:x/service", "redis+cluster://me:secret@a/1", "redis+cluster://me:secret@", "unix://",
    "redis+magic://me:secret@a", "redis://host?socket_timeout=secret", "redis://host?no_such_option=secret",
    "rediss://host?ssl_cert_reqs=secret", "unix:///run/redis.sock?no_such_option=secret",
    "rediss+sentinel://a/shop?no_such_option=secret",
]  # fmt: skip


@pytest.mark.parametrize("url", WRONG)
def test_a_wrong_url_is_refused_without_showing_what_may_be_a_password(url: str) -> None:
    with pytest.raises(ConfigError, match="Known are: redis://") as refusal:
        make_client(url, TIMEOUTS)
    shown: BaseException | None = refusal.value
    while shown is not None:
        assert "secret" not in str(shown)
        shown = shown.__cause__ or (None if shown.__suppress_context__ else shown.__context__)


# The circuit breaker


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


def test_a_call_from_before_it_was_closed_does_not_open_it(breaker: Breaker, server: Server, steady: Steady) -> None:
    def work() -> None:
        fail(breaker, server)
        steady.seconds += 60
        probe(breaker, server)
        raise EngineUnavailable("late")

    assert refused(breaker, work)
    assert not breaker.is_open


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
