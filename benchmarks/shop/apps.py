"""The app of the shop. In an idle worker of django-delayq it records for what each transaction is."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from django.apps import AppConfig

LOOPS = ("worker", "management")


class Shop(AppConfig):
    name = "benchmarks.shop"

    def ready(self) -> None:
        if path := os.environ.get("BENCH_PURPOSES"):
            from django.db.backends.signals import connection_created

            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            connection_created.connect(lambda connection, **_: watch(connection, file), weak=False)


def watch(connection: Any, file: int) -> None:
    """Write a line to the file for each transaction of this connection."""
    blocks: list[Any] = [None]

    def wrapper(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        block = connection.atomic_blocks[0] if connection.atomic_blocks else None
        if block is None or block is not blocks[0]:
            os.write(file, f"{purpose()}\n".encode())
        blocks[0] = block
        return execute(sql, params, many, context)

    connection.execute_wrappers.append(wrapper)


def purpose() -> str:
    """Return the outermost function of the library on the stack, outside the loops of the worker itself."""
    found, innermost = "", ""
    frame = sys._getframe(1)
    while frame is not None:
        _, inside, module = frame.f_code.co_filename.rpartition("/django_delayq/")
        if inside:
            name = f"{module.removesuffix('.py').replace('/', '.')}.{frame.f_code.co_name}"
            innermost = innermost or name
            found = found if module.startswith(LOOPS) else name
        frame = frame.f_back
    return found or innermost
