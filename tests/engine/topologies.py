"""Redis as it is run in earnest: a master with replicas under the eyes of sentinels, and a cluster with replicas.

    with watched() as servers:         # 1 master, 2 replicas, 3 sentinels
        servers.kill_master()          # and the sentinels make a replica the master
    with clustered() as nodes:         # 3 masters, 3 replicas
        nodes.migrating(slot).begin()

Each changes in the ways in which the real thing does, by an accident or by an operator's command.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from tests.engine.redis_process import RedisProcess
from tests.support.waiting import wait_until
from tools.servers import free_port

SERVICE = "shop"
SLOTS = 16384
CHANGE_SECONDS = 60.0
"""A failover takes two to fifteen seconds, most of which everybody waits to be sure."""


def role_of(server: RedisProcess) -> str:
    """`master`, `slave`, or `gone`."""
    with contextlib.suppress(redis.RedisError):
        return str(_replication(server)["role"])
    return "gone"


@dataclass
class Watched:
    """A service of some servers, and the sentinels that watch it."""

    servers: list[RedisProcess]
    sentinels: Sequence[RedisProcess]

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{SERVICE}/0"

    @property
    def master(self) -> RedisProcess:
        """The server that most sentinels name."""
        ports = [self._named_by(sentinel) for sentinel in self.sentinels]
        return next(server for server in self.servers if server.port == max(ports, key=ports.count))

    def kill_master(self) -> RedisProcess:
        """Kill the master; return the new one when all sentinels agree on it."""
        former = self.master
        former.kill()
        return self._successor_of(former)

    def fail_over(self) -> RedisProcess:
        """Move the service with an operator's command; return the new master when all sentinels agree on it."""
        former = self.master
        wait_until(lambda: _is_accepted(self.sentinels[0], "SENTINEL", "FAILOVER", SERVICE), seconds=CHANGE_SECONDS)
        return self._successor_of(former)

    def _successor_of(self, former: RedisProcess) -> RedisProcess:
        def is_there() -> bool:
            named = {self._named_by(sentinel) for sentinel in self.sentinels}
            if len(named) != 1 or former.port in named or role_of(self.master) != "master":
                return False
            alive = [server for server in self.servers if role_of(server) != "gone"]
            return all(server is self.master or _follows(server, self.master) for server in alive)

        wait_until(is_there, seconds=CHANGE_SECONDS)  # until all follow: a master that dies before has no fit successor
        return self.master

    def _named_by(self, sentinel: RedisProcess) -> int:
        return int(_say(sentinel, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)[1])


class SentinelProcess(RedisProcess):
    """A sentinel, which is a server of another kind."""

    ready_line = "Sentinel ID is"

    def __init__(self, master: RedisProcess, quorum: int, lines: Sequence[str] = ()) -> None:
        super().__init__(master.binary, free_port())
        rules = [f"monitor {SERVICE} 127.0.0.1 {master.port} {quorum}", f"down-after-milliseconds {SERVICE} 2000"]
        rules += [f"failover-timeout {SERVICE} 5000", *lines]
        head = [f"port {self.port}", "bind 127.0.0.1", f"unixsocket {self.socket}", f"dir {self.home}"]
        self.config = self.home / "sentinel.conf"
        self.config.write_text("\n".join([*head, *(f"sentinel {rule}" for rule in rules)]))

    def command(self) -> list[str | Path]:
        return [super().command()[0], self.config, "--sentinel"]


