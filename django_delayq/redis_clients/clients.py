"""What `DELAYQ["REDIS"]` may be, and the redis-py client that it means.

| setting | client |
| --- | --- |
| a `CACHES` alias, served by django-redis or Django's own Redis backend | of the alias's writable server |
| `redis://`, `rediss://`, `unix://` | of that server, as redis-py reads such URLs |
| `redis[s]+sentinel://[user:pw@]h1:p,h2:p/service[/db]` | of the service's master, wherever it is just now |
| `redis[s]+cluster://[user:pw@]h1:p,h2:p` | of the cluster that these nodes belong to |
| a callable, or a dotted path to one | what it returns: a `redis.Redis` or a `redis.cluster.RedisCluster` |

Whatever it is, the client gets connections of its own, with timeouts that suit who waits for them: a cache that may
wait for seconds must not make a page wait. (A cluster client that a callable returns is used as it is.)

No message ever shows an address: it may hold a password.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, cast

import redis
from django.core.cache import caches
from django.utils.functional import SimpleLazyObject
from django.utils.module_loading import import_string
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from django_delayq.conf import ConfigError
from django_delayq.engine.faults import Client
from django_delayq.redis_clients.urls import ClusterAddress, SentinelAddress, ServerAddress, parse_url

_INTERNALS = ("connection_pool", "event_dispatcher", "himport_", "maint_notifications_", "orig_", "oss_cluster_")
"""What a pool of redis-py adds to its connections' options and would refuse, or share with its copy."""

MAX_CONNECTIONS = 10_000
"""No limit in practice: redis-py's own, which differs between versions, would make a thread fail instead of wait."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the connections of a client wait, in seconds.

    `is_limit`: an address may ask for less, but not for more; otherwise what it asks for holds.
    """

    connect: float
    read: float
    health_check_interval: int = 0
    is_limit: bool = False

    def options(self, wanted: dict[str, Any], share: int = 1) -> dict[str, Any]:
        """The connection options `wanted`, with our timeouts, and one try only: who calls us knows when to try again.

        `share`: that many servers may be asked one after the other, and together must not take longer.
        """
        return {
            **wanted,
            "socket_connect_timeout": self._seconds(wanted.get("socket_connect_timeout"), self.connect) / share,
            "socket_timeout": self._seconds(wanted.get("socket_timeout"), self.read) / share,
            "health_check_interval": self.health_check_interval,
            "retry": Retry(NoBackoff(), 0),
            "decode_responses": False,
        }

    def _seconds(self, wanted: float | None, ours: float) -> float:
        if not wanted:
            return ours
        return min(wanted, ours) if self.is_limit else wanted


def make_client(source: Any, patience: Patience) -> Client:
    """The client that the setting means. Opens no connection.

    Raises:
        ConfigError: the setting means none.
    """
    if callable(source):
        return _lazy(lambda: _called(source, patience))
    if "://" not in source and source in caches.settings:
        return _copy(_client_of_alias(source), patience)
    if "://" not in source:
        return _lazy(lambda: _called(_imported(source), patience))
    address = parse_url(source)
    if isinstance(address, SentinelAddress):
        return _sentinel_client(address, patience)
    if isinstance(address, ClusterAddress):
        return _lazy(lambda: _cluster_client(address, patience))
    return _server_client(address, patience)


def check_source(source: Any) -> None:
    """The setting means a client, as far as can be seen without asking a server or calling a function of the project.

    Raises:
        ConfigError: the setting means none.
    """
    if isinstance(source, str) and "://" in source:
        parse_url(source)
    elif isinstance(source, str) and source not in caches.settings:
        _imported(source)


def _server_client(address: ServerAddress, patience: Patience) -> redis.Redis:
    pool = redis.ConnectionPool(
        connection_class=address.connection_class, max_connections=MAX_CONNECTIONS, **patience.options(address.options)
    )
    return redis.Redis(connection_pool=pool)


def _sentinel_client(address: SentinelAddress, patience: Patience) -> redis.Redis:
    share = len(address.sentinels)
    manager = Sentinel(  # type: ignore[no-untyped-call]
        address.sentinels, sentinel_kwargs=patience.options(address.sentinel_options, share)
    )
    options = patience.options(address.options)
    options["max_connections"] = MAX_CONNECTIONS
    pool = SentinelConnectionPool(address.service, manager, **options)  # type: ignore[no-untyped-call]
    return redis.Redis(connection_pool=pool)


def _cluster_client(address: ClusterAddress, patience: Patience) -> RedisCluster:
    options = patience.options(address.options, share=len(address.nodes))
    if redis.VERSION < (6,):  # later versions take it from retry, and warn about this
        options["cluster_error_retry_attempts"] = 0
    nodes = [ClusterNode(host, port) for host, port in address.nodes]  # type: ignore[no-untyped-call]
    return RedisCluster(startup_nodes=nodes, **options)


def _client_of_alias(alias: str) -> Any:
    """The alias's client for writing. A cache's replicas would answer too, but with yesterday's entries."""
    cache: Any = caches[alias]
    try:
        if hasattr(cache, "client"):  # django-redis
            return cache.client.get_client(write=True)
        return cache._cache.get_client(write=True)  # Django's own: no public way leads to its client
    except (AttributeError, NotImplementedError) as error:
        raise ConfigError(
            f"DELAYQ['REDIS'] names the cache {alias!r}, which does not keep everything on one Redis server "
            f"({type(cache).__name__}). Name another alias, or give a URL."
        ) from error


def _called(factory: Callable[[], Any], patience: Patience) -> Client:
    client = factory()
    if not isinstance(client, redis.Redis | RedisCluster):
        raise ConfigError(
            f"The callable in DELAYQ['REDIS'] must return a redis.Redis or a redis.cluster.RedisCluster, "
            f"not a {type(client).__module__}.{type(client).__qualname__}."
        )
    return client if isinstance(client, RedisCluster) else _copy(client, patience)


def _imported(path: str) -> Callable[[], Any]:
    try:
        found = import_string(path)
    except ImportError as error:
        raise ConfigError(f"DELAYQ['REDIS'] names {path!r}, which cannot be imported: {error}") from error
    if not callable(found):
        raise ConfigError(f"DELAYQ['REDIS'] names {path!r}, which is not callable.")
    return cast("Callable[[], Any]", found)


def _copy(client: Any, patience: Patience, share: int = 1) -> redis.Redis:
    """A client of the same server with connections of its own, and our timeouts."""
    pool = client.connection_pool
    wanted = {name: value for name, value in pool.connection_kwargs.items() if not name.startswith(_INTERNALS)}
    options: dict[str, Any] = {
        **patience.options(wanted, share),
        "connection_class": pool.connection_class,
        "max_connections": MAX_CONNECTIONS,
    }
    if not isinstance(pool, SentinelConnectionPool):
        return redis.Redis(connection_pool=redis.ConnectionPool(**options))
    manager = copy(pool.sentinel_manager)
    manager.sentinels = [_copy(one, patience, len(manager.sentinels)) for one in manager.sentinels]
    options["check_connection"] = pool.check_connection
    sentinel_pool = SentinelConnectionPool(pool.service_name, manager, **options)  # type: ignore[no-untyped-call]
    return redis.Redis(connection_pool=sentinel_pool)


def _lazy(make: Callable[[], Client]) -> Client:
    """A client that is made when it is first used: making one of a cluster asks the cluster, which may be down.

    Then the use fails like any other use of a server that is down, and the next one makes another try.
    """
    return cast("Client", SimpleLazyObject(make))
