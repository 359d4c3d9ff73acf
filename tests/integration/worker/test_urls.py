"""`DELAYQ["REDIS"]` as a URL."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection

from django_delayq.conf import ConfigError
from django_delayq.redis_clients import clients
from django_delayq.redis_clients.clients import Timeouts, make_client

TIMEOUTS = Timeouts(9.0)


def options_of(client: Any) -> dict[str, Any]:
    """Return the options of a client's connections, without those that every client gets."""
    options, own = client.connection_pool.connection_kwargs, TIMEOUTS.options({})
    given = options.keys() - {"retry"} - {name for name in options if name.startswith(clients._INTERNALS)}
    return {name: options[name] for name in given if own.get(name) != options[name]}


@pytest.mark.parametrize(
    ("url", "kind", "options"),
    [
        ("redis://host", Connection, {"host": "host"}),
        ("redis://host:1/3", Connection, {"host": "host", "port": 1, "db": 3}),
        (
            "rediss://me:p%40ss@host/",
            SSLConnection,
            {"host": "host", "username": "me", "password": "p@ss"},
        ),
        ("redis://host?socket_timeout=1.5", Connection, {"host": "host", "socket_timeout": 1.5}),
        (
            "redis://host?max_connections=20&retry_on_timeout=true",
            Connection,
            {"host": "host", "retry_on_timeout": True},
        ),
        ("unix:///run/redis.sock?db=2", UnixDomainSocketConnection, {"path": "/run/redis.sock", "db": 2}),
    ],
)
def test_a_url_of_one_server_is_read_as_redis_py_reads_it(url: str, kind: type, options: dict[str, object]) -> None:
    client = make_client(url, TIMEOUTS)
    assert isinstance(client, redis.Redis)
    assert client.connection_pool.connection_class is kind
    assert options_of(client) == options


def test_sentinels_know_a_service_and_may_have_a_login_of_their_own() -> None:
    url = "redis+sentinel://me:p%2Fw@a:1,b,[::1]:3/shop/5?sentinel_password=s&socket_timeout=2"
    client: Any = make_client(url, TIMEOUTS)
    assert client.connection_pool.service_name == "shop"
    assert options_of(client).items() >= {"username": "me", "password": "p/w", "db": 5, "socket_timeout": 2.0}.items()
    sentinels = client.connection_pool.sentinel_manager.sentinels
    asked = [sentinel.connection_pool.connection_kwargs for sentinel in sentinels]
    assert [(each["host"], each["port"]) for each in asked] == [("a", 1), ("b", 26379), ("::1", 3)]
    for each in asked:
        assert (each["username"], each["password"], each["socket_timeout"]) == (None, "s", 2.0 / 3)


def test_sentinels_behind_tls_are_asked_behind_tls_too() -> None:
    client: Any = make_client("rediss+sentinel://a/shop?ssl_cert_reqs=none", TIMEOUTS)
    [sentinel] = client.connection_pool.sentinel_manager.sentinels
    assert issubclass(client.connection_pool.connection_class, SSLConnection)
    assert sentinel.connection_pool.connection_class is SSLConnection
    for pool in (client.connection_pool, sentinel.connection_pool):
        assert pool.connection_kwargs["ssl_cert_reqs"] == "none"


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


@pytest.mark.parametrize(
    "url",
    [
        "http://secret@host",
        "redis://user:secret/x@host:6379/0",
        "redis://:secret@host/first",
        "redis+sentinel://secret@a,b",
        "redis+sentinel://me:secret@a/service/first",
        "redis+sentinel://me:secret@a:x/service",
        "redis+cluster://me:secret@a/1",
        "redis+cluster://me:secret@",
        "unix://",
        "redis+magic://me:secret@a",
        "redis://host?socket_timeout=secret",
        "redis://host?no_such_option=secret",
        "rediss://host?ssl_cert_reqs=secret",
        "unix:///run/redis.sock?no_such_option=secret",
        "rediss+sentinel://a/shop?no_such_option=secret",
    ],
)
def test_a_wrong_url_is_refused_without_showing_what_may_be_a_password(url: str) -> None:
    with pytest.raises(ConfigError, match="Known are: redis://") as refusal:
        make_client(url, TIMEOUTS)
    shown: BaseException | None = refusal.value
    while shown is not None:
        assert "secret" not in str(shown)
        shown = shown.__cause__ or (None if shown.__suppress_context__ else shown.__context__)
