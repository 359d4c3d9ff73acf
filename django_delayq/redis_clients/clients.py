"""`DELAYQ["REDIS"]` -> redis-py client. Loads redis-py: imported at the first use of Redis.

| setting | client |
| --- | --- |
| a `CACHES` alias, served by django-redis or Django's own Redis backend | of the alias's writable server |
| `redis://`, `rediss://`, `unix://` | of that server, as redis-py reads such URLs |
| `redis[s]+sentinel://[user:pw@]h1:p,h2:p/service[/db]` | of the current master of the service |
| `redis[s]+cluster://[user:pw@]h1:p,h2:p` | of the cluster that these nodes belong to |
| a callable, or a dotted path to one | what it returns: a `redis.Redis` or a `redis.cluster.RedisCluster` |

Every client gets connections of its own, with timeouts that suit its caller: a cache may wait for seconds, a web page
must not. (A cluster client that a callable returns is used as it is.) No message shows an address, because it may
contain a password.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import redis
from django.core.cache import caches
from django.utils.functional import SimpleLazyObject
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import Connection, SSLConnection
from redis.connection import parse_url as parse_redis_url
from redis.exceptions import RedisError
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from django_delayq.conf import ConfigError, callable_of
from django_delayq.engine.scripts import Client, translated
from django_delayq.exceptions import EngineError
from django_delayq.redis_clients.breaker import LIMIT_SECONDS, call_in_thread

_INTERNALS = ("connection_pool", "event_dispatcher", "himport_", "maint_notifications_", "orig_", "oss_cluster_")
"""Options that a pool of redis-py adds to its connections, and that a copy of it would refuse or share."""

MAX_CONNECTIONS = 10_000
"""No limit in practice. The default of redis-py differs between versions, and a thread beyond it fails."""

GRAMMAR = (
    "redis://, rediss:// or unix:// as redis-py reads them, redis[s]+sentinel://[user:pw@]h1:p,h2:p/service[/db], "
    "or redis[s]+cluster://[user:pw@]h1:p,h2:p"
)
SENTINEL_PORT, REDIS_PORT = 26379, 6379

_SEVERAL = re.compile(
    r"(?P<scheme>rediss?)\+(?P<kind>sentinel|cluster)://(?:(?P<login>[^/?#]*)@)?(?P<hosts>[^/?#@]+)"
    r"(?P<path>/[^?#]*)?(?P<query>\?[^#]*)?"
)
_HOST = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[^:\[\]]+)(?::(?P<port>\d{1,5}))?")
_DB = re.compile(r"/?(?:\d+/?)?")


class Password(str):
    """A password that is sent, but not shown.

    redis-py 6 and 7 show the options of all connections in `repr`, and in the error that no sentinel answers.
    """

    def __format__(self, spec: str = "") -> str:
        return "..."

    __repr__ = __str__ = __format__


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long the connections of a client wait, in seconds.

    `is_limit`: an address may ask for less, but not for more. Otherwise the timeouts of an address are used.
    """

    seconds: float
    health_check_interval: int = 0
    is_limit: bool = False

    def options(self, wanted: dict[str, Any], share: int = 1) -> dict[str, Any]:
        """Return the connection options `wanted` with these timeouts and without retries: our callers back off.

        `share`: the number of servers that are asked one after the other, and share the timeouts.
        """
        timeouts = {}
        for name in ("socket_connect_timeout", "socket_timeout"):
            seconds = wanted.get(name) or self.seconds
            timeouts[name] = (min(seconds, self.seconds) if self.is_limit else seconds) / share
        return {
            **wanted,
            **{name: Password(each) for name, each in wanted.items() if "password" in name and isinstance(each, str)},
            **timeouts,
            "health_check_interval": self.health_check_interval,
            "retry": Retry(NoBackoff(), 0),
            "decode_responses": False,
        }


PRODUCER: Final = Timeouts(LIMIT_SECONDS, is_limit=True)
"""A web request must not wait for Redis."""
WORKER: Final = Timeouts(1.0, health_check_interval=30)
"""A worker that waits for a silent Redis fires nothing meanwhile, and may be late by two seconds at most."""


