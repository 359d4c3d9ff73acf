"""Parse the URLs of `DELAYQ["REDIS"]`. Messages name the invalid part, and never show the URL."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from redis.connection import Connection, SSLConnection
from redis.connection import parse_url as parse_redis_url
from redis.exceptions import RedisError

from django_delayq.conf import ConfigError

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


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """One server."""

    connection_class: type[Any]
    options: dict[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class SentinelAddress:
    """A service, and the sentinels that know its master. `sentinel_options` are for connections to the sentinels."""

    sentinels: tuple[tuple[str, int], ...]
    service: str
    options: dict[str, Any] = field(repr=False)
    sentinel_options: dict[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class ClusterAddress:
    """A cluster, by some of its nodes."""

    nodes: tuple[tuple[str, int], ...]
    options: dict[str, Any] = field(repr=False)


Address: TypeAlias = ServerAddress | SentinelAddress | ClusterAddress


def parse_url(url: str) -> Address:
    """Return the address that `url` contains. Raises ConfigError if it does not match the grammar above.

    Options in the query (`?ssl_cert_reqs=none&socket_timeout=1`) are those of redis-py's connections. Sentinels
    with a login of their own have `sentinel_username` and `sentinel_password`.
    """
    scheme = url.partition("://")[0]
    if scheme in {"redis", "rediss", "unix"}:
        return _server(url, scheme)
    match = _SEVERAL.fullmatch(url)
    if match is None:
        raise _wrong("has an unknown scheme or form")
    login = "" if match["login"] is None else f"{match['login']}@"
    options = _options(f"{match['scheme']}://{login}placeholder/{match['query'] or ''}")
    del options["host"]
    tls = options.pop("connection_class", None) is not None
    if tls:
        options["ssl"] = True
    if match["kind"] == "sentinel":
        return _sentinel(match, options, SSLConnection if tls else Connection)
    if (match["path"] or "/") != "/" or "db" in options:
        raise _wrong("has a database number, but a cluster has only one database")
    return ClusterAddress(_hosts(match["hosts"], REDIS_PORT), options)


def _server(url: str, scheme: str) -> ServerAddress:
    path = url.partition("://")[2].partition("?")[0].partition("/")[2]
    if scheme != "unix" and not _DB.fullmatch(path):
        raise _wrong("has something after its host that is not a database number")
    options = _options(url)
    if scheme == "unix" and not options.get("path"):
        raise _wrong("has no path to a socket")
    connection_class = options.pop("connection_class", Connection)
    _check_options(connection_class, options)
    return ServerAddress(connection_class, options)


def _sentinel(match: re.Match[str], options: dict[str, Any], connection_class: type[Any]) -> SentinelAddress:
    service, _, db = (match["path"] or "").strip("/").partition("/")
    if not service:
        raise _wrong("has no service name after its sentinels")
    if db and not db.isdecimal():
        raise _wrong("has something after its service that is not a database number")
    if db:
        options["db"] = int(db)
    login = {name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    _check_options(connection_class, {name: value for name, value in options.items() if name != "ssl"})
    shared = {name: value for name, value in options.items() if name.startswith(("ssl", "socket_"))}
    logged_in = {name: value for name, value in login.items() if value is not None}
    return SentinelAddress(_hosts(match["hosts"], SENTINEL_PORT), service, options, {**shared, **logged_in})


def _check_options(connection_class: type[Any], options: dict[str, Any]) -> None:
    """Raise ConfigError for options that a connection does not accept. Opens no connection."""
    try:
        connection_class(**options)
    except (TypeError, ValueError, RedisError):
        raise _wrong("has an option after its ? that redis-py does not know, or an invalid value of one") from None


def _hosts(text: str, default_port: int) -> tuple[tuple[str, int], ...]:
    found = [_HOST.fullmatch(part.strip()) for part in text.split(",")]
    if not all(found):
        raise _wrong("has a host that is not written as host:port")
    return tuple((match["host"].strip("[]"), int(match["port"] or default_port)) for match in found if match)


def _options(url: str) -> dict[str, Any]:
    try:
        options: dict[str, Any] = parse_redis_url(url)  # type: ignore[no-untyped-call]
    except ValueError:
        # Not "from error": its message may contain a part of the URL, such as the password.
        what = "cannot be read (special characters in user or password must be quoted: @ is %40)"
        raise _wrong(what) from None
    options.pop("max_connections", None)  # an option of pools, not of connections
    return options


def _wrong(what: str) -> ConfigError:
    return ConfigError(f"The URL in DELAYQ['REDIS'] {what}. Known are: {GRAMMAR}.")
