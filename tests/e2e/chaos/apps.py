"""For SQLite, which has no sessions on a server: names transactions in the process, for the triggers of `audit`."""

from __future__ import annotations

import os
import sqlite3
import uuid
from datetime import UTC, datetime
from typing import Any

from django.apps import AppConfig
from django.db.backends.signals import connection_created


class ChaosConfig(AppConfig):
    name = "tests.e2e.chaos"

    def ready(self) -> None:
        connection_created.connect(_add_functions, weak=False)


def _add_functions(connection: Any, **_: Any) -> None:
    if connection.vendor != "sqlite":
        return
    driver: sqlite3.Connection = connection.connection
    names = [""]

    def note(sql: str) -> None:
        """Name the transaction that a statement begins. The statements of triggers begin with a comment."""
        if not driver.in_transaction and not sql.startswith("--"):
            names[0] = uuid.uuid4().hex

    driver.set_trace_callback(note)
    driver.create_function("chaos_xid", 0, lambda: names[0])
    driver.create_function("chaos_now", 0, lambda: datetime.now(UTC).isoformat(" "))
    driver.create_function("chaos_user", 0, lambda: os.environ.get("DELAYQ_TEST_SESSION_USER", ""))
