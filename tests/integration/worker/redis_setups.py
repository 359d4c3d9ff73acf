"""Redis in the shapes that settings can name: behind a sentinel, and as a cluster."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis

from tests.engine.redis_process import RedisProcess, cluster_port
from tests.support.waiting import wait_until
from tools import processes
from tools.servers import free_port

START_SECONDS = 30.0


@contextlib.contextmanager
def sentinel_of(server: RedisProcess) -> Iterator[int]:
    """A sentinel that knows `server` as the service "shop"; gives its port."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="delayq-sentinel-") as folder:
        config = Path(folder) / "sentinel.conf"
        config.write_text(f"port {port}\nbind 127.0.0.1\nsentinel monitor shop 127.0.0.1 {server.port} 1\n")
        with (Path(folder) / "log").open("wb") as log:
            process = processes.start([server.binary, config, "--sentinel"], cwd=folder, stdout=log, stderr=log)
        try:
            with redis.Redis(port=port, socket_timeout=5) as client:
                wait_until(client.ping)
            yield port
        finally:
            processes.kill(process)


@contextlib.contextmanager
def cluster_of(count: int = 3) -> Iterator[list[RedisProcess]]:
    """A cluster of `count` masters without replicas, the slots shared out evenly."""
    extra = ["--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf", "--cluster-node-timeout", "5000"]
    with contextlib.ExitStack() as stack:
        nodes = [RedisProcess(port=cluster_port(), extra=extra) for _ in range(count)]
        clients = [stack.enter_context(stack.enter_context(node).client()) for node in nodes]
        for i, client in enumerate(clients):
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
            slots = range(i * 16384 // count, (i + 1) * 16384 // count)
            client.execute_command("CLUSTER", "ADDSLOTS", *slots)
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[0].port)
        wait_until(lambda: all(_is_whole(client, count) for client in clients))
        yield nodes


def _is_whole(client: redis.Redis, count: int) -> bool:
    said: Any = client.cluster("INFO")
    return bool(said["cluster_state"] == "ok" and int(said["cluster_known_nodes"]) == count)
