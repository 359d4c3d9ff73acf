"""Loads `lua/<command>.lua`, and runs commands one by one or many in one round trip.

A file's head names its KEYS in order; the names are attributes of the keys object that a call brings along, so nobody
counts positions. A line `--- include piece` is replaced by `lua/include/piece.lua`.

Servers forget scripts (SCRIPT FLUSH, restart, failover): then the text is sent instead of its digest, which makes the
server remember it again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any, Final

from redis.exceptions import NoScriptError, ResponseError

from django_delayq.engine.faults import Client
from django_delayq.engine.keys import AsideKeys, QueueKeys

COMMANDS: Final = (
    "acknowledge",
    "acknowledge_all",
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
_HEADER = re.compile(r"^-- (KEYS|ARGV|RETURN)(?: (.*))?$", re.MULTILINE)
_INCLUDE = re.compile(r"^--- include (\w+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Script:
    """One command: its whole text, and what its head declares."""

    text: str
    sha: str
    keys: tuple[str, ...]
    argv: str

    @classmethod
    def parse(cls, text: str) -> Script:
        """The script of a text whose includes are in place. Raises KeyError if its head lacks KEYS or ARGV."""
        header = dict(_HEADER.findall(text))
        digest = sha1(text.encode(), usedforsecurity=False).hexdigest()
        return cls(text=text, sha=digest, keys=tuple(header["KEYS"].split()), argv=header["ARGV"])


@dataclass(frozen=True, slots=True)
class Call:
    """One command to run: its name, an object with the keys that its head names, and its arguments in order."""

    command: str
    keys: QueueKeys | AsideKeys
    args: Sequence[int | str] = ()


class Scripts:
    """A set of commands by name, ready to run on any client."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._scripts = {name: Script.parse(text) for name, text in texts.items()}

    def run(self, client: Client, calls: Sequence[Call]) -> list[Any]:
        """The replies in order, errors of single commands among them; many calls make one round trip.

        If the server had forgotten a script, everything from that call on is sent again: a later call may have run
        already, and only the whole rest in order leaves what the caller wished for. Every command may be repeated.
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
    """Each command's text by name, its includes in place. Raises FileNotFoundError for a piece that is not there."""
    folder = files("django_delayq.engine") / "lua"

    def piece(match: re.Match[str]) -> str:
        return (folder / "include" / f"{match[1]}.lua").read_text(encoding="utf-8").rstrip()

    return {name: _INCLUDE.sub(piece, (folder / f"{name}.lua").read_text(encoding="utf-8")) for name in COMMANDS}


@cache
def packaged_scripts() -> Scripts:
    """The commands that come with this package, read once."""
    return Scripts(read_texts())
