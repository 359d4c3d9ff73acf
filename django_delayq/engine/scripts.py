"""Load `lua/<command>.lua`, run commands, many of them in one round trip, and translate the errors of Redis.

A line `--- include piece` is replaced by `lua/include/piece.lua`.

A server may lose its scripts (SCRIPT FLUSH, restart, failover). Then the text is sent instead of its digest, and the
server caches it again.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any, Final, NamedTuple, TypeAlias

from redis import Redis
from redis import exceptions as errors
from redis.cluster import RedisCluster

from django_delayq.engine.records import type_of
from django_delayq.exceptions import EngineError, EngineFull, EngineUnavailable

Client: TypeAlias = Redis | RedisCluster
logger = logging.getLogger("django_delayq.engine")

_CLEARINGS: Final = 3
"""How often a call renames foreign keys before it fails, so that it ends although they are written again."""
_INCLUDE = re.compile(r"^--- include (\w+)$", re.MULTILINE)
# Up to 6.2 a refusal inside a script arrives as "ERR Error running script ...: -OOM ...", with its code in the text.
_PASSING_CODES = re.compile(
    r"(?:^|[\s:-])(?:OOM|READONLY|LOADING|CLUSTERDOWN|MASTERDOWN|TRYAGAIN|MOVED|ASK|MISCONF|NOREPLICAS|BUSY)\b"
    r"|access a non local key"  # a script has emptied a key of a slot that is being moved
)
_FULL_CODE = re.compile(r"(?:^|[\s:-])OOM\b")
_PASSING = (
    errors.ConnectionError,
    errors.TimeoutError,
    errors.OutOfMemoryError,
    errors.ReadOnlyError,
    errors.ClusterError,
    errors.TryAgainError,
    errors.MovedError,
    errors.RedisClusterException,
    OSError,
)


class Call(NamedTuple):
    """One command: its name, its keys and its arguments in order, as its head names them."""

    command: str
    keys: Sequence[str]
    args: Sequence[int | str] = ()


@cache
def read_texts() -> Mapping[str, str]:
    """Return the text of each command, with its includes. Raises FileNotFoundError for a missing include."""
    folder = files("django_delayq.engine") / "lua"

    def piece(match: re.Match[str]) -> str:
        return (folder / "include" / f"{match[1]}.lua").read_text(encoding="utf-8").rstrip()

    commands = [file for file in folder.iterdir() if file.name.endswith(".lua")]
    return {file.name.removesuffix(".lua"): _INCLUDE.sub(piece, file.read_text(encoding="utf-8")) for file in commands}


@cache
def digest_of(text: str) -> str:
    """Return the name under which a server caches a script."""
    return sha1(text.encode(), usedforsecurity=False).hexdigest()


class Caller:
    """Runs commands, those of this package or `texts`, on one client.

    Foreign keys in their way are renamed, so that they never stop a worker.
    """

    def __init__(self, client: Client, texts: Mapping[str, str] | None = None) -> None:
        self.client = client
        self._texts = texts or read_texts()
        self._logged: set[tuple[str, str]] = set()
        self._label = 0

    def send(self, calls: Sequence[Call]) -> list[Any]:
        """Return the replies in order, in one round trip.

        Raises EngineUnavailable or EngineError for the first call that failed, after all others have run.
        """
        if not calls:
            return []
        with translated(self.client):
            replies = self.run(calls)
            for _ in range(_CLEARINGS):
                blocked = [i for i, reply in enumerate(replies) if _is_wrong_type(reply)]
                if not blocked:
                    break
                again = [calls[i] for i in blocked]
                self._clear(again)
                for i, reply in zip(blocked, self.run(again), strict=True):
                    replies[i] = reply
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply
        return replies

    def run(self, calls: Sequence[Call]) -> list[Any]:
        """Return the replies in order, errors of single commands among them, in one round trip.

        If the server has lost a script, all calls from that one on are sent again: a later call may have run already,
        and only all of them in order have the intended result. Every command may be repeated.
        """
        replies = self._send(calls, "EVALSHA")
        for i, reply in enumerate(replies):
            if isinstance(reply, errors.NoScriptError):
                return replies[:i] + self._send(calls[i:], "EVAL")
        return replies

    def _send(self, calls: Sequence[Call], verb: str) -> list[Any]:
        client: Any = self.client
        commands = []
        for name, keys, args in calls:
            text = self._texts[name]
            commands.append((verb, text if verb == "EVAL" else digest_of(text), len(keys), *keys, *args))
        if len(commands) == 1:
            try:
                return [client.execute_command(*commands[0])]
            except errors.ResponseError as error:
                return [error]
        # Not a transaction: each command is atomic by itself, and MULTI cannot span the nodes of a cluster.
        with client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            return list(pipeline.execute(raise_on_error=False))

    def log_once(self, event: str, queue: str, message: str, *args: object) -> None:
        """Log a warning once for each event and queue, so that an attacker cannot fill the log."""
        if (event, queue) not in self._logged:
            self._logged.add((event, queue))
            logger.warning(message, *args, extra={"event": event, "queue": queue})

    def _clear(self, blocked: Sequence[Call]) -> None:
        for keys in dict.fromkeys(tuple(call.keys) for call in blocked):
            types = {key: kind for key in keys if (kind := type_of(key)) is not None}
            if types:
                # Never the same name twice: it may exist by now, and no existing key is overwritten.
                self._label = max(self._label + 1, time.time_ns() // 1_000_000)
                moves = [name for key in types for name in (key, f"{key}:foreign:{self._label}")]
                (renamed,) = self.run([Call("set_aside", moves, tuple(types.values()))])
                if isinstance(renamed, Exception):
                    raise renamed
                if renamed:
                    names = ", ".join(map(text_of, renamed))
                    self.log_once("foreign_key", keys[0], "A key of another application was renamed to %s", names)


def text_of(name: bytes | str) -> str:
    """Return a name in a reply, which is a str if the client decodes replies."""
    return name.decode() if isinstance(name, bytes) else name


def _is_wrong_type(reply: object) -> bool:
    return isinstance(reply, errors.RedisError) and "WRONGTYPE" in str(reply)


@contextmanager
def translated(client: Client) -> Iterator[None]:
    """Raise every error of Redis as `EngineUnavailable` (retry later) or `EngineError`, with its cause.

    `EngineFull` is an `EngineUnavailable` after which entries can still be taken.
    """
    try:
        yield
    except (errors.RedisError, errors.RedisClusterException, OSError) as error:
        message = str(error).rstrip(".")
        if not isinstance(error, _PASSING) and not _PASSING_CODES.search(message):
            raise EngineError(f"Redis refused: {error}") from error
        if (isinstance(error, errors.ReadOnlyError) or "READONLY" in message) and isinstance(client, Redis):
            # The server has become a replica. Connections to it still work, so a client behind a moving address would
            # ask it indefinitely. Those in use belong to other threads.
            client.connection_pool.disconnect(inuse_connections=False)
        is_full = isinstance(error, errors.OutOfMemoryError) or _FULL_CODE.search(message)
        if isinstance(error, errors.ClusterError) and "TTL" in message:  # too many redirections or retries
            message = "a slot of the cluster is being moved to another node"
        raise (EngineFull if is_full else EngineUnavailable)(f"Redis is not available: {message}") from error