def evicting_policy(client: Client) -> str | None:
    """Return the `maxmemory-policy` of a server of `client` that may evict its keys; None: no server does.

    The policies for volatile keys do not, as entries do not expire. Also return None if Redis refuses, or does not
    answer within a quarter of a second.
    """
    try:
        policies = call_in_thread(partial(_maxmemory_policies, client)).result(LIMIT_SECONDS)
    except (EngineError, TimeoutError):
        return None
    return next((policy for policy in policies if policy.startswith("allkeys-")), None)


def _maxmemory_policies(client: Any) -> list[str]:
    options = {"target_nodes": RedisCluster.PRIMARIES} if isinstance(client, RedisCluster) else {}
    with translated(client):
        answer = client.info("memory", **options)  # not CONFIG, which hosted servers refuse
    # The answer of one node is bare, those of several are by node.
    nodes = [answer] if "maxmemory_policy" in answer else [each for each in answer.values() if isinstance(each, dict)]
    return [str(node.get("maxmemory_policy", "")) for node in nodes]


def make_client(source: Any, timeouts: Timeouts) -> Client:
    """Return the client of a setting. Opens no connection. Raises ConfigError if the setting is invalid."""
    if isinstance(source, str) and "://" in source:
        return _client_of_url(source, timeouts)
    if isinstance(source, str) and source in caches.settings:
        return _copy(_client_of_alias(source), timeouts)
    factory = callable_of("REDIS", source)
    return _lazy(lambda: _from_callable(factory, timeouts))


def check_source(source: Any) -> None:
    """Check a setting without calling a server or a function of the project. Raises ConfigError if it is invalid."""
    if isinstance(source, str) and source not in caches.settings:
        make_client(source, WORKER)


def _client_of_alias(alias: str) -> Any:
    """Return the alias's client for writing. The replicas of a cache would answer too, but with old entries."""
    cache: Any = caches[alias]
    try:
        if hasattr(cache, "client"):  # django-redis
            return cache.client.get_client(write=True)
        return cache._cache.get_client(write=True)  # Django's own backend has no public way to its client
    except (AttributeError, NotImplementedError) as error:
        raise ConfigError(
            f"DELAYQ['REDIS'] names the cache {alias!r}, which does not keep everything on one Redis server "
            f"({type(cache).__name__}). Name another alias, or give a URL."
        ) from error


def _from_callable(factory: Callable[[], Any], timeouts: Timeouts) -> Client:
    client = factory()
    if not isinstance(client, redis.Redis | RedisCluster):
        raise ConfigError(
            f"The callable in DELAYQ['REDIS'] must return a redis.Redis or a redis.cluster.RedisCluster, "
            f"not a {type(client).__module__}.{type(client).__qualname__}."
        )
    return client if isinstance(client, RedisCluster) else _copy(client, timeouts)


def _copy(client: Any, timeouts: Timeouts, share: int = 1) -> redis.Redis:
    """Return a client of the same server with connections of its own, and these timeouts."""
    pool = client.connection_pool
    wanted = {name: value for name, value in pool.connection_kwargs.items() if not name.startswith(_INTERNALS)}
    options: dict[str, Any] = {
        **timeouts.options(wanted, share),
        "connection_class": pool.connection_class,
        "max_connections": MAX_CONNECTIONS,
    }
    if not isinstance(pool, SentinelConnectionPool):
        return redis.Redis.from_pool(redis.ConnectionPool(**options))
    manager = copy(pool.sentinel_manager)
    manager.sentinels = [_copy(one, timeouts, len(manager.sentinels)) for one in manager.sentinels]
    options["check_connection"] = pool.check_connection
    sentinel_pool = SentinelConnectionPool(pool.service_name, manager, **options)  # type: ignore[no-untyped-call]
    return redis.Redis.from_pool(sentinel_pool)


def _lazy(make: Callable[[], Client]) -> Client:
    """Return a client that is made at its first use: to make one of a cluster calls the cluster, which may be down.

    Then that use fails like any other one, and the next use tries again.
    """
    return cast("Client", SimpleLazyObject(make))


