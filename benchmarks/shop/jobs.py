"""The two handlers that every contestant runs, and the file in which they record that they ran.

Each record is 16 bytes: the deadline and the time of the call, as seconds since the epoch. One `write` in append mode
per call is atomic, so that all processes of a contestant share the file, and costs about two microseconds.
"""

from __future__ import annotations

import os
import struct
import time

RECORD = struct.Struct("<dd")
_PATH = os.environ.get("BENCH_RECORDS")
_file = os.open(_PATH, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644) if _PATH else -1


def record(due: float, count: int = 1) -> None:
    """Append `count` records of a call now."""
    if _file >= 0:
        os.write(_file, RECORD.pack(due, time.time()) * count)


def note(pk: int, due: float) -> None:
    """Do nothing."""
    record(due)


def settle(pk: int, due: float) -> None:
    """Lock an invoice, check that it is unpaid, and cancel it, as each rival's documentation leaves to the task."""
    from django.db import transaction

    from benchmarks.shop.models import Invoice

    with transaction.atomic():
        invoice = Invoice.objects.select_for_update().get(pk=pk)
        if invoice.status == "unpaid":
            invoice.status = "cancelled"
            invoice.save()
    record(0.0)


JOBS = {"note": note, "settle": settle}
