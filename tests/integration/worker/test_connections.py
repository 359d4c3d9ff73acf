"""From the setting to a client that reaches the right server, and gives up in time."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio
from pytest_django import Settings
from redis.sentinel import Sentinel

from django_delayq.conf import ConfigError
from django_delayq.engine.engine import Engine
from django_delayq.engine.records import Change
from django_delayq.exceptions import EngineUnavailable
from django_delayq.redis_clients import forget_engine, get_engine, get_worker_engine
from django_delayq.redis_clients.breaker import GuardedCaller
from tests.engine.redis_process import RedisProcess
from tests.engine.topologies import SERVICE, SentinelProcess, clustered
from tests.support.waiting import wait_until
from tests.support.workers import worker_engine

NEVER = 4_000_000_000_000
MADE: list[redis.Redis] = []


@pytest.fixture
def configure(settings: Settings) -> Iterator[Callable[..., None]]:
    """Sets `DELAYQ["REDIS"]`, and the cache "shared" to the given one."""

    def configure(source: Any, cache: dict[str, Any] | None = None) -> None:
        if cache is not None:
            settings.CACHES = {**settings.CACHES, "shared": cache}
        settings.DELAYQ = {**settings.DELAYQ, "REDIS": source}

    yield configure
    forget_engine()


@pytest.fixture
def black_hole() -> Iterator[socket.socket]:
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def holds(engine: Engine | None, client: redis.Redis) -> bool:
    """Whether what the engine writes is found on this server."""
    assert engine is not None
    engine.queue("default", 0).ensure("line", [(7, NEVER)])
    entries = client.zcard(engine.queue("default", 0).keys.line("line"))
    engine.close()
    return entries == 1


def make_client() -> redis.Redis:
    client: redis.Redis = redis.Redis.from_url(os.environ["DELAYQ_TEST_REDIS_URL"], decode_responses=True)
    MADE.append(client)
    return client


def make_asyncio_client() -> Any:
    return redis.asyncio.Redis()


NO_CALLABLE = 7


@pytest.mark.parametrize("get", [get_engine, get_worker_engine])
def test_a_url_leads_to_its_server(
    configure: Callable[..., None], redis_url: str, redis_client: redis.Redis, get: Callable[[str], Engine | None]
) -> None:
    configure(redis_url)
    assert holds(get("default"), redis_client)


@pytest.mark.parametrize(
    "cache",
    [
        {"BACKEND": "django_redis.cache.RedisCache"},
        {
            "BACKEND": "django_redis.cache.RedisCache",
            "OPTIONS": {
                "CLIENT_CLASS": "django_redis.client.HerdClient",
                "CONNECTION_POOL_CLASS": "redis.BlockingConnectionPool",
                "CONNECTION_POOL_KWARGS": {"max_connections": 1, "timeout": 20, "decode_responses": True},
            },
        },
        {"BACKEND": "django.core.cache.backends.redis.RedisCache"},
        {"BACKEND": "django.core.cache.backends.redis.RedisCache", "OPTIONS": {"db": "0", "socket_timeout": 30}},
    ],
    ids=["django-redis", "django-redis with options", "django", "django with options"],
)
def test_a_cache_alias_leads_to_the_caches_server(
    configure: Callable[..., None], redis_url: str, redis_client: redis.Redis, cache: dict[str, Any]
) -> None:
    configure("shared", {**cache, "LOCATION": redis_url})
    engine = get_engine("default")
    assert engine is not None
    assert isinstance(engine.client, redis.Redis)
    assert engine.client.connection_pool.connection_kwargs["socket_timeout"] == 0.25
    assert holds(engine, redis_client)


def test_of_a_cache_with_replicas_the_writable_server_is_taken(configure: Callable[..., None], redis_url: str) -> None:
    configure("shared", {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": [redis_url, "redis://replica/0"]})
    for _ in range(20):
        with worker_engine() as engine:
            engine.ping()


def test_a_cache_spread_over_several_servers_is_refused(configure: Callable[..., None], redis_url: str) -> None:
    sharded = {"CLIENT_CLASS": "django_redis.client.ShardClient"}
    cache = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": [redis_url, redis_url], "OPTIONS": sharded}
    configure("shared", cache)
    with pytest.raises(ConfigError, match="does not keep everything on one Redis server"):
        get_engine("default")


@pytest.mark.parametrize("source", [f"{__name__}.make_client", make_client], ids=["dotted path", "callable"])
def test_a_callable_gives_the_client_and_keeps_its_own_connections(
    configure: Callable[..., None], redis_client: redis.Redis, source: Any
) -> None:
    configure(source)
    engine = get_engine("default")
    assert holds(engine, redis_client)
    made = MADE[-1].connection_pool
    assert engine is not None
    assert isinstance(engine.client, redis.Redis)
    assert engine.client.connection_pool is not made
    assert made.connection_kwargs["decode_responses"] is True


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (f"{__name__}.make_asyncio_client", "must return a redis.Redis"),
        (f"{__name__}.make_nothing", "cannot be imported"),
        (f"{__name__}.NO_CALLABLE", "not callable"),
    ],
)
def test_a_callable_that_gives_no_client_is_refused(configure: Callable[..., None], source: str, words: str) -> None:
    configure(source)
    with pytest.raises(ConfigError, match=words):
        holds(get_worker_engine("default"), redis.Redis())


def test_producers_of_a_process_share_one_engine_until_settings_change(
    configure: Callable[..., None], redis_url: str
) -> None:
    configure(redis_url)
    first = get_engine("default")
    assert get_engine("default") is first
    configure(f"{redis_url}?client_name=x")
    assert get_engine("default") is not first


def test_every_worker_has_an_engine_of_its_own(configure: Callable[..., None], redis_url: str) -> None:
    configure(redis_url)
    assert get_worker_engine("default") is not get_worker_engine("default")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_closed_engine_leaves_no_connection_open(configure: Callable[..., None], redis_url: str) -> None:
    configure(redis_url)
    with redis.Redis.from_url(redis_url) as observer:
        with worker_engine() as engine:
            number = engine.client.client_id()
            assert observer.client_list(client_id=[str(number)])
        wait_until(lambda: not observer.client_list(client_id=[str(number)]), "the server has noticed")


def test_a_forked_child_makes_an_engine_of_its_own(configure: Callable[..., None], redis_url: str) -> None:
    configure(redis_url)
    engine = get_engine("default")
    assert engine is not None
    engine.ping()
    child = os.fork()
    if child == 0:
        fresh = get_engine("default")
        os._exit(0 if fresh is not None and fresh is not engine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    engine.ping()


def test_a_view_waits_once_for_a_server_that_never_answers_and_then_not_at_all(
    configure: Callable[..., None], black_hole: socket.socket
) -> None:
    configure(f"redis://127.0.0.1:{black_hole.getsockname()[1]}/0?socket_timeout=60")
    engine = get_engine("default")
    assert engine is not None
    accepted: list[socket.socket] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted.append(black_hole.accept()[0])

    counting = threading.Thread(target=accept, daemon=True)
    counting.start()
    for _ in range(10):
        with pytest.raises(EngineUnavailable):
            engine.apply([Change("default", "line", 1, NEVER)])
    assert isinstance(engine.caller, GuardedCaller)
    assert engine.caller.breaker.is_open
    black_hole.shutdown(socket.SHUT_RDWR)
    counting.join()
    for connection in accepted:
        connection.close()
    assert len(accepted) == 1


@pytest.mark.parametrize("way", ["url", "callable"])
def test_sentinels_lead_to_the_present_master(configure: Callable[..., None], way: str) -> None:
    with RedisProcess() as server, SentinelProcess(server, 1) as sentinel, server.client(db=1) as client:
        made = lambda: Sentinel([("127.0.0.1", sentinel.port)]).master_for(SERVICE, db=1)  # noqa: E731
        configure(f"redis+sentinel://127.0.0.1:{sentinel.port}/{SERVICE}/1" if way == "url" else made)
        for get in (get_engine, get_worker_engine):
            assert holds(get("default"), client)
            assert client.flushdb()


def test_a_cluster_is_reached_and_one_that_is_down_is_unavailable_and_tried_again(
    configure: Callable[..., None],
) -> None:
    with clustered(replicas=False) as found:
        configure(found.url)
        for node in found.masters:
            node.pause()
        producer = get_engine("default")
        assert producer is not None
        with worker_engine() as engine:
            with pytest.raises(EngineUnavailable):
                producer.apply([Change("default", "line", 1, NEVER)])
            for node in found.masters:
                node.resume()
            wait_until(lambda: is_applied(engine), "its nodes have found each other again")
            assert engine.queue("default", 0).stats().total == 1


def is_applied(engine: Engine) -> bool:
    with contextlib.suppress(EngineUnavailable):
        engine.apply([Change("default", "line", 1, NEVER)])
        return True
    return False
