"""What a call sends: statements to the database, and signals to receivers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connections
from django.test.utils import CaptureQueriesContext

from django_delayq import signals
from django_delayq.models import Timeout


def sql_of(call: Callable[[], object], using: str = "default") -> list[str]:
    """Return the statements of `call`."""
    with CaptureQueriesContext(connections[using]) as captured:
        call()
    return [query["sql"] for query in captured]


@contextmanager
def heard(*names: str) -> Iterator[list[tuple[str, Timeout]]]:
    """Collect the signals of these names, such as "held" for `timeout_held`, each with its timeout."""
    got: list[tuple[str, Timeout]] = []

    def receiver(name: str) -> Callable[..., None]:
        def receive(timeout: Timeout, **_: Any) -> None:
            got.append((name, timeout))

        return receive

    connected = [(getattr(signals, f"timeout_{name}"), receiver(name)) for name in names]
    for signal, receive in connected:
        signal.connect(receive)
    try:
        yield got
    finally:
        for signal, receive in connected:
            signal.disconnect(receive)
