"""`DELAYQ["REDIS"]` as a URL."""

from __future__ import annotations

import pytest
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection

from django_delayq.conf import ConfigError
from django_delayq.redis_clients.clients import ClusterAddress, SentinelAddress, ServerAddress, parse_url


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
    assert parse_url(url) == ServerAddress(kind, options)


def test_sentinels_know_a_service_and_may_have_a_login_of_their_own() -> None:
    assert parse_url("redis+sentinel://me:p%2Fw@a:1,b,[::1]:3/shop/5?sentinel_password=s&socket_timeout=2") == (
        SentinelAddress(
            sentinels=(("a", 1), ("b", 26379), ("::1", 3)),
            service="shop",
            options={"username": "me", "password": "p/w", "db": 5, "socket_timeout": 2.0},
            sentinel_options={"password": "s", "socket_timeout": 2.0},
        )
    )


def test_sentinels_behind_tls_are_asked_behind_tls_too() -> None:
    address = parse_url("rediss+sentinel://a/shop?ssl_cert_reqs=none")
    tls = {"ssl": True, "ssl_cert_reqs": "none"}
    assert address == SentinelAddress((("a", 26379),), "shop", tls, tls)


def test_a_cluster_is_known_by_some_of_its_nodes() -> None:
    assert parse_url("redis+cluster://a:7000,b:7001") == ClusterAddress((("a", 7000), ("b", 7001)), {})
    assert parse_url("rediss+cluster://:pw@a") == ClusterAddress((("a", 6379),), {"password": "pw", "ssl": True})


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
        parse_url(url)
    shown: BaseException | None = refusal.value
    while shown is not None:
        assert "secret" not in str(shown)
        shown = shown.__cause__ or (None if shown.__suppress_context__ else shown.__context__)


def test_an_address_does_not_print_its_password() -> None:
    for url in ("redis://:secret@h", "redis+sentinel://:secret@h/s", "redis+cluster://:secret@h"):
        assert "secret" not in repr(parse_url(url))
