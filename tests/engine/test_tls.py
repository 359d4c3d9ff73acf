"""With TLS, the client accepts only servers with a valid certificate, and sends its own."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import redis

from django_delayq.engine.engine import Engine
from django_delayq.exceptions import EngineUnavailable
from django_delayq.redis_clients.clients import WORKER, make_client
from tests.engine.certificates import Authority, Certificate, find_openssl
from tests.engine.lines import one_line
from tests.engine.redis_process import RedisProcess
from tests.engine.test_engine import walk_the_basic_path
from tools.redis_binary import find_redis_servers

pytestmark = pytest.mark.slow


class TlsServer(RedisProcess):
    """Speaks TLS alone on its port, and on its unix socket what all speak."""

    def command(self) -> list[str | Path]:
        return [*super().command(), "--port", "0", "--tls-port", str(self.port)]


def binary_with_tls() -> Path:
    """Return a server program that was built with TLS; skip the test without one, and without openssl."""
    for path in find_redis_servers() if find_openssl() else ():
        with RedisProcess(path) as server, server.client() as client, contextlib.suppress(redis.RedisError):
            if client.config_get("tls-port"):
                return path
    assert os.environ.get("CI") != "true", "no openssl, or no server with TLS"
    pytest.skip("no openssl, or no server with TLS")


def engine_of(host: str, authority: Authority, shown: Certificate | None, *more: str) -> Engine:
    words = [f"ssl_ca_certs={authority.certificate}", *more]
    if shown is not None:
        words += [f"ssl_certfile={shown.certificate}", f"ssl_keyfile={shown.key}"]
    return Engine(make_client(f"rediss://{host}/0?{'&'.join(words)}", WORKER))


def test_who_can_be_verified_is_let_in_and_who_cannot_gets_nowhere(tmp_path: Path) -> None:
    binary, authority, stranger = binary_with_tls(), Authority.create(tmp_path), Authority.create(tmp_path, "stranger")
    own, shown = authority.sign("server"), authority.sign("visitor")
    files = ["--tls-cert-file", str(own.certificate), "--tls-key-file", str(own.key)]
    files += ["--tls-ca-cert-file", str(authority.certificate), "--tls-auth-clients", "yes"]
    with TlsServer(binary, extra=files) as server, server.client() as client:
        client.config_set("bind", "127.0.0.1 127.0.0.2")
        host, other_name = f"127.0.0.1:{server.port}", f"127.0.0.2:{server.port}"
        engine = engine_of(host, authority, shown)
        walk_the_basic_path(engine)
        engine.close()
        before = client.dbsize()
        refused = [
            engine_of(host, authority, None),
            engine_of(host, authority, stranger.sign("s")),
            engine_of(host, stranger, shown),
            engine_of(other_name, authority, shown, "ssl_check_hostname=true"),
            Engine(make_client(f"redis://{host}/0", WORKER)),
        ]
        for engine in refused:
            with pytest.raises(EngineUnavailable):
                one_line(engine, "q").ensure([(1, 1)])
            engine.close()
        assert client.dbsize() == before
