"""The ways in which a Redis can be away, each made with a real server or a real socket."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import redis

from tests.e2e.outages.wire import Wire
from tests.engine.redis_process import RedisProcess
from tests.support.waiting import wait_until
from tools import processes
from tools.servers import free_port

Fault = Callable[[], AbstractContextManager[Wire]]


@contextlib.contextmanager
def refused() -> Iterator[Wire]:
    """No server behind the wire, which closes connections."""
    with Wire(free_port()) as wire:
        yield wire


@contextlib.contextmanager
def silent() -> Iterator[Wire]:
    """Yield a proxy that accepts connections without a server."""
    with Wire() as wire:
        yield wire


@contextlib.contextmanager
def stopped() -> Iterator[Wire]:
    """Yield a suspended server; the kernel still accepts connections for it."""
    with RedisProcess() as server, Wire(server.port) as wire:
        server.pause()
        yield wire


@contextlib.contextmanager
def loading() -> Iterator[Wire]:
    """Yield a server that loads its data for longer than the test runs."""
    with RedisProcess() as server:
        with server.client() as client:
            client.mset({f"key-{number}": "x" * 1000 for number in range(5000)})
            client.save()
        server.kill()
        slowly = ["--key-load-delay", "10000", "--loading-process-events-interval-bytes", "1024"]
        with server.log.open("ab") as log:
            process = processes.start([*server.command(), *slowly], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            with server.client(tcp=True) as client, Wire(server.port) as wire:
                wait_until(lambda: _is_loading(client))
                yield wire
                assert _is_loading(client), "it must not be through before the test is"
        finally:
            processes.kill(process)


def _is_loading(client: redis.Redis) -> bool:
    try:
        client.ping()
    except redis.BusyLoadingError:
        return True
    except redis.ConnectionError:
        pass
    return False


@contextlib.contextmanager
def read_only() -> Iterator[Wire]:
    """Yield a replica, as after an unnoticed failover."""
    with RedisProcess(extra=["--replicaof", "127.0.0.1 1"]) as server, Wire(server.port) as wire:
        yield wire


@contextlib.contextmanager
def wrong_password() -> Iterator[Wire]:
    with RedisProcess() as server, Wire(server.port) as wire:
        with server.client() as client:
            client.config_set("requirepass", "another")
        yield wire


@contextlib.contextmanager
def cannot_save() -> Iterator[Wire]:
    """Yield a server that refuses writes because of its disk (MISCONF)."""
    with RedisProcess() as server, Wire(server.port) as wire:
        with server.client() as client:
            client.config_set("save", "3600 1")
            client.set("key", "value")
            shutil.rmtree(server.home)
            client.bgsave()
            wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")
        yield wire


@contextlib.contextmanager
def out_of_memory() -> Iterator[Wire]:
    with RedisProcess() as server, Wire(server.port) as wire:
        with server.client() as client:
            client.config_set("maxmemory", "1")
        yield wire


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (refused, silent, stopped, loading, read_only, wrong_password, cannot_save, out_of_memory)
}
