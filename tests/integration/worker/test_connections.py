"""From `DELAYQ["REDIS"]`, a URL or another setting, to a client that reaches its server, and gives up in time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio
from pytest_django import Settings

from django_delayq.conf import ConfigError
from django_delayq.engine.engine import Engine
from django_delayq.engine.records import Change
from django_delayq.redis_clients import clients, forget_engine, get_engine, get_worker_engine
from django_delayq.redis_clients.clients import Timeouts, make_client
from tests.support.waiting import wait_until
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
    assert client.connection_pool.connection_kwargs["socket_timeout"] == 0.25
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


def test_sentinels_know_a_service_and_may_have_a_login_of_their_own() -> None:
    url = "redis+sentinel://me:p%2Fw@a:1,b,[::1]:3/shop/5?sentinel_password=s&socket_timeout=2"
    client: Any = make_client(url, TIMEOUTS)
    assert client.connection_pool.service_name == "shop"
    options = client.connection_pool.connection_kwargs
    assert options.items() >= {"username": "me", "password": "p/w", "db": 5, "socket_timeout": 2.0}.items()
    sentinels = client.connection_pool.sentinel_manager.sentinels
    asked = [sentinel.connection_pool.connection_kwargs for sentinel in sentinels]
    assert [(each["host"], each["port"]) for each in asked] == [("a", 1), ("b", 26379), ("::1", 3)]
    for each in asked:
        assert (each["username"], each["password"], each["socket_timeout"]) == (None, "s", 2.0 / 3)


@pytest.mark.parametrize(
    ("url", "nodes", "options"),
    [
        ("redis+cluster://a:7000,b:7001", [("a", 7000), ("b", 7001)], {}),
        ("rediss+cluster://:pw@a", [("a", 6379)], {"password": "pw", "ssl": True}),
    ],
)
def test_a_cluster_is_known_by_some_of_its_nodes(
    monkeypatch: pytest.MonkeyPatch, url: str, nodes: list[tuple[str, int]], options: dict[str, object]
) -> None:
    made: list[tuple[object, ...]] = []
    monkeypatch.setattr(clients, "_cluster_client", lambda *given: made.append(given))
    client: Any = make_client(url, TIMEOUTS)
    assert made == [], "only its first use calls the cluster"
    client._setup()
    assert made == [(nodes, options, TIMEOUTS)]


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
