"""Load `lua/<command>.lua`, run commands, many of them in one round trip, and translate the errors of Redis.

The head of a file names its KEYS in order: they are attributes of the keys of a call. A line `--- include piece` is
replaced by `lua/include/piece.lua`.

A server may lose its scripts (SCRIPT FLUSH, restart, failover). Then the text is sent instead of its digest, and the
server caches it again.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any, Final, NamedTuple, TypeAlias

from redis import Redis
from redis.cluster import RedisCluster
from redis.exceptions import (
    BusyLoadingError,
    ClusterError,
    ConnectionError,
    MovedError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

from django_delayq.engine.records import AsideKeys, CounterKeys, QueueKeys
from django_delayq.exceptions import EngineError, EngineFull, EngineUnavailable

Client: TypeAlias = Redis | RedisCluster
logger = logging.getLogger("django_delayq.engine")

COMMANDS: Final = (
    "acknowledge",
    "acknowledge_all",
    "count",
    "ensure",
    "extend",
    "peek",
    "release",
    "remove",
    "reschedule",
    "reserve",
    "set_aside",
    "stats",
)
_CLEARINGS: Final = 3
"""How often a call renames foreign keys before it fails, so that it ends although they are written again."""
_HEADER = re.compile(r"^-- (KEYS|ARGV|RETURN)(?: (.*))?$", re.MULTILINE)
_INCLUDE = re.compile(r"^--- include (\w+)$", re.MULTILINE)
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


@dataclass(frozen=True, slots=True)
class Script:
    """One command: its whole text, and what its head declares."""

    text: str
    sha: str
    keys: tuple[str, ...]
    argv: str

    @classmethod
    def parse(cls, text: str) -> Script:
        """Return the script of a file with its includes. Raises KeyError if its head lacks KEYS or ARGV."""
        header = dict(_HEADER.findall(text))
        digest = sha1(text.encode(), usedforsecurity=False).hexdigest()
        return cls(text=text, sha=digest, keys=tuple(header["KEYS"].split()), argv=header["ARGV"])


class Call(NamedTuple):
    """One command: its name, an object with the keys that its head names, and its arguments in order."""

    command: str
    keys: QueueKeys | AsideKeys | CounterKeys
    args: Sequence[int | str] = ()


class Scripts:
    """A set of commands by name, ready to run on any client."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._scripts = {name: Script.parse(text) for name, text in texts.items()}

    def run(self, client: Client, calls: Sequence[Call]) -> list[Any]:
        """Return the replies in order, errors of single commands among them, in one round trip.

        If the server has lost a script, all calls from that one on are sent again: a later call may have run already,
        and only all of them in order have the intended result. Every command may be repeated.
        """
        replies = self._send(client, calls, "EVALSHA")
        for i, reply in enumerate(replies):
            if isinstance(reply, NoScriptError):
                return replies[:i] + self._send(client, calls[i:], "EVAL")
        return replies

    def _send(self, client: Any, calls: Sequence[Call], verb: str) -> list[Any]:
        if len(calls) == 1:
            try:
                return [client.execute_command(*self._words(calls[0], verb))]
            except ResponseError as error:
                return [error]
        # Not a transaction: each command is atomic by itself, and MULTI cannot span the nodes of a cluster.
        with client.pipeline(transaction=False) as pipeline:
            for call in calls:
                pipeline.execute_command(*self._words(call, verb))
            return list(pipeline.execute(raise_on_error=False))

    def _words(self, call: Call, verb: str) -> list[int | str]:
        script = self._scripts[call.command]
        body = script.text if verb == "EVAL" else script.sha
        keys = [getattr(call.keys, name) for name in script.keys]
        return [verb, body, len(keys), *keys, *call.args]


def read_texts() -> dict[str, str]:
    """Return the text of each command, with its includes. Raises FileNotFoundError for a missing one."""
    folder = files("django_delayq.engine") / "lua"

    def piece(match: re.Match[str]) -> str:
        return (folder / "include" / f"{match[1]}.lua").read_text(encoding="utf-8").rstrip()

    return {name: _INCLUDE.sub(piece, (folder / f"{name}.lua").read_text(encoding="utf-8")) for name in COMMANDS}


@cache
def packaged_scripts() -> Scripts:
    """Return the commands of this package, read once."""
    return Scripts(read_texts())


class Caller:
    """Runs commands on one client. Foreign keys in their way are renamed, so that they never stop a worker."""

    def __init__(self, client: Client, scripts: Scripts | None = None) -> None:
        self.client = client
        self._scripts = scripts or packaged_scripts()
        self._logged: set[tuple[str, str]] = set()
        self._label = 0

    def send(self, calls: Sequence[Call]) -> list[Any]:
        """Return the replies in order, in one round trip.

        Raises EngineUnavailable or EngineError for the first call that failed, after all others have run.
        """
        if not calls:
            return []
        with translated(self.client):
            replies = self._scripts.run(self.client, calls)
            for _ in range(_CLEARINGS):
                blocked = [i for i, reply in enumerate(replies) if _is_wrong_type(reply)]
                if not blocked:
                    break
                again = [calls[i] for i in blocked]
                self._clear(again)
                for i, reply in zip(blocked, self._scripts.run(self.client, again), strict=True):
                    replies[i] = reply
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply
        return replies

    def log_once(self, event: str, queue: str, message: str, *args: object) -> None:
        """Log a warning once for each event and queue, so that an attacker cannot fill the log."""
        if (event, queue) not in self._logged:
            self._logged.add((event, queue))
            logger.warning(message, *args, extra={"event": event, "queue": queue})

    def _clear(self, blocked: Sequence[Call]) -> None:
        for keys in dict.fromkeys(call.keys for call in blocked):
            if isinstance(keys, QueueKeys):
                # Never the same name twice: it may exist by now, and no existing key is overwritten.
                self._label = max(self._label + 1, time.time_ns() // 1_000_000)
                aside = keys.aside(self._label)
                (renamed,) = self._scripts.run(self.client, [Call("set_aside", aside)])
                if isinstance(renamed, Exception):
                    raise renamed
                if renamed:
                    names = ", ".join(name.decode() if isinstance(name, bytes) else name for name in renamed)
                    self.log_once("foreign_key", keys.entries, "A key of another application was renamed to %s", names)


def _is_wrong_type(error: object) -> bool:
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
