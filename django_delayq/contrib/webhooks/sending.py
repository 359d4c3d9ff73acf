"""Send one message: sign it as Standard Webhooks describes, and accept an answer with a status of 2xx only.

Redirects are not followed: the setting has the address. The body of the answer is not read. No error contains the URL,
which may have a token, or a secret.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
)

from django_delayq import __version__
from django_delayq.contrib.webhooks.endpoints import Endpoint


class DeliveryFailed(Exception):
    """The endpoint has not accepted the message."""


class Gone(DeliveryFailed):
    """The endpoint does not want any more messages."""


def send(endpoint: Endpoint, message_id: str, body: str) -> None:
    """Send the message. Raises DeliveryFailed unless the endpoint has accepted it in time."""
    content, seconds = body.encode(), endpoint.timeout.total_seconds()
    headers = {"Content-Type": "application/json", "User-Agent": f"django-delayq/{__version__}"}
    headers |= signed(endpoint, message_id, content, int(time.time()))
    limit = _Limit(seconds, public_only=endpoint.public_only)
    try:
        with limit.running():
            request = Request(endpoint.url, content, headers, method="POST")
            _opener(endpoint, limit).open(request, timeout=seconds).close()
        if limit.is_over:  # a connection that is cut within the headers looks like their end
            raise TimeoutError
    except HTTPError as error:
        error.close()
        failed = Gone if error.code == 410 else DeliveryFailed
        raise failed(f"Endpoint {endpoint.name!r} has answered with the status {error.code}.") from None
    except DeliveryFailed as error:
        raise DeliveryFailed(f"Endpoint {endpoint.name!r} {error}") from None
    except (OSError, HTTPException) as error:
        cause = error.reason if isinstance(error, URLError) else error
        is_late = limit.is_over or isinstance(cause, TimeoutError)
        words = f"has not answered within {seconds:g} s" if is_late else f"cannot be reached: {type(cause).__name__}"
        raise DeliveryFailed(f"Endpoint {endpoint.name!r} {words}.") from None


def signed(endpoint: Endpoint, message_id: str, content: bytes, at: int) -> dict[str, str]:
    """Return the headers by which an endpoint recognizes the message. With several secrets, one signature each."""
    text = f"{message_id}.{at}.".encode() + content
    digests = (hmac.new(secret, text, hashlib.sha256).digest() for secret in endpoint.secrets)
    signatures = " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests)
    return {"webhook-id": message_id, "webhook-timestamp": str(at), "webhook-signature": signatures}


class _Limit:
    """What a request may do: take so long in total, and reach public addresses only.

    The time limit of a socket is that of each read: an endpoint that sends a byte a second would never exceed it.
    """

    def __init__(self, seconds: float, *, public_only: bool) -> None:
        self._public_only = public_only
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self._connection: HTTPConnection | None = None
        self.is_over = False

    @contextmanager
    def running(self) -> Iterator[None]:
        self._timer.start()
        try:
            yield
        finally:
            self._timer.cancel()

    def connected(self, connection: HTTPConnection) -> None:
        """Check the address that was connected to, before anything is sent to it. Raises DeliveryFailed."""
        address = ipaddress.ip_address(connection.sock.getpeername()[0].partition("%")[0])
        address = getattr(address, "ipv4_mapped", None) or address
        if self._public_only and not address.is_global:
            connection.close()
            raise DeliveryFailed("has an address that is not public.")
        self._connection = connection
        if self.is_over:
            raise TimeoutError

    def _end(self) -> None:
        self.is_over = True
        connection = self._connection
        with suppress(OSError, AttributeError):  # it is closed already
            connection.sock.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]


def _opener(endpoint: Endpoint, limit: _Limit) -> OpenerDirector:
    """Return what opens the URL of `endpoint` within `limit`, by a proxy of the environment if there is one.

    It has no handler of redirects, so that their statuses are errors, and none of files.
    """

    def watched(base: Any) -> Any:
        class Watched(base):  # type: ignore[misc] # HTTPConnection or HTTPSConnection
            def connect(self) -> None:
                super().connect()
                limit.connected(self)

        return Watched

    class Http(HTTPHandler):
        def http_open(self, req: Request) -> Any:
            return self.do_open(watched(HTTPConnection), req)

    class Https(HTTPSHandler):
        def https_open(self, req: Request) -> Any:
            return self.do_open(watched(HTTPSConnection), req, context=_tls())

    opener = OpenerDirector()
    handlers: list[Any] = [ProxyHandler(), HTTPDefaultErrorHandler(), HTTPErrorProcessor(), Http()]
    if endpoint.url.startswith("https:"):
        handlers.append(Https(context=_tls()))
    for handler in handlers:
        opener.add_handler(handler)
    return opener


@functools.cache
def _tls() -> ssl.SSLContext:
    """Return the settings of TLS. Loading the certificates of the system takes a tenth of a second."""
    return ssl.create_default_context()
