"""With TLS, the client accepts only servers with a valid certificate, and sends its own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from django_delayq.engine.engine import Engine
from django_delayq.exceptions import EngineUnavailable
from django_delayq.redis_clients.clients import WORKER, make_client
from tests.engine.certificates import Authority, Certificate, find_openssl
from tests.engine.lines import one_line
from tests.engine.redis_process import RedisProcess, binaries
from tests.engine.test_engine import walk_the_basic_path

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    if find_openssl() is None:
        assert os.environ.get("CI") != "true", "openssl is missing"
        pytest.skip("openssl is missing")
    return Authority.create(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def options(authority: Authority) -> list[str]:
    """Return the options with which a server uses its certificate and verifies clients."""
    own = authority.sign("server")
    files = ["--tls-cert-file", str(own.certificate), "--tls-key-file", str(own.key)]
    return [*files, "--tls-ca-cert-file", str(authority.certificate), "--tls-auth-clients", "yes"]


class TlsServer(RedisProcess):
    """Speaks TLS alone on its port, and on its unix socket what all speak."""

    def command(self) -> list[str]:
        return [*super().command(), "--port", "0", "--tls-port", str(self.port)]


@pytest.fixture(scope="module")
def binary() -> str:
    """A server program that was built with TLS."""
    for path in binaries():
        with RedisProcess(path) as server, server.client() as client, contextlib.suppress(redis.RedisError):
            if client.config_get("tls-port"):
                return path
    assert os.environ.get("CI") != "true", "no server with TLS"
    pytest.skip("no server with TLS")


@pytest.fixture(scope="module")
def server(binary: str, options: list[str]) -> Iterator[TlsServer]:
    found = TlsServer(binary, extra=options)
    with found:
        yield found


def query(authority: Certificate, shown: Certificate | None, *more: str) -> str:
    """Return the options after the `?` of an address."""
    words = [f"ssl_ca_certs={authority.certificate}", *more]
    if shown is not None:
        words += [f"ssl_certfile={shown.certificate}", f"ssl_keyfile={shown.key}"]
    return "?" + "&".join(words)


def engine_of(url: str) -> Engine:
    return Engine(make_client(url, WORKER), prefix="tls", shards=3)


def walk(url: str) -> None:
    engine = engine_of(url)
    walk_the_basic_path(engine)
    engine.close()


def test_who_can_be_verified_is_let_in_and_who_cannot_gets_nowhere(
    server: TlsServer, authority: Authority, tmp_path: Path
) -> None:
    stranger, shown = Authority.create(tmp_path, "stranger"), authority.sign("visitor")
    walk(f"rediss://127.0.0.1:{server.port}/0{query(authority, shown)}")
    urls = {
        "nobody": f"rediss://127.0.0.1:{server.port}/0{query(authority, None)}",
        "a stranger": f"rediss://127.0.0.1:{server.port}/0{query(authority, stranger.sign('s'))}",
        "to a stranger": f"rediss://127.0.0.1:{server.port}/0{query(stranger, shown)}",
        "in plain text": f"redis://127.0.0.1:{server.port}/0",
        "under another name": f"rediss://127.0.0.2:{server.port}/0{query(authority, shown, 'ssl_check_hostname=true')}",
    }
    with server.client() as client:
        client.config_set("bind", "127.0.0.1 127.0.0.2")
        before = client.dbsize()
        for case, url in urls.items():
            engine = engine_of(url)
            with pytest.raises(EngineUnavailable):
                one_line(engine, "q").ensure([(1, 1)])
            assert client.dbsize() == before, case
            engine.close()
