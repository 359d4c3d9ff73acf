"""Threads of a test, each with a database connection of its own, which it closes."""

from __future__ import annotations

import threading
from collections.abc import Callable

from django.db import connection


def start_threads(*calls: Callable[[], object]) -> list[threading.Thread]:
    """Call all of them at once, each in a thread."""
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], object]) -> None:
        try:
            start.wait(60)
            call()
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    return threads


def in_threads(*calls: Callable[[], object]) -> None:
    """Call all of them at once, each in a thread, and wait until they have ended."""
    for thread in start_threads(*calls):
        thread.join(60)
