"""An endpoint: a real HTTP server in a thread, which behaves as the path of its address asks for."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.support.typed import Patch

SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()
OTHER_SECRET = "whsec_" + base64.b64encode(bytes(range(100, 124))).decode()


@dataclass
class Received:
    """A request as it came."""

    path: str
    headers: dict[str, str]
    content: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.content)

    def is_signed_with(self, secret: str) -> bool:
        """Whether one of the signatures is that of Standard Webhooks, written here from its specification."""
        key = base64.b64decode(secret.split("_", 1)[1])
        signed = b".".join(
            [self.headers["webhook-id"].encode(), self.headers["webhook-timestamp"].encode(), self.content]
        )
        expected = base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
        return any(one.split(",") == ["v1", expected] for one in self.headers["webhook-signature"].split(" "))


@dataclass
class EndpointServer:
    """Where messages arrive."""

    url: str
    received: list[Received] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    """The test is over: requests that hang end."""
    secure: Callable[[ssl.SSLContext], None] = lambda _: None
    """Have new connections use TLS."""
    answers: list[int] = field(default_factory=list)
    """The next statuses; without one, 204."""

    @property
    def bodies(self) -> list[Any]:
        return [each.body for each in self.received]


class _Handler(BaseHTTPRequestHandler):
    server: Any

    def do_POST(self) -> None:
        endpoint: EndpointServer = self.server.endpoint
        content = self.rfile.read(int(self.headers["Content-Length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        endpoint.received.append(Received(self.path, headers, content))
        match self.path:
            case "/hangs":
                endpoint.ended.wait(60)
            case "/dribbles":
                self._dribble(endpoint.ended)
            case "/lies":
                self.wfile.write(b"HTTP/1.1 2x0 sure\r\n\r\n")
            case "/closes":
                self.connection.shutdown(socket.SHUT_RDWR)
            case "/long":
                self._answer(200, b"x" * 100_000)
            case "/redirects":
                self.send_response(307)
                self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()
            case _:
                self._answer(endpoint.answers.pop(0) if endpoint.answers else 204)

    def _answer(self, status: int, content: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _dribble(self, ended: threading.Event) -> None:
        """Answer at once, and then never end."""
        try:
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            while not ended.wait(0.02):
                self.wfile.write(b"X-More: x\r\n" if not ended.is_set() else b"\r\n")
        except OSError:  # the client has enough
            pass

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def endpoint(monkeypatch: Patch) -> Iterator[EndpointServer]:
    monkeypatch.setenv("no_proxy", "*")
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.endpoint = EndpointServer(f"http://127.0.0.1:{server.server_port}")

    def secure(context: ssl.SSLContext) -> None:
        server.socket = context.wrap_socket(server.socket, server_side=True)

    server.endpoint.secure = secure
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server.endpoint
    server.endpoint.ended.set()
    server.shutdown()
    server.server_close()
    thread.join(60)


@pytest.fixture
def use(settings: Any, endpoint: EndpointServer) -> Callable[..., None]:
    """`use("/hangs", events=["dead"])` makes the server an endpoint named `billing`."""

    def set_up(path: str = "/timeouts", **options: Any) -> None:
        given = {"url": endpoint.url + path, "secret": SECRET, "events": ["fired", "dead", "late", "braked"]}
        settings.DELAYQ_WEBHOOKS = {"billing": {**given, **options}}

    set_up()
    return set_up