@contextlib.contextmanager
def watched(replicas: int = 2, sentinels: int = 3) -> Iterator[Watched]:
    """Yield a master with its replicas in sync, and sentinels that know all of them and each other."""
    with contextlib.ExitStack() as stack:
        quick = ["--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1"]
        master = stack.enter_context(RedisProcess(extra=quick))
        servers = [master]
        for _ in range(replicas):
            follows = [*quick, "--replicaof", "127.0.0.1", str(master.port)]
            servers.append(stack.enter_context(RedisProcess(extra=follows)))
        wait_until(lambda: all(_is_in_step(server) for server in servers[1:]))
        watchers = [stack.enter_context(SentinelProcess(master, sentinels // 2 + 1)) for _ in range(sentinels)]
        for watcher in watchers:  # from 7.0 on: they check more often
            _is_accepted(watcher, "SENTINEL", "DEBUG", "INFO-PERIOD", 500, "PUBLISH-PERIOD", 200)
        wait_until(lambda: all(_knows_all(each, replicas, sentinels) for each in watchers), seconds=CHANGE_SECONDS)
        yield Watched(servers, watchers)


@dataclass
class Clustered:
    """The nodes of a cluster; `masters` and `replicas` as they were at the beginning, each at its master's place."""

    masters: list[RedisProcess]
    replicas: list[RedisProcess] = field(default_factory=list)

    @property
    def nodes(self) -> list[RedisProcess]:
        return [*self.masters, *self.replicas]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def kill_master(self, place: int) -> RedisProcess:
        """Kill a master; return its replica when it has become the master."""
        self.masters[place].kill()
        self._await_promotion(place)
        return self.replicas[place]

    def fail_over(self, place: int) -> RedisProcess:
        """Swap master and replica with an operator's command; return the new master."""
        asked_at = 0.0

        def is_done() -> bool:
            nonlocal asked_at
            if time.monotonic() - asked_at > 6:  # a manual failover that takes longer than five seconds is given up
                asked_at = time.monotonic()
                _is_accepted(self.replicas[place], "CLUSTER", "FAILOVER")
            return role_of(self.replicas[place]) == "master"

        wait_until(is_done, seconds=CHANGE_SECONDS)
        self._await_promotion(place)
        return self.replicas[place]

    def migrating(self, slot: int) -> Migration:
        """Return a migration of a slot from its master to the next one, which has not begun."""
        masters = [node for node in self.nodes if role_of(node) == "master"]
        source = next(node for node in masters if _owns(node, slot))
        return Migration(slot, source, masters[(masters.index(source) + 1) % len(masters)], masters)

    def _await_promotion(self, place: int) -> None:
        alive = [node for node in self.nodes if role_of(node) != "gone"]
        wait_until(lambda: role_of(self.replicas[place]) == "master", seconds=CHANGE_SECONDS)
        # A node that does not know it yet still considers itself a master.
        wait_until(lambda: [*map(role_of, self.nodes)].count("master") == len(self.masters), seconds=CHANGE_SECONDS)
        wait_until(lambda: all(_state(node)["cluster_state"] == "ok" for node in alive), seconds=CHANGE_SECONDS)
        # A node that takes it for a replica refuses to give it a slot.
        id = _id(self.replicas[place])
        wait_until(lambda: all(_takes_for_master(node, id) for node in alive), seconds=CHANGE_SECONDS)


@dataclass
class Migration:
    """One slot on its way from a node to another, step by step, as `redis-cli --cluster reshard` does it."""

    slot: int
    source: RedisProcess
    target: RedisProcess
    masters: list[RedisProcess]

    def begin(self) -> None:
        """Keys that the source has not are looked for at the target."""
        _say(self.target, "CLUSTER", "SETSLOT", self.slot, "IMPORTING", _id(self.source))
        _say(self.source, "CLUSTER", "SETSLOT", self.slot, "MIGRATING", _id(self.target))

    def move_keys(self) -> int:
        """All keys of the slot are at the target, one after the other. Returns how many were moved."""
        moved = 0
        while keys := _say(self.source, "CLUSTER", "GETKEYSINSLOT", self.slot, 1):
            _say(self.source, "MIGRATE", "127.0.0.1", self.target.port, "", 0, 5000, "KEYS", *keys)
            moved += 1
        return moved

    def finish(self) -> None:
        """Assign the slot to the target, and wait until every master knows it."""
        for node in [self.target, self.source, *self.masters]:
            _say(node, "CLUSTER", "SETSLOT", self.slot, "NODE", _id(self.target))


@contextlib.contextmanager
def clustered(masters: int = 3, replicas: bool = True) -> Iterator[Clustered]:
    """Yield a cluster with evenly distributed slots, and a replica in sync for each master."""
    options = ["--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf", "--cluster-node-timeout", "2000"]
    options += ["--repl-diskless-sync-delay", "0", "--cluster-replica-validity-factor", "0"]
    with contextlib.ExitStack() as stack:

        def node() -> RedisProcess:
            return stack.enter_context(RedisProcess(port=free_port(10_000), extra=options))  # its second port is above

        found = Clustered([node() for _ in range(masters)], [node() for _ in range(masters if replicas else 0)])
        for i, server in enumerate(found.nodes):
            _say(server, "CLUSTER", "SET-CONFIG-EPOCH", i + 1)
            if i < masters:
                _say(server, "CLUSTER", "ADDSLOTS", *range(i * SLOTS // masters, (i + 1) * SLOTS // masters))
            _say(server, "CLUSTER", "MEET", "127.0.0.1", found.masters[0].port)
        count = str(len(found.nodes))
        wait_until(lambda: all(_state(node)["cluster_known_nodes"] == count for node in found.nodes))
        for master, replica in zip(found.masters, found.replicas, strict=replicas):
            wait_until(lambda: _is_accepted(replica, "CLUSTER", "REPLICATE", _id(master)))  # noqa: B023
        wait_until(lambda: all(_is_in_step(replica) for replica in found.replicas))
        wait_until(lambda: all(_state(node)["cluster_state"] == "ok" for node in found.nodes))
        yield found


def _say(server: RedisProcess, *words: Any) -> Any:
    with server.client(socket_timeout=5) as client:
        return client.execute_command(*words)


def _is_accepted(server: RedisProcess, *words: Any) -> bool:
    try:
        return bool(_say(server, *words))
    except redis.ResponseError:
        return False


def _id(server: RedisProcess) -> str:
    return bytes(_say(server, "CLUSTER", "MYID")).decode()


def _state(server: RedisProcess) -> dict[str, str]:
    return {str(name): str(value) for name, value in _say(server, "CLUSTER INFO").items()}


def _takes_for_master(node: RedisProcess, id: str) -> bool:
    known = _say(node, "CLUSTER NODES").values()
    return any(other["node_id"] == id and "master" in other["flags"] for other in known)


def _owns(master: RedisProcess, slot: int) -> bool:
    found = _say(master, "CLUSTER SLOTS")
    return any(first <= slot <= last and ports[1] == master.port for first, last, ports, *_ in found)


def _replication(server: RedisProcess) -> dict[str, Any]:
    return dict(_say(server, "INFO", "replication"))


def _is_in_step(server: RedisProcess) -> bool:
    return bool(_replication(server).get("master_link_status") == "up")


def _follows(server: RedisProcess, master: RedisProcess) -> bool:
    return _is_in_step(server) and _replication(server).get("master_port") == master.port


def _knows_all(sentinel: RedisProcess, replicas: int, sentinels: int) -> bool:
    state = _say(sentinel, "SENTINEL MASTERS")[SERVICE]
    return bool(state["num-slaves"] == replicas and state["num-other-sentinels"] == sentinels - 1)