def _client_of_url(url: str, timeouts: Timeouts) -> Client:
    """Return the client of `url`. Raises ConfigError if it does not match the grammar above.

    Options in the query (`?ssl_cert_reqs=none&socket_timeout=1`) are those of redis-py's connections. Sentinels
    with a login of their own have `sentinel_username` and `sentinel_password`.
    """
    scheme = url.partition("://")[0]
    if scheme in {"redis", "rediss", "unix"}:
        return _server_client(url, scheme, timeouts)
    match = _SEVERAL.fullmatch(url)
    if match is None:
        raise _wrong("has an unknown scheme or form")
    login = "" if match["login"] is None else f"{match['login']}@"
    options = _options(f"{match['scheme']}://{login}placeholder/{match['query'] or ''}")
    del options["host"]
    if options.pop("connection_class", None) is not None:
        options["ssl"] = True
    if match["kind"] == "sentinel":
        return _sentinel_client(match, options, timeouts)
    if (match["path"] or "/") != "/" or "db" in options:
        raise _wrong("has a database number, but a cluster has only one database")
    nodes = _hosts(match["hosts"], REDIS_PORT)
    return _lazy(lambda: _cluster_client(nodes, options, timeouts))


def _server_client(url: str, scheme: str, timeouts: Timeouts) -> redis.Redis:
    path = url.partition("://")[2].partition("?")[0].partition("/")[2]
    if scheme != "unix" and not _DB.fullmatch(path):
        raise _wrong("has something after its host that is not a database number")
    options = _options(url)
    if scheme == "unix" and not options.get("path"):
        raise _wrong("has no path to a socket")
    connection_class = options.pop("connection_class", Connection)
    _check_options(connection_class, options)
    pool = redis.ConnectionPool(connection_class, MAX_CONNECTIONS, **timeouts.options(options))
    return redis.Redis.from_pool(pool)


def _sentinel_client(match: re.Match[str], options: dict[str, Any], timeouts: Timeouts) -> redis.Redis:
    service, _, db = (match["path"] or "").strip("/").partition("/")
    if not service:
        raise _wrong("has no service name after its sentinels")
    if db and not db.isdecimal():
        raise _wrong("has something after its service that is not a database number")
    if db:
        options["db"] = int(db)
    sentinel_options = {name: value for name, value in options.items() if name.startswith(("ssl", "socket_"))}
    for name in ("username", "password"):
        if (value := options.pop(f"sentinel_{name}", None)) is not None:
            sentinel_options[name] = value
    connection_class = SSLConnection if "ssl" in options else Connection
    _check_options(connection_class, {name: value for name, value in options.items() if name != "ssl"})
    sentinels = _hosts(match["hosts"], SENTINEL_PORT)
    sentinel_options = timeouts.options(sentinel_options, share=len(sentinels))
    manager = Sentinel(sentinels, sentinel_kwargs=sentinel_options)  # type: ignore[no-untyped-call]
    options = {**timeouts.options(options), "max_connections": MAX_CONNECTIONS}
    pool = SentinelConnectionPool(service, manager, **options)  # type: ignore[no-untyped-call]
    return redis.Redis.from_pool(pool)


def _cluster_client(hosts: Sequence[tuple[str, int]], options: dict[str, Any], timeouts: Timeouts) -> RedisCluster:
    options = timeouts.options(options, share=len(hosts))
    if redis.VERSION < (6,):  # later versions take it from retry, and warn about this
        options["cluster_error_retry_attempts"] = 0
    nodes = [ClusterNode(host, port) for host, port in hosts]  # type: ignore[no-untyped-call]
    return RedisCluster(startup_nodes=nodes, **options)


def _check_options(connection_class: type[Any], options: dict[str, Any]) -> None:
    """Raise ConfigError for options that a connection does not accept. Opens no connection."""
    try:
        connection_class(**options)
    except (TypeError, ValueError, RedisError):
        raise _wrong("has an option after its ? that redis-py does not know, or an invalid value of one") from None


def _hosts(text: str, default_port: int) -> list[tuple[str, int]]:
    found = [_HOST.fullmatch(part.strip()) for part in text.split(",")]
    if not all(found):
        raise _wrong("has a host that is not written as host:port")
    return [(match["host"].strip("[]"), int(match["port"] or default_port)) for match in found if match]


def _options(url: str) -> dict[str, Any]:
    try:
        options: dict[str, Any] = parse_redis_url(url)  # type: ignore[no-untyped-call]
    except ValueError:
        # Not "from error": its message may contain a part of the URL, such as the password.
        raise _wrong("cannot be read (special characters in user or password must be quoted: @ is %40)") from None
    options.pop("max_connections", None)  # an option of pools, not of connections
    return options


def _wrong(what: str) -> ConfigError:
    return ConfigError(f"The URL in DELAYQ['REDIS'] {what}. Known are: {GRAMMAR}.")
