"""What Redis can answer instead of an answer, told apart by who has to react."""

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
    """Whether a command met a key that holds another type than it expects."""
    return isinstance(error, RedisError) and "WRONGTYPE" in str(error)


def is_passing(error: Exception) -> bool:
    """Whether the same command may well succeed later, with nothing changed by us."""
    return isinstance(error, _PASSING) or bool(_PASSING_CODES.search(str(error)))


def is_full(error: Exception) -> bool:
    """Whether the server refused for want of memory."""
    return isinstance(error, OutOfMemoryError) or bool(_FULL_CODE.search(str(error)))


@contextmanager
def translated(client: Client) -> Iterator[None]:
    """Lets every Redis error out as `EngineUnavailable` (try again later) or `EngineError`, its cause attached.

    `EngineFull` is the kind of the first that leaves what is there within reach.
    """
    try:
        yield
    except (RedisError, RedisClusterException, OSError) as error:
        if is_passing(error):
            _forget_demoted_server(client, error)
            kind = EngineFull if is_full(error) else EngineUnavailable
            raise kind(f"Redis is not available: {_words_of(error)}") from error
        raise EngineError(f"Redis refused: {error}") from error


def _words_of(error: Exception) -> str:
    if isinstance(error, ClusterError) and "TTL" in str(error):  # it was sent on, or told to come again, too often
        return "a slot of the cluster is on its way to another node"
    return str(error).rstrip(".")


def _forget_demoted_server(client: Client, error: Exception) -> None:
    """Drops idle connections to a server that has become a replica.

    Such a connection stays healthy, so without this a client behind a moving address would ask the wrong server for
    as long as it lives. Connections in use are left alone: they belong to other threads.
    """
    demoted = isinstance(error, ReadOnlyError) or "READONLY" in str(error)
    if demoted and isinstance(client, Redis):
        client.connection_pool.disconnect(inuse_connections=False)
