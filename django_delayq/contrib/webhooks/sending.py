"""Send one message: sign it as Standard Webhooks describes, and accept an answer with a status of 2xx only.

Redirects are not followed: the setting has the address. The body of the answer is not read. No error contains the URL,
which may have a token, or a secret.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from functools import cache, partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, Final, cast
from urllib.error import URLError
from urllib.request import AbstractHTTPHandler, OpenerDirector, ProxyHandler, Request

from django_delayq import __version__
from django_delayq.backoff import Backoff
from django_delayq.contrib.webhooks.endpoints import MAX_TIME, Endpoint
from django_delayq.firing.time_limits import SLOW_SECONDS
from django_delayq.policy.outcomes import Snooze
from django_delayq.redis_clients.breaker import call_in_thread

NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")


class DeliveryFailed(Exception):
    """The endpoint has not accepted the message."""


class Gone(DeliveryFailed):
    """The endpoint does not want any more messages."""


def send(endpoint: Endpoint, message_id: str, body: str) -> None:
    """Send the message.

    Raises DeliveryFailed unless the endpoint has accepted it in time, and Snooze if the message must wait untried.
    """
    content, seconds = body.encode(), endpoint.timeout.total_seconds()
    headers = {"Content-Type": "application/json", "User-Agent": f"django-delayq/{__version__}"}
    headers |= signed(endpoint, message_id, content, int(time.time()))
    request = Request(endpoint.url, content, headers, method="POST")
    try:
        with _turns_for(endpoint).turn():
            status = _status_of(request, endpoint)
    except (OSError, HTTPException) as error:
        is_late = isinstance(error, TimeoutError)
        words = f"has not answered within {seconds:g} s" if is_late else f"cannot be reached: {type(error).__name__}"
        raise DeliveryFailed(f"Endpoint {endpoint.name!r} {words}.") from None
    if not 200 <= status < 300:
        failed = Gone if status == 410 else DeliveryFailed
        raise failed(f"Endpoint {endpoint.name!r} has answered with the status {status}.")


def signed(endpoint: Endpoint, message_id: str, content: bytes, at: int) -> dict[str, str]:
    """Return the headers by which an endpoint recognizes the message. With several secrets, one signature each."""
    text = f"{message_id}.{at}.".encode() + content
    digests = (hmac.new(secret, text, hashlib.sha256).digest() for secret in endpoint.secrets)
    signatures = " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests)
    return {"webhook-id": message_id, "webhook-timestamp": str(at), "webhook-signature": signatures}


def is_public(host: str) -> bool:
    """Return whether an address leads to the same host everywhere, also one of IPv4 within one of IPv6."""
    address: Any = ipaddress.ip_address(host.partition("%")[0])
    if address.version == 6:
        translated = ipaddress.IPv4Address(address.packed[-4:]) if address in NAT64 else None
        address = translated or address.ipv4_mapped or address
    special = ("is_multicast", "is_reserved", "is_site_local", "sixtofour")
    return address.is_global and not any(getattr(address, each, None) for each in special)


class _Turns:
    """The requests of this process to one endpoint: at most two at a time, and none for a while if it hangs.

    It would otherwise occupy all threads of the worker, and delay the messages to all other endpoints.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._seconds, self._is_stuck = endpoint.timeout.total_seconds(), False
        self._lock, self._free = threading.Lock(), threading.Semaphore(2)
        self._backoff = Backoff(self._seconds, 5 * MAX_TIME.total_seconds())

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Reserve a request for the block. Raises Snooze if the message must wait, which counts as no attempt."""
        pause = self._backoff.seconds_left if self._backoff.delay > self._seconds else 0.0
        if not pause and not self._free.acquire(timeout=0 if self._is_stuck else SLOW_SECONDS):
            self._is_stuck, pause = True, self._seconds
        if pause:
            raise Snooze(seconds=pause, reason="The endpoint has not answered other messages.")
        ended = self._backoff.succeeded
        try:
            yield
        except TimeoutError:
            ended = self._backoff.failed
            raise
        finally:
            with self._lock:
                ended()
            self._is_stuck = False
            self._free.release()


_turns_for = cache(_Turns)


def _status_of(request: Request, endpoint: Endpoint) -> int:
    """Send `request`, by a proxy of the environment if there is one, and return the status of the answer.

    Nothing follows redirects, or opens files. Raises TimeoutError after the time limit in total: that of a socket is of
    each read, and nothing can end the look-up of a name. So the request runs in another thread.
    """
    connections, seconds = list[Any](), endpoint.timeout.total_seconds()

    def connection(kind: Any, host: str, **options: Any) -> Any:
        connections.append(made := kind(host, **options))
        made._create_connection = partial(_connect, time.monotonic() + seconds, endpoint)
        return made

    class Handler(AbstractHTTPHandler):
        http_request = https_request = AbstractHTTPHandler.do_request_

        def http_open(self, req: Request) -> Any:
            return self.do_open(partial(connection, HTTPConnection), req)

        def https_open(self, req: Request) -> Any:
            return self.do_open(partial(connection, HTTPSConnection), req, context=_tls())

    def ask() -> int:
        with opener.open(request, timeout=seconds) as response:
            return int(response.status)

    opener = OpenerDirector()
    for handler in (ProxyHandler(), Handler()):
        opener.add_handler(handler)
    answer = call_in_thread(ask)
    wait([answer], seconds)
    if not answer.done():
        for made in connections:
            with suppress(OSError, AttributeError):  # it is not connected yet, or closed already
                made.sock.shutdown(socket.SHUT_RDWR)
        raise TimeoutError
    try:
        return answer.result()
    except URLError as error:
        raise cast("OSError", error.reason) from None


def _connect(end_at: float, endpoint: Endpoint, address: tuple[str, int], *_: Any) -> socket.socket:
    """Return a connection to a host, as `socket.create_connection` does, but in time whatever addresses it has.

    Raises DeliveryFailed before it connects to an address that is not public.
    """
    places: list[Any] = [place[:2] for *_, place in socket.getaddrinfo(*address, type=socket.SOCK_STREAM)]
    if endpoint.public_only and not all(is_public(host) for host, _ in places):
        raise DeliveryFailed(f"Endpoint {endpoint.name!r} has an address that is not public.")
    failure: OSError = TimeoutError()
    for number, place in enumerate(places):
        if (left := end_at - time.monotonic()) <= 0:
            raise TimeoutError
        try:
            sock = socket.create_connection(place, left / (len(places) - number))
        except OSError as error:
            failure = error
        else:
            sock.settimeout(left)
            return sock
    raise failure


@cache
def _tls() -> ssl.SSLContext:
    """Return the settings of TLS. Loading the certificates of the system takes a tenth of a second."""
    return ssl.create_default_context()
