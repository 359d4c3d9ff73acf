"""Translate errors of Redis into `EngineUnavailable` (retry later), `EngineFull` and `EngineError`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

from redis import Redis
from redis.cluster import RedisCluster
from redis.exceptions import (
    BusyLoadingError,
    ClusterError,
    ConnectionError,
    MovedError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    TimeoutError,
    TryAgainError,
)

from django_delayq.exceptions import EngineError, EngineFull, EngineUnavailable

Client: TypeAlias = Redis | RedisCluster

# Up to 6.2 a refusal inside a script arrives as "ERR Error running script ...: -OOM ...", with its code in the text.
_PASSING_CODES = re.compile(
    r"(?:^|[\s:-])(?:OOM|READONLY|LOADING|CLUSTERDOWN|MASTERDOWN|TRYAGAIN|MOVED|ASK|MISCONF|NOREPLICAS|BUSY)\b"
)
_FULL_CODE = re.compile(r"(?:^|[\s:-])OOM\b")
_PASSING = (
    ConnectionError,
    TimeoutError,
    BusyLoadingError,
    OutOfMemoryError,
    ReadOnlyError,
    ClusterError,
    TryAgainError,
    MovedError,
    RedisClusterException,
    OSError,
)


def is_wrong_type(error: object) -> bool:
    """Return whether a command met a key with another type than it expects."""
    return isinstance(error, RedisError) and "WRONGTYPE" in str(error)


@contextmanager
def translated(client: Client) -> Iterator[None]:
    """Raise every error of Redis as `EngineUnavailable` (retry later) or `EngineError`, with its cause.

    `EngineFull` is an `EngineUnavailable` after which entries can still be taken.
    """
    try:
        yield
    except (RedisError, RedisClusterException, OSError) as error:
        message = str(error).rstrip(".")
        if not isinstance(error, _PASSING) and not _PASSING_CODES.search(message):
            raise EngineError(f"Redis refused: {error}") from error
        _forget_demoted_server(client, error)
        is_full = isinstance(error, OutOfMemoryError) or _FULL_CODE.search(message)
        if isinstance(error, ClusterError) and "TTL" in message:  # too many redirections or retries
            message = "a slot of the cluster is being moved to another node"
        raise (EngineFull if is_full else EngineUnavailable)(f"Redis is not available: {message}") from error


def _forget_demoted_server(client: Client, error: Exception) -> None:
    """Close idle connections to a server that has become a replica.

    Such a connection still works, so a client behind a moving address would ask the wrong server indefinitely.
    Connections in use belong to other threads.
    """
    demoted = isinstance(error, ReadOnlyError) or "READONLY" in str(error)
    if demoted and isinstance(client, Redis):
        client.connection_pool.disconnect(inuse_connections=False)
